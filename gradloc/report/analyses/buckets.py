# SPDX-License-Identifier: Apache-2.0
"""Gradient analyses by reward-variance bucket, as read from a run's folder.

Whatever the source, an analysis is a dictionary of metrics under the guide's names
(``grad_norm/<bucket>/...``) and, where it could be had, the table of the groups' reward deviations.
"""

import csv
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ReportError
from ..logs import read_file

TERMS = ("task", "entropy", "kl")
LOSSES = ("policy", "entropy", "kl", "total")
ALL = "all"
FOLDER = "gradient_analysis"
_NAME = re.compile(r"grad_norm/(bucket_\d+|all)/(.+)")
_COSINE = re.compile(r"grad_cosine/task/(bucket_\d+)/(bucket_\d+)")
_DEPTH = 5


@dataclass
class Analysis:
    """One analysed step."""

    step: int
    values: dict[str, dict[str, float]]
    """Bucket, in order, ``all`` last -> what follows its name in the metric -> value."""
    cosines: dict[tuple[str, str], float] = field(default_factory=dict)
    """Pairs of buckets -> the cosine of their task gradients; both orders are there."""
    table: list[tuple[str, float]] = field(default_factory=list)
    """Bucket and reward deviation of each group; empty where the table could not be had."""

    @property
    def buckets(self) -> list[str]:
        """The variance buckets, lowest first, without ``all``."""
        return [name for name in self.values if name != ALL]

    @property
    def terms(self) -> list[str]:
        """The terms of the loss that this run has."""
        return [term for term in TERMS if any(term in found for found in self.values.values())]

    def get(self, bucket: str, name: str) -> float:
        """One metric; NaN when the run does not have it."""
        return self.values.get(bucket, {}).get(name, math.nan)


def from_metrics(step: int, row: dict[str, float]) -> Analysis | None:
    """Pick an analysis out of a step's metrics; None when no bucket was measured at this step."""
    values: dict[str, dict[str, float]] = {}
    cosines = {}
    for name, value in row.items():
        if value is None:
            continue
        found, pair = _NAME.fullmatch(name), _COSINE.fullmatch(name)
        if found and isinstance(value, int | float):
            values.setdefault(found[1], {})[found[2]] = float(value)
        elif pair:
            cosines[pair[1], pair[2]] = cosines[pair[2], pair[1]] = float(value)
    if not any(name != ALL for name in values):
        return None
    return Analysis(step, {name: values[name] for name in sorted(values, key=_order)}, cosines)


def _order(bucket: str) -> tuple[bool, int]:
    return (True, 0) if bucket == ALL else (False, int(bucket.rpartition("_")[2]))


def read_analyses(path: Path) -> tuple[dict[int, Analysis], list[str]]:
    """Read a run's analyses, by step.

    Args:
        path: the run's folder, or any folder that holds ``gradient_analysis/`` or metrics.

    Returns:
        The analyses, and a sentence for each thing that could not be read.

    Raises:
        ReportError: when there is none.
    """
    return read_steps(path, FOLDER, "gradient", _from_record, _from_logs)


Found = tuple[dict[int, Any], list[str]]
"""Analyses by step, and a sentence for each thing that could not be read."""


def read_steps(
    path: Path,
    folder: str,
    kind: str,
    parse: Callable[[dict], tuple[int, Any]],
    otherwise: Callable[[Path], Found] = lambda path: ({}, []),
) -> Found:
    """What the trainer wrote itself into ``folder/step_<N>.json``; where there is nothing, what can be had otherwise.

    Raises:
        ReportError: when there is no analysis of that kind.
    """
    if not path.is_dir():
        raise ReportError(f"{path} is not a folder: name the folder of a run.")
    found: dict[int, Any] = {}
    notes: list[str] = []
    for file in files(path, folder, "step_*.json"):
        try:
            step, analysis = parse(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            notes.append(f"{file.name} cannot be read ({error}) and was left out.")
            continue
        if analysis is not None:
            found[step] = analysis
    if not found:
        found, more = otherwise(path)
        notes += more
    if not found:
        why = f" {notes[0]}" if notes else ""
        raise ReportError(
            f"{path} holds no {kind} analysis: none was due, or trainer.{kind}_analysis_mode was off.{why}"
        )
    return dict(sorted(found.items())), notes


def _from_record(record: dict) -> tuple[int, Analysis | None]:
    # "NaN" and "Infinity" are how the trainer spells what JSON has no number for
    row = {name: float(value) for name, value in record["metrics"].items() if value is not None}
    analysis = from_metrics(int(record["global_step"]), row)
    if analysis is not None:
        analysis.table = [(group["bucket"], float(group["reward_std"])) for group in record["groups"]]
    return int(record["global_step"]), analysis


def _from_logs(path: Path) -> Found:
    """The trackers' own files: verl's ``file`` logger, CSV, TensorBoard; tables from our CSV."""
    found: dict[int, Analysis] = {}
    notes: list[str] = []
    for file in _log_files(path):
        try:
            recordings = read_file(file)
        except ReportError:  # a table without steps, a list of something else
            continue
        rows: dict[int, dict[str, float]] = {}
        for recording in recordings:
            notes += recording.notes
            for step, values in recording.rows:  # trackers with a row for each metric
                rows.setdefault(step, {}).update(values)
        for step, values in rows.items():
            analysis = from_metrics(step, values)
            if analysis is not None:
                found.setdefault(step, analysis)
    for file in files(path, FOLDER, "group_rv_table_step_*.csv"):
        step = int(file.stem.rpartition("_")[2])
        if step in found:
            found[step].table = read_table(file)
    return found, notes


def _log_files(path: Path) -> list[Path]:
    return [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and len(file.relative_to(path).parts) <= _DEPTH
        and (file.suffix.lower() in (".jsonl", ".csv") or ".tfevents." in file.name)
        and file.name != "events.jsonl"
    ]


def files(path: Path, folder: str, pattern: str) -> list[Path]:
    """The files in every folder of that name in a run, or in the run's own folder if it is one."""
    places = [path] if path.name == folder else sorted(path.rglob(folder))
    return [file for place in places for file in sorted(place.glob(pattern))]


def read_table(file: Path) -> list[tuple[str, float]]:
    """A ``group_rv_table`` CSV; lines that do not parse are left out."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    table = []
    for row in rows:
        try:
            table.append((row["bucket"], float(row["reward_std"])))
        except (KeyError, TypeError, ValueError):
            continue
    return table


def to_json(analysis: Analysis) -> dict:
    """What ``gradient_analysis_metrics_step_<N>.json`` holds."""
    return {
        "step": analysis.step,
        "buckets": {
            bucket: {name: _plain(value) for name, value in sorted(found.items())}
            for bucket, found in analysis.values.items()
        },
        "task_cosines": {f"{a}/{b}": _plain(value) for (a, b), value in sorted(analysis.cosines.items()) if a < b},
    }


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def from_json(file: Path) -> Analysis:
    """Read back what :func:`to_json` gave.

    Raises:
        ReportError: when it is something else.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        row = {
            f"grad_norm/{bucket}/{name}": value
            for bucket, found in data["buckets"].items()
            for name, value in found.items()
        }
        row |= {f"grad_cosine/task/{pair}": v for pair, v in data["task_cosines"].items()}
        analysis = from_metrics(int(data["step"]), row)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        analysis = None
    if analysis is None:
        raise ReportError(
            f"{file} is not a gradient_analysis_metrics file: make it with `gradloc-report buckets RUN_DIR --step N`."
        )
    return analysis
