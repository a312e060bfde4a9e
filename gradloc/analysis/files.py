# SPDX-License-Identifier: Apache-2.0
"""An analysis on disk: ``step_<N>.json`` with everything, and for buckets the group table as CSV; and in W&B."""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..record.analysis import GradientAnalysis, Group, QuartileAnalysis
from ..record.store import plain

_COLUMNS = ["bucket", "group_id", "reward_std"]


def write_record(root: str, name: str, record: GradientAnalysis | QuartileAnalysis) -> Path:
    """Write one analysis into a folder of this name in ``bisect_dump_dir``; returns the JSON file.

    A record of the same step, from before a resume, is replaced.
    """
    folder = Path(root) / name
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(record, GradientAnalysis):
        table = io.StringIO()
        writer = csv.DictWriter(table, [field.name for field in fields(Group)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(vars, record.groups))
        _replace(folder / f"group_rv_table_step_{record.global_step}.csv", table.getvalue())
    text = json.dumps(plain(record), allow_nan=False, ensure_ascii=False, indent=1)
    return _replace(folder / f"step_{record.global_step}.json", text + "\n")


def _replace(path: Path, text: str) -> Path:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    return partial.replace(path)


def log_group_table(trackers: Mapping[str, Any], record: GradientAnalysis) -> None:
    """Log each bucket's ``grad_norm/<bucket>/group_rv_table`` to W&B, if it is among verl's open clients."""
    rows: dict[str, list[list[Any]]] = {}
    for group in record.groups:
        rows.setdefault(group.bucket, []).append([getattr(group, column) for column in _COLUMNS])
    for client in (trackers[name] for name in ("wandb", "vemlp_wandb") if name in trackers):
        if client.run is None:
            continue
        tables = {
            f"grad_norm/{bucket}/group_rv_table": client.Table(columns=_COLUMNS, data=data)
            for bucket, data in rows.items()
        }
        # the step stays open: verl logs its scalars under the same one
        client.log(tables, step=record.global_step, commit=False)
