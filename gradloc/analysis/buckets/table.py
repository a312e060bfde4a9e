# SPDX-License-Identifier: Apache-2.0
"""The group table in Weights & Biases; other trackers have the CSV file."""

from collections.abc import Mapping
from typing import Any

from ...record.analysis import GradientAnalysis

_COLUMNS = ["bucket", "group_id", "reward_std"]


def log_group_table(trackers: Mapping[str, Any], record: GradientAnalysis) -> None:
    """Log ``grad_norm/<bucket>/group_rv_table`` for each bucket to the run that verl has opened.

    Args:
        trackers: verl's open clients by name; nothing happens unless wandb's is among them.
        record: the analysis.
    """
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
