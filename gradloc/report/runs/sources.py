# SPDX-License-Identifier: Apache-2.0
"""Reads metrics from whatever a trainer left behind; what a file is, its content says.

verl's ``file`` logger and its console log, TensorBoard, a CSV of W&B's, ``trainer_state.json``, the dicts that a
Hugging Face Trainer prints, and JSON of ``series: [[step, norm], ...]``.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...health.names import known_as
from ..errors import ReportError
from . import metrics as metrics_files
from .metrics import MEAN, Metrics, build, numbers

FORMATS = (
    "verl's file logger (JSONL) or console log, TensorBoard, a CSV with a step column, trainer_state.json, a Trainer's "
    "printed dicts, or JSON of `series: [[step, norm], ...]`"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CONSOLE = re.compile(r"\bstep:(\d+) - (.+)")
_TYPED = re.compile(r"^np\.\w+\((.*)\)$")
_PRINTED = re.compile(r"\{['\"].*\}")
_PAIR = re.compile(r"['\"]([\w/.@-]+)['\"]\s*:\s*['\"]?([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf|NaN|Infinity))\b")


def read(path: Path) -> tuple[Metrics, list[str]]:
    """The metrics of one file, or of a folder of TensorBoard's.

    Returns:
        The metrics, with ``actor/grad_norm`` where another trainer calls it otherwise, and a sentence for each thing
        that could not be read.

    Raises:
        ReportError: when there are none.
    """
    if not path.exists():
        raise ReportError(f"{path} does not exist: name a file or folder with a run's metrics.")
    if path.is_dir() or ".tfevents." in path.name or path.suffix.lower() == ".csv":
        found, notes = metrics_files.read(path)
    elif metrics_files.is_metrics_jsonl(path):
        found, notes = metrics_files.read_jsonl(path)
    else:
        found, notes = _read_text(path), []
    if not found:
        raise ReportError(" ".join([f"{path} has no metrics that can be read: it must be {FORMATS}.", *notes]))
    name_alike(found)
    return found, notes


def name_alike(metrics: Metrics) -> None:
    """Let another trainer's metrics go by verl's names, too."""
    for name, ours in list(known_as(metrics.series)):
        metrics.series.setdefault(ours, metrics.series[name])


def _read_text(path: Path) -> Metrics:
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    lines = re.split(r"[\r\n]+", text)  # a progress bar's lines end in \r alone
    rows = _from_document(text) or _from_records(lines) or _from_console(lines) or _from_printed(lines)
    return build(rows, path.name)


def _from_document(text: str) -> dict[int, dict[str, float]]:
    """One JSON value: trainer_state.json, a series, or a list of dicts."""
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    if isinstance(document, dict) and isinstance(document.get("series"), list):
        name = str(document.get("metric", ""))
        name = name if name.endswith("grad_norm") else MEAN
        pairs = [entry for entry in document["series"] if isinstance(entry, list) and len(entry) == 2]
        return {int(step): numbers({name: norm}) for step, norm in pairs if isinstance(step, int | float)}
    entries = document.get("log_history") if isinstance(document, dict) else document
    return _numbered(entries if isinstance(entries, list) else [document])


def _from_records(lines: list[str]) -> dict[int, dict[str, float]]:
    """JSON lines of flat dicts."""
    entries = []
    for line in lines:
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return _numbered(entries)


def _from_console(lines: list[str]) -> dict[int, dict[str, float]]:
    """verl's console logger: ``step:7 - actor/grad_norm:0.31 - ...``, behind whatever Ray puts before it."""
    rows: dict[int, dict[str, float]] = {}
    for line in lines:
        found = _CONSOLE.search(_COLOUR.sub("", line))
        if found:
            pairs = (part.rpartition(":") for part in found[2].split(" - "))
            values = {name.strip(): _TYPED.sub(r"\1", value.strip()) for name, _, value in pairs if name}
            rows.setdefault(int(found[1]), {}).update(numbers(values))
    return rows


def _from_printed(lines: list[str]) -> dict[int, dict[str, float]]:
    """A Trainer's stdout: ``{'loss': 0.1, 'grad_norm': 0.31, ...}`` among other things."""
    printed = (_PRINTED.search(_COLOUR.sub("", line)) for line in lines)
    return _numbered(dict(_PAIR.findall(found[0])) for found in printed if found)


def _numbered(entries: Iterable[Any]) -> dict[int, dict[str, float]]:
    """Rows by their step; entries that do not say theirs are counted, those with a norm alone."""
    rows: dict[int, dict[str, float]] = {}
    count = 0
    for entry in entries:
        values = numbers(entry) if isinstance(entry, dict) else {}
        if not any(name.endswith("grad_norm") for name in values):
            continue
        count += 1
        step = next((values[name] for name in metrics_files.STEP_COLUMNS if name in values), count)
        rows.setdefault(int(step), {}).update(values)
    return rows
