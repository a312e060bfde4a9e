# SPDX-License-Identifier: Apache-2.0
"""One JSON value or Python literal over a whole file: ``trainer_state.json``, a series, a list of dicts, a notebook."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...record.files import NAME, parse_json
from ..errors import ReportError
from .grammars import Json
from .lines import literal, read_lines
from .names import as_step, is_norm, is_training_loss, number, step_name
from .recording import Recording, gather
from .source import Source
from .tables import read_columns
from .unwrap import texts_of


def is_document(source: Source) -> bool:
    """Return whether a file is one JSON value, and not a value on each line."""
    head = source.text_head.lstrip()
    if head[:1] not in ("{", "["):
        return False
    first, newline, rest = head.partition("\n")
    try:
        parse_json(first)
    except ValueError:  # over several lines, beyond the head, or a Python literal
        return not newline or not rest.strip() or first.strip() in ("{", "[") or rest[:1] in (" ", "\t")
    return not rest.strip()


def read_document(source: Source) -> list[Recording]:
    """Return the rows of a document; none where it is something else."""
    text = source.read().decode(source.coding or "utf-8", errors="replace").lstrip("\ufeff")
    try:
        document = parse_json(text)
    except json.JSONDecodeError:
        document = literal(text)
    except ValueError as error:
        raise ReportError(f"{source.name} is JSON that is not read: {error}.") from None
    if document is None:
        return []
    stem = source.path.stem
    if _is_of(document, int | float) and len(document) > 1 and (is_norm(stem) or is_training_loss(stem)):
        rows = [(at, {stem: float(value)}) for at, value in enumerate(document, 1)]
        notes = [*source.notes, f"{source.name} is a list of values: row 1 is the first."]
        return [Recording(source.name, "JSON", notes=notes, rows=rows, unit="row")]
    if isinstance(document, list) and document and _is_of(document[0], str):  # rows below their names
        document = {"columns": document[0], "data": document[1:]}
    if isinstance(document, dict) and "log_history" not in document:
        if "cells" not in document and (entries := _entries_in(document)):
            document = entries
    known = document if isinstance(document, dict) else {}
    made, entries = Recording(source.name, "JSON", notes=source.notes), None
    if isinstance(known.get("cells"), list):
        return _read_notebook(source, known["cells"])
    if isinstance(known.get("series"), list):
        name = str(known.get("metric", ""))
        name = name if is_norm(name) else "grad_norm"
        pairs = (pair for pair in known["series"] if isinstance(pair, list) and len(pair) == 2)
        made.format, entries = "JSON of a series", [{"step": step, name: norm} for step, norm in pairs]
    elif isinstance(known.get("log_history"), list):
        made.format, entries = "trainer_state.json", known["log_history"]
    else:
        values = _single_values(source, document) if "columns" not in known else []
        made.rows = gather(sorted(values) if known else values)
    if not made.rows:
        others = _entries_of(known, source.name) if known else document
        _add_rows(made, others if entries is None else entries)
    if not made.rows and (texts := texts_of(document)):
        return read_lines(source, "\n".join(texts))
    return [made]


def _entries_in(document: dict, depth: int = 3) -> list[Any]:
    """Return the one list of dicts in a document, as ``{"data": {"events": [{"metric": ..., "value": ...}]}}``, or the
    one whose first dict says a step; empty where there are none or several.
    """
    lists = [part for part in document.values() if isinstance(part, list) and part and isinstance(part[0], dict)]
    inner = (part for part in document.values() if isinstance(part, dict)) if depth else ()
    lists += filter(None, (_entries_in(part, depth - 1) for part in inner))
    lists = [part for part in lists if step_name(part[0]) is not None] if len(lists) > 1 else lists
    return lists[0] if len(lists) == 1 else []


def _read_notebook(source: Source, cells: list[Any]) -> list[Recording]:
    """Return the tables that a notebook's cells drew, as a Trainer draws its steps; else what they printed, read as a
    console.
    """
    outputs = [output for cell in _dicts(cells) for output in _dicts(cell.get("outputs"))]
    tables = []
    for data in _dicts([output.get("data") for output in outputs]):
        rows = [re.findall(r"<t[hd][^<>]*>([^<]*)<", row) for row in _text(data.get("text/html")).split("<tr")[1:]]
        if len(rows) > 1 and step_name(rows[0]) is not None:
            tables += read_columns(source, rows[0], iter(rows[1:]), form="a notebook's table")
    return tables or read_lines(source, "".join(_text(output.get("text")) for output in outputs))


def _dicts(part: Any) -> list[dict[str, Any]]:
    return [each for each in part if isinstance(each, dict)] if isinstance(part, list) else []


def _text(part: Any) -> str:
    """Return a notebook's text, which is one string or a list of them."""
    parts = part if isinstance(part, list) else [part]
    return "".join(each for each in parts if isinstance(each, str))


def _add_rows(made: Recording, entries: Iterable[Any]) -> None:
    """Add the rows of entries as of JSON lines."""
    lines = Json()
    for entry in _dicts(entries):
        lines.take_entry(entry, "")
    lines.resolve()
    made.rows, made.unit = lines.rows[""], lines.unit
    if made.unit == "row":
        made.notes.append(f"The rows of {made.source} do not say their step: they are named by their place.")


