# SPDX-License-Identifier: Apache-2.0
"""Tables with a head, and , ; or a tab between columns: W&B's panels and histories, TensorBoard's, one's own."""

import csv
import re
from collections.abc import Iterator

from ..errors import ReportError
from ..runs.metrics import MEAN
from .names import STEPS, is_norm, listed, number
from .recording import Recording, gather
from .source import Source

_TIMES = re.compile(r"relative time|wall time|^_?timestamp$|^_?runtime$|^time$|^date$", re.IGNORECASE)
_ENDS = ("__MIN", "__MAX")
_TAG = re.compile(r"(?:^|-)tag-(.+)$")


def is_table(source: Source) -> bool:
    """Whether the first two lines are a head and numbers below it."""
    lines = [line for line in source.text_head.splitlines()[:40] if line.strip()]
    between = _between(lines)
    if source.path.suffix.lower() in (".csv", ".tsv"):
        return not source.is_binary
    head = next(csv.reader(lines[:1], delimiter=between), []) if between else []
    if len(lines) < 2 or any(name and number(name, between != ",") is not None for name in head):
        return False
    return _step_of(head) is not None or any(map(is_norm, head))


def read_table(source: Source) -> list[Recording]:
    """The runs of a table.

    Raises:
        ReportError: when no column says the step and none looks like a gradient norm; names the columns.
    """
    lines = (line for line in source.lines() if line.strip() and not line.startswith("sep="))
    first = next(lines, "").lstrip("\ufeff")
    between = _between([first]) or ","
    reader = _rows(csv.reader(lines, delimiter=between))
    head = next(csv.reader([first], delimiter=between), [])
    columns = [name.strip() for name in head]
    notes: list[str] = []
    at = _step_of(columns)
    if at is None and not any(map(is_norm, columns)):
        raise ReportError(
            f"{source.name} has no step column and none that looks like a gradient norm: rename one to `step`; "
            f"there is {listed(columns)}."
        )
    if at is None:
        times = [name for name in columns if _TIMES.search(name)]
        by = f"by its column {times[0]!r}" if times else "in the order of its rows"
        notes.append(f"{source.name} has no step column: the steps were counted, {by}.")
    is_comma = between != ","
    long = _long(columns)
    if long is not None and at is not None:
        return _read_long(source, reader, at, long, is_comma)
    return _read_wide(source, columns, reader, at, is_comma, notes)


def _between(lines: list[str]) -> str | None:
    """What stands between two columns: of those that are there, the one that makes most of the head."""
    if lines and lines[0].startswith("sep="):
        lines = lines[1:]
    counts = {mark: lines[0].count(mark) for mark in ",;\t|"} if lines else {}
    best = max(counts, key=counts.__getitem__, default=",")
    return best if counts.get(best) else None


def _rows(reader: Iterator[list[str]]) -> Iterator[list[str]]:
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error:  # a field beyond all bounds, a NUL: only this row is lost
            continue


def _step_of(columns: list[str]) -> int | None:
    plain = [name.strip().strip('"').lower() for name in columns]
    for name in (*STEPS, "steps"):
        if name in plain:
            return plain.index(name)
    return next((at for at, name in enumerate(plain) if name.endswith(("/global_step", " step"))), None)


def _long(columns: list[str]) -> tuple[int, int | None] | None:
    """Places of value and metric's name in a table with one value a row."""
    plain = [name.lower() for name in columns]
    if "value" not in plain:
        return None
    tag = next((plain.index(name) for name in ("tag", "key", "metric", "name") if name in plain), None)
    return (plain.index("value"), tag) if tag is not None or len(columns) <= 3 else None


def _read_long(source: Source, reader, at: int, long: tuple[int, int | None], is_comma: bool) -> list[Recording]:
    value_at, tag_at = long
    stem = re.sub(r"(\.csv|\.tsv|\.gz|\.txt)+$", "", source.name)
    tag = _TAG.search(stem)
    alone = tag[1] if tag else stem
    notes = []
    if tag_at is None and not is_norm(alone):
        notes.append(f"{source.name} does not name its one metric: it was taken for the gradient norm.")
        alone = MEAN
    triples = []
    for cells in reader:
        step, value = (number(_cell(cells, place), is_comma) for place in (at, value_at))
        if step is not None and abs(step) < 2**53 and value is not None:
            triples.append((int(step), _cell(cells, tag_at) or alone if tag_at is not None else alone, value))
    found = Recording(source.name, "TensorBoard's CSV" if tag_at is None else "a CSV of values", rows=gather(triples))
    found.notes = [*source.notes, *notes]
    return [found]


def _read_wide(source: Source, columns, reader, at: int | None, is_comma: bool, notes: list[str]) -> list[Recording]:
    """A column for each metric, or W&B's for each run and metric; MIN and MAX are of what one point stands for."""
    runs: dict[str, dict[int, str]] = {}
    for place, column in enumerate(columns):
        if place == at or not column or _TIMES.search(column) or column.endswith(("__MIN", "_timestamp")):
            continue
        run, _, metric = column.rpartition(" - ")
        if column.endswith("__MAX"):
            metric = metric.removesuffix("__MAX") + "_max"
        runs.setdefault(run.strip(), {})[place] = metric.strip()
    shared = runs.pop("", {}) if len(runs) > 1 else {}
    is_wandb = any(run for run in runs) or any(column.endswith(_ENDS) for column in columns)
    made = {
        run: Recording(source.name, "W&B's CSV" if is_wandb else "CSV", run if len(runs) > 1 else "") for run in runs
    }
    num_bad = 0
    for cells in reader:
        said = number(_cell(cells, at), is_comma) if at is not None else 0.0
        if said is None or abs(said) > 2**53:
            num_bad += 1
            continue
        for run, places in runs.items():
            values = {
                name: found
                for place, name in (shared | places).items()
                if (found := number(_cell(cells, place), is_comma)) is not None
            }
            if values and any(_cell(cells, place) for place in places):
                rows = made[run].rows
                rows.append((int(said) if at is not None else len(rows) + 1, values))
    if num_bad:
        notes = [*notes, f"{num_bad} rows of {source.name} do not say their step and were left out."]
    for found in made.values():
        found.notes = [*source.notes, *notes]
    return [found for found in made.values() if found.rows]


def _cell(cells: list[str], place: int | None) -> str:
    return cells[place].strip() if place is not None and place < len(cells) else ""
