# SPDX-License-Identifier: Apache-2.0
"""One JSON value or Python literal over a whole file: ``trainer_state.json``, a series, a list of dicts, a notebook."""

import json
from collections.abc import Iterable
from typing import Any

from .lines import literal, read_lines, texts_of
from .names import as_step, is_norm, number, numbers, step_of
from .recording import Recording, gather
from .source import Source

LARGEST = 400_000_000
"""Bytes of a document, which is held as a whole."""


def is_document(source: Source) -> bool:
    """Whether a file is one JSON value, and not a value on each line."""
    head = source.text_head.lstrip()
    if head[:1] not in ("{", "[") or source.path.stat().st_size > LARGEST:
        return False
    first, newline, rest = head.partition("\n")
    try:
        json.loads(first)
    except (ValueError, RecursionError):  # over several lines, beyond the head, or a Python literal
        return not newline or not rest.strip() or first.strip() in ("{", "[") or rest[:1] in (" ", "\t")
    return not rest.strip()


def read_document(source: Source) -> list[Recording]:
    """The rows of a document; none where it is something else."""
    text = source.read().decode(source.coding or "utf-8", errors="replace").lstrip("\ufeff")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = literal(text)
    if document is None:
        return []
    made = Recording(source.name, "JSON", notes=source.notes)
    if not isinstance(document, dict):
        made.rows = gather(_single_values(source, document))
        if not made.rows:
            _add_rows(made, document)
    elif isinstance(document.get("cells"), list):
        return _read_notebook(source, document["cells"])
    elif isinstance(document.get("series"), list):
        made.format = "JSON of a series"
        name = str(document.get("metric", ""))
        name = name if is_norm(name) else "grad_norm"
        pairs = (pair for pair in document["series"] if isinstance(pair, list) and len(pair) == 2)
        _add_rows(made, [{"step": step, name: norm} for step, norm in pairs])
    elif isinstance(document.get("log_history"), list):
        made.format = "trainer_state.json"
        _add_rows(made, document["log_history"])
    else:
        _add_rows(made, _entries_of(document))
    if not made.rows and (texts := texts_of(document)):
        return read_lines(source, texts)
    return [made]


def _read_notebook(source: Source, cells: list[Any]) -> list[Recording]:
    """What a notebook's cells printed, read as a console."""
    outputs = [out for cell in cells if isinstance(cell, dict) for out in cell.get("outputs") or ()]
    texts = [str(part) for out in outputs if isinstance(out, dict) for part in out.get("text") or ()]
    return read_lines(source, "".join(texts).split("\n"))


def _add_rows(made: Recording, entries: Iterable[Any]) -> None:
    """Rows by the step that each says; rows with a norm and without a step are counted."""
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        values = numbers(entry.get("data", entry))
        step = step_of(numbers(entry))
        values.pop("step", None)
        if step is None and any(map(is_norm, values)):
            step = made.rows[-1][0] + 1 if made.rows else 1
            made.notes, made.is_counted = [f"The rows of {made.source} do not say their step: it was counted."], True
        if step is not None and values:
            made.rows.append((step, values))


_KEYS, _VALUES = ("metricName", "metric", "key", "tag"), ("metricValue", "value")
"""Of an entry that is one value of a metric."""


def _single_values(source: Source, entries: Any) -> list[tuple[int, str, float]]:
    """Step, metric and value of entries that hold one value each, or are TensorBoard's ``[wall time, step, value]``;
    empty where the first is something else."""
    first = entries[0] if isinstance(entries, list) and entries else None
    if isinstance(first, dict):
        key, value = (next((name for name in names if name in first), "") for names in (_KEYS, _VALUES))
        given = [(entry.get("step"), entry[key], entry[value]) for entry in entries if key in entry and value in entry]
    elif isinstance(first, list) and len(first) == 3 and isinstance(first[1], int):
        if not is_norm(source.path.stem):
            source.note_one_metric()
        given = [(entry[1], "grad_norm", entry[2]) for entry in entries if len(entry) == 3]
    else:
        given = []
    found = ((as_step(number(step)), str(name), number(value)) for step, name, value in given)
    return [(step, name, value) for step, name, value in found if step is not None and value is not None]


def _entries_of(document: dict) -> list[dict]:
    """The rows of ``{"step": [1, 2], "grad_norm": [0.5, 0.4]}``, as many as there are norms; of ``{"1": {...}}`` by
    step; and of pandas' ``to_json``, in any of its forms."""
    if isinstance(document.get("data"), list) and isinstance(document.get("columns"), list):
        return [dict(zip(document["columns"], row, strict=False)) for row in document["data"] if isinstance(row, list)]
    inner = [value for value in document.values() if isinstance(value, dict)]
    if len(inner) == len(document) > 0:
        if all(str(key).isdecimal() for key in document):
            return [{"step": int(key), **values} for key, values in document.items()]
        if all(value.keys() == inner[0].keys() for value in inner):
            document = {name: list(values.values()) for name, values in document.items()}
    lists = {name: values for name, values in document.items() if isinstance(values, list)}
    count = next((len(values) for name, values in lists.items() if is_norm(name)), 0)
    whole = {name: values for name, values in lists.items() if len(values) == count}
    return [{"step" if name == "steps" else name: values[at] for name, values in whole.items()} for at in range(count)]
