# SPDX-License-Identifier: Apache-2.0
"""An analysis on disk: ``step_<N>.json`` with everything; by bucket, the group table as CSV beside it."""

import csv
import io
import json
import os
from dataclasses import fields
from pathlib import Path

from ..record.analysis import GradientAnalysis, Group, QuartileAnalysis
from ..record.store import plain

FOLDER, QUARTILES_FOLDER = "gradient_analysis", "quartile_analysis"
"""Inside ``bisect_dump_dir``."""
TABLE_COLUMNS = tuple(field.name for field in fields(Group))


def write_analysis(root: str, record: GradientAnalysis) -> Path:
    """Write one analysis; one of the same step, from before a resume, is replaced.

    Args:
        root: ``bisect_dump_dir``, absolute.
        record: the analysis.

    Returns:
        The JSON file.
    """
    folder = Path(root) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    table = io.StringIO()
    writer = csv.DictWriter(table, TABLE_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(vars, record.groups))
    _replace(folder / f"group_rv_table_step_{record.global_step}.csv", table.getvalue())
    return write_record(root, FOLDER, record)


def write_record(root: str, name: str, record: GradientAnalysis | QuartileAnalysis) -> Path:
    """Write an analysis's JSON file into the folder of that name; returns the file."""
    folder = Path(root) / name
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plain(record), allow_nan=False, ensure_ascii=False, indent=1)
    return _replace(folder / f"step_{record.global_step}.json", text + "\n")


def _replace(path: Path, text: str) -> Path:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    return path