def _single_values(source: Source, entries: Any) -> list[tuple[int, str, float]]:
    """Step, metric and value of TensorBoard's ``[wall time, step, value]``, and of series with an x and a y wherever
    they are in the document; empty where it is something else."""
    first = entries[0] if isinstance(entries, list) and entries else None
    if isinstance(first, list) and len(first) == 3 and isinstance(first[1], int):
        if not is_norm(source.path.stem):
            source.note_one_metric()
        given = [(entry[1], "grad_norm", entry[2]) for entry in entries if isinstance(entry, list) and len(entry) == 3]
    else:
        given = list(_series(entries, ""))
    found = ((as_step(number(step)), str(name), number(value)) for step, name, value in given)
    return [(step, name, value) for step, name, value in found if step is not None and value is not None]


def _series(part: Any, name: str) -> Iterator[tuple[Any, str, Any]]:
    """Step, metric and value of each point, as ClearML, Plotly, Comet and Aim export their curves."""
    if isinstance(part, list) and name and all(_is_of(pair, int | float) and len(pair) == 2 for pair in part):
        yield from ((step, name, value) for step, value in part)
    elif isinstance(part, list):
        for inner in part:
            yield from _series(inner, name)
    elif isinstance(part, dict) and len(name) <= NAME:
        x, y = (next((part[key] for key in keys if isinstance(part.get(key), list)), None) for keys in _AXES)
        if x is not None and y is not None and len(x) == len(y):
            own = next((part[key] for key in ("name", "metricName", "metric") if isinstance(part.get(key), str)), "")
            own = own if own and not name.endswith(own) else ""
            yield from ((step, f"{name}/{own}".strip("/") or "value", value) for step, value in zip(x, y, strict=True))
            return
        for key, inner in part.items():
            yield from _series(inner, f"{name}/{key}".strip("/")) if isinstance(inner, dict | list) else ()


def _has_gaps(steps: list[Any]) -> bool:
    """Return whether steps that are mostly as far apart lack some, between the first and the last."""
    known = [number(step) for step in steps]
    gaps = Counter(later - step for step, later in pairwise(known[1:-1])) if None not in known else Counter()
    return len(gaps) > 1 and 2 * gaps.most_common(1)[0][1] > gaps.total()


def _is_of(part: Any, kind: Any) -> bool:
    """Return whether something is a list of texts, or of numbers."""
    return isinstance(part, list) and all(isinstance(each, kind) for each in part)


_AXES = (("x", "steps", "iters"), ("y", "values"))
"""The names of a series' steps and of its values."""


def _entries_of(document: dict, source: str) -> list[dict]:
    """Return the rows of ``{"step": [1, 2], "grad_norm": [0.5, 0.4]}``, as many as there are norms or losses; of
    ``{"1": {...}}`` by step; of ``{"loss": {"1": 0.5}}``; and of pandas' ``to_json``, in any of its forms.
    """
    rows = document.get("data", document.get("rows"))
    if isinstance(rows, list) and isinstance(document.get("columns"), list):
        names = [*map(str, document["columns"])]
        return [dict(zip(names, row, strict=False)) for row in rows if isinstance(row, list)]
    inner = [value for value in document.values() if isinstance(value, dict)]
    if len(inner) == len(document) > 0:
        if all(str(key).isdecimal() and len(str(key)) < 16 for key in document):
            return [{"step": int(key), **values} for key, values in document.items()]
        is_flat = not any(isinstance(each, dict | list) for value in inner for each in value.values())
        is_by_step = all(str(key).isdecimal() and len(str(key)) < 16 for value in inner for key in value)
        if is_flat and is_by_step and step_name(document) is None:
            by_step: dict[int, dict] = {}
            for name, values in document.items():
                for key, value in values.items():
                    by_step.setdefault(int(key), {"step": int(key)})[name] = value
            return [by_step[step] for step in sorted(by_step)]
        if is_flat and all(value.keys() == inner[0].keys() for value in inner):
            document = {name: list(values.values()) for name, values in document.items()}
    lists = {str(name): values for name, values in document.items() if isinstance(values, list)}
    if "train" in lists and is_training_loss(Path(source).stem):  # loss_history.json
        lists = {f"{name}_loss" if name in ("train", "val") else name: values for name, values in lists.items()}
    count = next((len(values) for name, values in lists.items() if is_norm(name) or is_training_loss(name)), 0)
    whole = {name: values for name, values in lists.items() if len(values) == count}
    if any(0.8 < len(values) / count < 1.25 and name not in whole for name, values in lists.items() if count):
        raise ReportError(f"{source} has lists of different lengths, so a value could be given another's step.")
    name = None if inner else step_name(whole)
    if name is not None and any(map(is_norm, whole)) and _has_gaps(whole[name]):
        del whole[name]  # each list may lack others: a value is known by its place alone
    if step_name(whole) is None and not any(map(is_norm, whole)):
        whole["epoch"] = [*range(1, count + 1)]  # as Keras keeps its history
    return [{"step" if name == "steps" else name: values[at] for name, values in whole.items()} for at in range(count)]
