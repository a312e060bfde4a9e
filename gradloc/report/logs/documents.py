# SPDX-License-Identifier: Apache-2.0
"""One JSON value over a whole file: ``trainer_state.json``, ``series: [[step, norm], ...]``, a list of dicts."""

import json
from typing import Any

from ..runs.metrics import MEAN
from .names import is_norm, number, numbers, step_of
from .recording import Recording, Row
from .source import Source

LARGEST = 400_000_000
"""Bytes of a document: it has to be held as a whole."""


def is_document(source: Source) -> bool:
    """Whether a file is one JSON value, and not a value on each line."""
    head = source.text_head.lstrip()
    if head[:1] not in ("{", "[") or source.path.stat().st_size > LARGEST:
        return False
    first, newline, rest = head.partition("\n")
    try:
        json.loads(first)
    except ValueError:  # over several lines, or beyond the head
        return not newline or first.strip() in ("{", "[") or rest[:1] in (" ", "\t")
    return not rest.strip()


def read_document(source: Source) -> list[Recording]:
    """The rows of a document; none where it is something else."""
    try:
        document = json.loads(source.read().decode(source.coding or "utf-8", errors="replace").lstrip("\ufeff"))
    except (ValueError, RecursionError):
        return []
    found = Recording(source.name, "JSON", notes=source.notes)
    if isinstance(document, dict) and isinstance(document.get("series"), list):
        name = str(document.get("metric", ""))
        name = name if is_norm(name) else MEAN
        pairs = [entry for entry in document["series"] if isinstance(entry, list) and len(entry) == 2]
        known = [(number(step), number(norm)) for step, norm in pairs]
        found.format = "JSON of a series"
        found.rows = [(int(s), {name: n}) for s, n in known if s is not None and abs(s) < 2**53 and n is not None]
        return [found] if found.rows else []
    entries = document.get("log_history") if isinstance(document, dict) else document
    if isinstance(document, dict) and isinstance(entries, list):
        found.format = "trainer_state.json"
    elif isinstance(document, dict):
        return _columns(found, document)
    found.rows = _numbered(entries if isinstance(entries, list) else [document], found)
    return [found] if found.rows else []


def _numbered(entries: list[Any], found: Recording) -> list[Row]:
    """Rows by the step that each says; those that do not are counted, where they have a norm."""
    rows: list[Row] = []
    for entry in entries:
        values = numbers(entry.get("data", entry)) if isinstance(entry, dict) else {}
        step = step_of(numbers(entry)) if isinstance(entry, dict) else None
        if step is None and any(map(is_norm, values)):
            step = rows[-1][0] + 1 if rows else 1
            found.notes = [f"The rows of {found.source} do not say their step: it was counted."]
        if step is not None and values:
            rows.append((step, values))
    return rows


def _columns(found: Recording, document: dict) -> list[Recording]:
    """``{"step": [1, 2], "grad_norm": [0.5, 0.4]}``, or a single row."""
    lists = {str(name): values for name, values in document.items() if isinstance(values, list) and values}
    name = next((name for name in lists if is_norm(name)), None)
    if name is None:
        return []
    steps = next((values for key, values in lists.items() if key in ("step", "steps", "_step", "global_step")), None)
    if steps is None:
        found.notes = [f"{found.source} has no list of steps: its entries were counted."]
    same = {key: values for key, values in lists.items() if len(values) == len(lists[name])}
    for at in range(len(lists[name])):
        step = number(steps[at]) if steps is not None and at < len(steps) else at + 1
        values = numbers({key: values[at] for key, values in same.items()})
        if step is not None and values:
            found.rows.append((int(step), values))
    return [found]
