# SPDX-License-Identifier: Apache-2.0
"""Reads a run's metrics: verl's ``file`` logger (JSONL), a CSV, or TensorBoard event files.

Whatever the source, the result is one list of steps and, per metric, one value per step (None where
the step has none). A step that was logged twice, as a resumed run does, keeps the later values.
"""

import csv
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

MEAN = "actor/grad_norm"
MAX = "actor/grad_norm_max"
STEP_COLUMNS = ("step", "_step", "global_step", "trainer/global_step", "training/global_step")


@dataclass
class Metrics:
    """Metrics over steps, ascending."""

    source: str = ""
    """The file's or folder's name."""
    steps: list[int] = field(default_factory=list)
    series: dict[str, list[float | None]] = field(default_factory=dict)
    verdicts: list[str] = field(default_factory=list)
    """What the ``file`` logger was told of events, on lines of their own."""

    def __bool__(self) -> bool:
        return bool(self.steps)

    def get(self, name: str) -> list[float | None]:
        """The values of one metric, one per step; all None when there is no such metric."""
        return self.series.get(name) or [None] * len(self.steps)

    def finite(self, name: str) -> list[float]:
        """The finite values of one metric, in order."""
        return [v for v in self.get(name) if v is not None and math.isfinite(v)]

    def known(self, name: str) -> list[tuple[int, float]]:
        """The steps and values at which one metric is finite, in order."""
        pairs = zip(self.steps, self.get(name), strict=True)
        return [(step, value) for step, value in pairs if value is not None and math.isfinite(value)]


def build(rows: dict[int, dict[str, float]], source: str) -> Metrics:
    """Turn ``{step: {name: value}}`` into columns."""
    steps = sorted(rows)
    names = sorted({name for row in rows.values() for name in row})
    series = {name: [rows[step].get(name) for step in steps] for name in names}
    return Metrics(source, steps, series)


def read_jsonl(path: Path) -> tuple[Metrics, list[str]]:
    """Lines ``{"step": N, "data": {name: value}}`` as verl's file logger writes them.

    Python's own spelling of NaN is accepted: verl writes it.
    """
    rows: dict[int, dict[str, float]] = {}
    bad: list[int] = []
    verdicts: list[str] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            step, data = int(entry["step"]), dict(entry["data"])
        except (ValueError, KeyError, TypeError):
            bad.append(number)
            continue
        rows.setdefault(step, {}).update(numbers(data))
        if isinstance(said := data.get("gradloc/verdict"), list):
            verdicts += map(str, said)
    found = build(rows, path.name)
    found.verdicts = verdicts
    return found, _left_out(bad, path.name, is_cut=bool(lines[-1].strip()))


def _left_out(bad: list[int], name: str, is_cut: bool) -> list[str]:
    if not bad:
        return []
    if len(bad) == 1:
        why = "is cut off" if is_cut else "cannot be read"
        return [f"Line {bad[0]} of {name} {why} and was left out."]
    return [f"{len(bad)} lines of {name} cannot be read and were left out (first: line {bad[0]})."]


def numbers(data: dict) -> dict[str, float]:
    """The entries that are numbers, or spell one."""
    made = {}
    for name, value in data.items():
        number = _number(value)
        if number is not None:
            made[str(name)] = number
    return made


def _number(value) -> float | None:
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def read_csv(path: Path) -> tuple[Metrics, list[str]]:
    """A table with a step column; W&B's ``<run> - <metric>`` column names are understood."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        columns = [name for name in reader.fieldnames or [] if name]
        step = next((c for c in columns if c.strip().lower() in STEP_COLUMNS), None)
        if step is None:
            return Metrics(path.name), [f"{path.name} has no step column and was left out."]
        names = {c: c.rpartition(" - ")[2].strip() for c in columns if c != step and not c.endswith(("__MIN", "__MAX"))}
        rows: dict[int, dict[str, float]] = {}
        for line in reader:
            at = _number(line[step])
            if at is None or not math.isfinite(at):
                continue
            values = {name: _number(line.get(c) or None) for c, name in names.items()}
            found = {k: v for k, v in values.items() if v is not None}
            rows.setdefault(int(at), {}).update(found)
    return build(rows, path.name), []


def read_tensorboard(folder: Path) -> tuple[Metrics, list[str]]:
    """Scalars of the TensorBoard event files in one folder; needs the ``tensorboard`` package."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        return Metrics(folder.name), [
            f"{folder.name} holds TensorBoard files: to read them, `pip install tensorboard`."
        ]
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    rows: dict[int, dict[str, float]] = {}
    for name in accumulator.Tags()["scalars"]:
        for item in accumulator.Scalars(name):
            rows.setdefault(item.step, {})[name] = float(item.value)
    return build(rows, folder.name), []


def is_metrics_jsonl(path: Path) -> bool:
    """Whether a file's first line looks like verl's file logger wrote it."""
    try:
        with path.open("rb") as file:
            entry = json.loads(file.readline(1 << 20))
    except (OSError, ValueError):
        return False
    return isinstance(entry, dict) and "step" in entry and isinstance(entry.get("data"), dict)


def is_metrics_csv(path: Path) -> bool:
    """Whether a CSV has a step column and at least one other."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            header = next(csv.reader(file), [])
    except (OSError, csv.Error):
        return False
    return len(header) > 1 and any(name.strip().lower() in STEP_COLUMNS for name in header)


def read(path: Path) -> tuple[Metrics, list[str]]:
    """Read one metrics source by what it is: TensorBoard's folder or file, a CSV, or JSONL."""
    if path.is_dir():
        return read_tensorboard(path)
    if ".tfevents." in path.name:
        return read_tensorboard(path.parent)
    if path.suffix.lower() == ".csv":
        return read_csv(path)
    return read_jsonl(path)
