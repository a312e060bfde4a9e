# SPDX-License-Identifier: Apache-2.0
"""One JSON value or Python literal over a whole file: ``trainer_state.json``, a series, a list of dicts, a notebook."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from ...record.files import NAME, parse_json
from ..errors import ReportError
from .grammars import Json
from .lines import literal, read_lines
from .names import as_step, is_norm, is_training_loss, number, step_name
from .recording import READ_IN_ORDER, Recording, gather
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
    stem, made = source.path.stem, Recording(source.name, "JSON", notes=source.notes)
    is_named = is_norm(stem) or is_training_loss(stem)
    first = document[0] if isinstance(document, list) and document else None
    if is_named and _is_list_of(document, int | float) and len(document) > 1:
        made.rows, made.unit = [(at, {stem: float(value)}) for at, value in enumerate(document, 1)], "row"
        made.notes.append(f"{source.name} is a list of values, so its rows are numbered from 1.")
        return [made]
    if isinstance(first, list) and len(first) == 3 and isinstance(first[1], int):  # TensorBoard's time, step, value
        if not is_norm(stem):
            source.note_one_metric()
        document = {"grad_norm": [each[1:] for each in document if isinstance(each, list) and len(each) == 3]}
    elif first and _is_list_of(first, str):  # rows below their names
        document = {"columns": first, "data": document[1:]}
    if isinstance(document, dict):
        if isinstance(document.get("cells"), list):
            return _read_notebook(source, document["cells"])
        if isinstance(document.get("series"), list):
            made.format, name = "JSON of a series", str(document.get("metric", ""))
            document = {name if is_norm(name) else "grad_norm": document["series"]}
        elif isinstance(document.get("log_history"), list):
            made.format, document = "trainer_state.json", document["log_history"]
        else:
            document = _entries_in(document) or document
    made.rows = gather(_points(document)) if "columns" not in document else []
    if not made.rows:
        _add_rows(made, _entries_of(document, source.name) if isinstance(document, dict) else document)
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
        made.notes.append(f"{made.source} gives no step numbers, so its {READ_IN_ORDER}")


def _points(document: Any) -> list[tuple[int, str, float]]:
    """Return step, metric and value of each point of the series in a document, those of one step together."""
    found = ((as_step(number(step)), name, number(value)) for step, name, value in _series(document, ""))
    known = [(step, name, value) for step, name, value in found if step is not None and value is not None]
    return sorted(known, key=itemgetter(0)) if len({name for _, name, _ in known}) > 1 else known


def _series(part: Any, name: str) -> Iterator[tuple[Any, str, Any]]:
    """Step, metric and value of each point, as ClearML, Plotly, Comet and Aim export their curves."""
    if isinstance(part, list) and name and all(_is_list_of(pair, int | float) and len(pair) == 2 for pair in part):
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


def _is_list_of(part: Any, kind: Any) -> bool:
    return isinstance(part, list) and all(isinstance(each, kind) for each in part)


_AXES = (("x", "steps", "iters"), ("y", "values"))
"""The names of a series' steps and of its values."""


def _by_step(rows: dict[str, dict]) -> list[dict]:
    """Return rows that go by their steps, in the order of these; none where they go by something else."""
    if not all(str(key).isdecimal() and len(str(key)) < 16 for key in rows):
        return []
    return [{"step": int(key), **rows[key]} for key in sorted(rows, key=int)]


def _turned(columns: dict[str, dict]) -> dict[str, dict]:
    rows: dict[str, dict] = {}
    for name, values in columns.items():
        for key, value in values.items():
            rows.setdefault(key, {})[name] = value
    return rows


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
        if step_name(document) is not None and all(value.keys() == inner[0].keys() for value in inner):
            document = {name: list(values.values()) for name, values in document.items()}
        elif (by_step := _by_step(document)) or (by_step := _by_step(_turned(document))):
            return by_step
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
