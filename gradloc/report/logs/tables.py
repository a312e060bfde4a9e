# SPDX-License-Identifier: Apache-2.0
"""Tables with a head, and , ; or a tab between columns: W&B's panels and histories, TensorBoard's, one's own."""

import csv
import re
from collections.abc import Iterator
from itertools import chain, islice

from ...words.text import plural
from ..errors import ReportError
from .names import STEPS, is_norm, listed, number, step_of
from .recording import Recording, gather
from .source import Source

_TIMES = re.compile(r"relative time|wall time|^_?timestamp$|^_?runtime$|^time$|^date$", re.IGNORECASE)
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?")
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+")
SAMPLE = 200
"""Rows by which a table is understood."""
_TAG = re.compile(r"(?:^|-)tag-(.+)$")


def is_table(source: Source) -> bool:
    """Whether the first two lines are a head and numbers below it."""
    if source.path.suffix.lower() in (".csv", ".tsv"):
        return not source.is_binary
    lines = [line for line in source.text_head.splitlines()[:40] if line.strip() and not line.startswith(("# ", "=="))]
    delimiter = _delimiter(lines)
    head = lines[0].split() if delimiter == " " else []
    if delimiter and delimiter != " ":
        head = next(csv.reader(lines[:1], delimiter=delimiter), [])
    if len(lines) < 2 or any(name and number(name) is not None for name in head):
        return False
    if _step_of(head) is None and not any(map(is_norm, head)):
        return False
    rows = ((line.split() if delimiter == " " else line.split(delimiter or ",")) for line in lines[1:])
    return any(abs(len(row) - len(head)) <= 1 and any(number(cell, True) is not None for cell in row) for row in rows)


def read_table(source: Source) -> list[Recording]:
    """The runs of a table; raises ReportError where no column has the step or a gradient norm."""
    lines = (line for line in source.lines() if line.strip() and not line.startswith(("sep=", "# ", "==")))
    first = next(lines, "").lstrip("\ufeff")
    second = next(lines, "")
    lines = chain([second], lines)
    delimiter = _delimiter([first, second]) or ","
    reader: Iterator[list[str]] = map(str.split, lines)  # as pandas prints a frame
    if delimiter != " ":
        reader = _rows(csv.reader(lines, delimiter=delimiter, skipinitialspace=True))
    columns = first.split()
    if delimiter != " ":
        columns = [name.strip() for name in next(csv.reader([first], delimiter=delimiter, skipinitialspace=True), [])]
    return read_columns(source, columns, reader, delimiter)


def read_columns(
    source: Source, columns: list[str], reader: Iterator[list[str]], delimiter: str = ","
) -> list[Recording]:
    """The runs of a table whose head and rows are had, as texts; raises as :func:`read_table`."""
    sample = list(islice(reader, SAMPLE))
    columns = _with_index(source, columns, sample)
    rows = chain(sample, reader)
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
    has_decimal_comma = delimiter not in ", " or _has_decimal_comma(source, sample)
    _check_steps(source, columns, sample, step_at, has_decimal_comma)
    lower = [name.lower() for name in columns]
    tag_at = next((lower.index(name) for name in ("tag", "key", "metric", "name") if name in lower), None)
    if step_at is not None and "value" in lower and (tag_at is not None or len(columns) <= 3):
        return _read_long(source, rows, step_at, lower.index("value"), tag_at, has_decimal_comma)
    return _read_wide(source, columns, rows, step_at, has_decimal_comma)


def _with_index(source: Source, columns: list[str], sample: list[list[str]]) -> list[str]:
    """The columns with a name for the one that a frame's rows are numbered by; raises ReportError where the rows do
    not fit the head."""
    if sample and len(columns) > 1 and len(sample[0]) == 1 and _step_of(sample[0]) is not None:
        return [sample.pop(0)[0], *columns]  # pandas prints an index's name on a line of its own
    lengths = [len(cells) - (len(cells) > len(columns) and not cells[-1].strip()) for cells in sample]
    if len(lengths) > 1 and all(length == len(columns) + 1 for length in lengths) and _is_index(columns, sample):
        return ["", *columns]
    num_off = sum(length != len(columns) for length in lengths)
    if num_off > len(lengths) / 2:
        raise ReportError(
            f"{source.name} has {plural(len(columns), 'column')} in its head and {lengths[-1]} in its rows, so a value "
            "could be taken for another: write it again as a CSV, such as by DataFrame.to_csv."
        )
    return columns


def _is_index(columns: list[str], sample: list[list[str]]) -> bool:
    """Whether the first of the rows' cells counts them, and is not a step beside a number that a comma has cut."""
    first = [number(cells[0]) for cells in sample]
    step_at = _step_of(columns)
    steps = {cells[0 if step_at is None else step_at + 1] for cells in sample}
    return first == sorted(first, key=lambda count: -1.0 if count is None else count) and len(steps) == len(sample)


def _has_decimal_comma(source: Source, sample: list[list[str]]) -> bool:
    """Whether quoted numbers are as 0,49; raises ReportError where others are as 0.49."""
    cells = [cell.strip() for row in sample for cell in row]
    commas = [cell for cell in cells if _DECIMAL_COMMA.fullmatch(cell) and not _THOUSANDS.fullmatch(cell)]
    points = [cell for cell in cells if re.fullmatch(r"[-+]?\d+\.\d+", cell)]
    if commas and points:
        raise ReportError(
            f"{source.name} has numbers as {commas[0]} and as {points[0]}: write it again with one decimal sign."
        )
    return bool(commas)


def _check_steps(
    source: Source, columns: list[str], sample: list[list[str]], step_at: int | None, has_decimal_comma: bool
) -> None:
    """Raises ReportError where most steps are no whole numbers: then another column stands in their place."""
    steps = [number(_cell(cells, step_at), has_decimal_comma) for cells in sample] if step_at is not None else []
    odd = [step for step in steps if step is not None and not step.is_integer()]
    if len(odd) > len(steps) / 2:
        raise ReportError(
            f"{source.name}: the column {columns[step_at or 0]!r} holds no whole numbers (such as "
            f"{_cell(sample[0], step_at) or 'nothing'}): it is not the step, or columns are shifted."
        )


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
    below = lines[1].split() if len(lines) > 1 else []
    has_step = _step_of(words) is not None or len(below) == 1 and _step_of(below) is not None
    return (
        " "
        if has_step and words and any(map(is_norm, words)) and not any(":" in word or "=" in word for word in words)
        else None
    )


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
        alone = "grad_norm"
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
    num_bad = num_rows = 0
    for cells in rows:
        num_rows += 1
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
    for recording in made.values():
        recording.receipt = f"{num_rows - num_bad:,} of {num_rows:,} rows read"
        recording.is_counted = step_at is None
    if num_bad > num_rows / 2:
        raise ReportError(
            f"{source.name}: {num_bad:,} of its {num_rows:,} rows do not say their step; it was not read."
        )
    if num_bad:
        source.notes.append(f"{num_bad} rows of {source.name} do not say their step and were left out.")
    return list(made.values())


def _cell(cells: list[str], place: int | None) -> str:
    return cells[place].strip() if place is not None and place < len(cells) else ""
