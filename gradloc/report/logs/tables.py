# SPDX-License-Identifier: Apache-2.0
"""Tables with a head, and , ; or a tab between columns: W&B's panels and histories, TensorBoard's, one's own."""

import csv
import re
from collections.abc import Iterator

from ..errors import ReportError
from ..runs.metrics import MEAN
from .names import STEPS, is_norm, listed, number, step_of
from .recording import Recording, gather
from .source import Source

_TIMES = re.compile(r"relative time|wall time|^_?timestamp$|^_?runtime$|^time$|^date$", re.IGNORECASE)
_TAG = re.compile(r"(?:^|-)tag-(.+)$")


def is_table(source: Source) -> bool:
    """Whether the first two lines are a head and numbers below it."""
    if source.path.suffix.lower() in (".csv", ".tsv"):
        return not source.is_binary
    lines = [line for line in source.text_head.splitlines()[:40] if line.strip()]
    delimiter = _delimiter(lines)
    head = next(csv.reader(lines[:1], delimiter=delimiter), []) if delimiter else []
    if len(lines) < 2 or any(name and number(name) is not None for name in head):
        return False
    return _step_of(head) is not None or any(map(is_norm, head))


def read_table(source: Source) -> list[Recording]:
    """The runs of a table; raises ReportError where no column has the step or a gradient norm."""
    lines = (line for line in source.lines() if line.strip() and not line.startswith("sep="))
    first = next(lines, "").lstrip("\ufeff")
    delimiter = _delimiter([first]) or ","
    columns = [name.strip() for name in next(csv.reader([first], delimiter=delimiter, skipinitialspace=True), [])]
    step_at = _step_of(columns)
    if step_at is None and not any(map(is_norm, columns)):
        raise ReportError(
            f"{source.name} has no step column and none that looks like a gradient norm: rename one to `step`; "
            f"there is {listed(columns)}."
        )
    if step_at is None:
        times = [name for name in columns if _TIMES.search(name)]
        by = f"by its column {times[0]!r}" if times else "in the order of its rows"
        source.notes.append(f"{source.name} has no step column: the steps were counted, {by}.")
    rows = _rows(csv.reader(lines, delimiter=delimiter, skipinitialspace=True))
    has_decimal_comma = delimiter not in ", "
    lower = [name.lower() for name in columns]
    tag_at = next((lower.index(name) for name in ("tag", "key", "metric", "name") if name in lower), None)
    if step_at is not None and "value" in lower and (tag_at is not None or len(columns) <= 3):
        return _read_long(source, rows, step_at, lower.index("value"), tag_at, has_decimal_comma)
    return _read_wide(source, columns, rows, step_at, has_decimal_comma)


def _delimiter(lines: list[str]) -> str | None:
    """The delimiter that makes the most columns of the head."""
    if lines and lines[0].startswith("sep="):
        lines = lines[1:]
    if not lines:
        return None
    best = max(",;\t|", key=lines[0].count)
    if best in lines[0]:
        return best
    words = lines[0].split()
    return " " if len(words) > 1 and _step_of(words) is not None and any(map(is_norm, words)) else None


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


def _read_long(
    source: Source, rows: Iterator[list[str]], step_at: int, value_at: int, tag_at: int | None, has_decimal_comma: bool
) -> list[Recording]:
    """One value a row, and maybe the name of its metric."""
    stem = re.sub(r"(\.csv|\.tsv|\.gz|\.txt)+$", "", source.name)
    tag = _TAG.search(stem)
    alone = tag[1] if tag else stem
    if tag_at is None and not is_norm(alone):
        source.notes.append(f"{source.name} does not name its one metric: it was taken for the gradient norm.")
        alone = MEAN
    triples = []
    for cells in rows:
        step = step_of({"step": number(_cell(cells, step_at), has_decimal_comma)})
        value = number(_cell(cells, value_at), has_decimal_comma)
        if step is not None and value is not None:
            triples.append((step, _cell(cells, tag_at) or alone, value))
    form = "TensorBoard's CSV" if tag_at is None else "a CSV of values"
    return [Recording(source.name, form, rows=gather(triples), notes=source.notes)]


def _read_wide(
    source: Source, columns: list[str], rows: Iterator[list[str]], step_at: int | None, has_decimal_comma: bool
) -> list[Recording]:
    """A column for each metric, or W&B's for each run and metric; MIN and MAX are of what one point stands for."""
    runs: dict[str, dict[int, str]] = {}
    for place, column in enumerate(columns):
        if place == step_at or not column or _TIMES.search(column) or column.endswith(("__MIN", "_timestamp")):
            continue
        run, _, metric = column.rpartition(" - ")
        if column.endswith("__MAX"):
            metric = metric.removesuffix("__MAX") + "_max"
        runs.setdefault(run.strip(), {})[place] = metric.strip()
    shared = runs.pop("", {}) if len(runs) > 1 else {}
    is_wandb = any(runs) or any(column.endswith(("__MIN", "__MAX")) for column in columns)
    form = "W&B's CSV" if is_wandb else "CSV"
    made = {run: Recording(source.name, form, run if len(runs) > 1 else "", notes=source.notes) for run in runs}
    num_bad = 0
    for cells in rows:
        step = None if step_at is None else step_of({"step": number(_cell(cells, step_at), has_decimal_comma)})
        if step is None and step_at is not None:
            num_bad += 1
            continue
        for run, places in runs.items():
            known = {name: number(_cell(cells, at), has_decimal_comma) for at, name in (shared | places).items()}
            values = {name: value for name, value in known.items() if value is not None}
            if values and any(_cell(cells, at) for at in places):
                count = len(made[run].rows) + 1
                made[run].rows.append((count if step is None else step, values))
    if num_bad:
        source.notes.append(f"{num_bad} rows of {source.name} do not say their step and were left out.")
    return list(made.values())


def _cell(cells: list[str], place: int | None) -> str:
    return cells[place].strip() if place is not None and place < len(cells) else ""
