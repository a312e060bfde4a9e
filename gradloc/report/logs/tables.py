# SPDX-License-Identifier: Apache-2.0
"""Tables: with , ; or a tab between columns (W&B's panels and histories, TensorBoard's, one's own), with a frame around
them (as rich, tabulate, Stable-Baselines and Markdown print them), parquet and spreadsheets."""

import csv
import importlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice, pairwise
from typing import Any, BinaryIO
from zipfile import ZipFile

from ...explain.text import plural
from ...record.files import COLUMNS, DOCUMENT, TAGS, VALUES, columns_of_parquet
from ..errors import ReportError
from .grammars import HEADED_BY_STEP
from .lines import read_lines
from .names import (
    as_step,
    is_norm,
    is_reward,
    is_training_loss,
    listed,
    long_columns,
    number,
    numbers,
    step_name,
)
from .pairs import OF_TRAINING
from .recording import Recording, gather
from .source import Source
from .unwrap import TEXTS, plain

_TIMES = re.compile(r"relative time|wall time|^_?timestamp$|^_?runtime$|^time$|^date$", re.IGNORECASE)
_PLACE = re.compile(rf"{_TIMES.pattern}|^idx$|^epoch$", re.IGNORECASE)
"""Columns that say where a value belongs: Aim's frame of one metric has all of them."""
_DATE_AND_TIME = re.compile(r"(?<=\d\d\d\d-\d\d-\d\d) (?=\d\d:\d\d)")
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?")
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+")
_STEPS = re.compile(r"^\W*steps\W*$|/global_step$| step$", re.IGNORECASE)
SAMPLE = 200
"""Rows by which a table is understood."""
_MANY = 40
"""Rows of numbers that are those of a training, whatever their names."""
_PRINTED = re.compile(r"\x1b\[|pid=\d+\)|\d%\|.*\[[\d:]+<|\bstep:\d+ - |\{'\w+': |\bOVERFLOW!")
"""Marks of a console log that no table holds: a colour, Ray's prefix, a progress bar, a step of verl, a dict."""
_NAMED = re.compile(
    r"[a-z]\s*(?:[:=]\s*[(\[]?|[(\[])\s*[-\d]|[a-z]\s+-?\d+\.\d|^\s*-?\d[\d.,e+-]*%?[\s-]+[a-z]", re.IGNORECASE
)
"""A name with its value, or a value with its name, which no head of a table holds."""
_CONTEXT = re.compile(r"\{['\"]\w+['\"]: ['\"]([^'\"]*)['\"]\}")
"""Aim's {'subset': 'train'}."""
_TAG = re.compile(r"(?:^|-)tag-(.+)$")


def is_table(source: Source) -> bool:
    """Return whether the first lines hold a head and numbers below it."""
    if source.path.suffix.lower() in (".csv", ".tsv"):
        return source.coding is not None
    return _head_at([*filter(_is_a_row, source.text_head.splitlines()[:_SEARCHED])]) is not None


_SEARCHED = 40
"""Lines in which a table's head is looked for."""


def _is_a_row(line: str) -> bool:
    return bool(line.strip()) and not line.startswith(("sep=", "# ", "=="))


def _head_at(lines: list[str]) -> int | None:
    """Return which line is a table's head: the first, or one below prose; None where none is."""
    if _is_head(lines):
        return 0
    below = (at for at, line in enumerate(lines) if "," in line or "\t" in line)
    return next((at for at in below if _are_alike(lines[at : at + 3]) and _is_head(lines[at:])), None)


def _are_alike(lines: Sequence[str]) -> bool:
    """Return whether lines have as many columns."""
    return len({(line.count(","), line.count("\t")) for line in lines}) == 1


def _is_head(lines: list[str]) -> bool:
    """Return whether the first of lines is a head, and numbers are below it."""
    delimiter = _delimiter(lines)
    if delimiter is None or any(map(_PRINTED.search, lines[:5])):
        return False
    rows = _cells_of(lines, delimiter)
    head = [*map(str.strip, next(rows, []))]
    if any(name and (number(name) is not None or _NAMED.search(name)) for name in head):
        return False
    has_losses = any(map(is_training_loss, head)) and any(map(_EPOCHS.fullmatch, head))
    if _step_column(head) is None and not has_losses and not _says_training(head):
        return False
    alike = (row for row in rows if abs(len(row) - len(head)) <= 1)
    return any(number(cell, True) is not None for row in alike for cell in row)


def _says_training(names: Sequence[str]) -> bool:
    """Return whether columns without a step are those of rows of a training: a norm, or losses for the most part."""
    known = [name for name in names if name.strip()]
    return any(map(is_norm, known)) or 2 * sum(map(is_training_loss, known)) > len(known)


def read_table(source: Source) -> list[Recording]:
    """Return the runs of a table; raises ReportError where no column has the step or a gradient norm."""
    lines = filter(_is_a_row, source.lines())
    begin = [*islice(lines, _SEARCHED)]
    begin = begin[_head_at(begin) or 0 :]
    delimiter = _delimiter(begin) or ","
    rows = _cells_of(chain(begin, lines), delimiter)
    return read_columns(source, [*map(str.strip, next(rows, []))], rows, delimiter)


def _delimiter(lines: list[str]) -> str | None:
    """Return the delimiter that makes the most columns of the head; a blank where pandas has printed a frame."""
    head, below = [*lines, "", ""][:2]
    best = max(",;\t|", key=head.count)
    if best in head:
        return best
    words, below = head.split(), below.split()
    has_step = _step_column(words) is not None or len(below) == 1 and _step_column(below) is not None
    has_pairs = any(":" in word or "=" in word for word in words)
    is_one = any(map(is_norm, words)) or long_columns(words) is not None or words[:2] == ["step", "value"]
    return " " if has_step and is_one and not has_pairs else None


def _cells_of(lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    """Yield the cells of each line; of a printed frame, a date and its time are one."""
    if delimiter == " ":
        yield from (_DATE_AND_TIME.sub("T", line).split() for line in lines)
        return
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error:  # a field beyond all bounds, a NUL: only this row is lost
            continue


def _step_column(columns: list[str]) -> int | None:
    name = step_name(columns) or next(filter(_STEPS.search, columns), None)
    if name is None and {"epoch", "batch"} <= {*map(str.lower, columns)}:
        name = next(column for column in columns if column.lower() == "batch")  # counted through epochs
    return None if name is None else columns.index(name)


_EPOCHS = re.compile(r"\s*(epoch|episode)s?(?:\s*\(.*\))?\s*", re.IGNORECASE)


def _epochs(names: list[str], sample: list[list[str]]) -> tuple[int, str] | None:
    """Return the column of epochs or episodes, and its unit, where each row is one and none has a norm."""
    found = ((at, named[1].lower()) for at, name in enumerate(names) if (named := _EPOCHS.fullmatch(name)))
    at, unit = next(found, (None, ""))
    if at is None or any(map(is_norm, names)):
        return None
    values = [number(cells[at]) if at < len(cells) else None for cells in sample]
    known = [value for value in values if value is not None and value.is_integer()]
    rise = all(before < after or after == known[0] for before, after in pairwise(known))  # or another run begins
    return (at, unit) if len(known) == len(sample) and rise else None


def read_columns(
    source: Source, names: list[str], rows: Iterator[list[str]], delimiter: str = ",", form: str = ""
) -> list[Recording]:
    """Return the runs of a table whose head and rows are had, as texts; raises as :func:`read_table`."""
    if (lines := _printed(names, rows)) is not None:
        return read_lines(source, "\n".join(lines))
    table = _Table(source, names, rows, delimiter)
    table.form = form
    if table.step_at is not None and (long := table.long):
        return table.read_long(*long)
    return table.read_wide()


def _printed(names: list[str], rows: Iterable[list[str]]) -> list[str] | None:
    """Return the lines of a console in a log store's export, oldest first; None where no column has them."""
    at = next((at for at, name in enumerate(names) if name.rpartition(".")[2].strip("@_").lower() in TEXTS), None)
    if at is None or _step_column(names) is not None:
        return None
    when = next((at for at, name in enumerate(names) if re.search("time|date", name, re.IGNORECASE)), at)
    kept = [cells for cells in rows if len(cells) > max(at, when)]
    return [cells[at] for cells in (kept[::-1] if kept and kept[0][when] > kept[-1][when] else kept)]


class _Table:
    """A table, understood by its first rows: where the step is, and how numbers are spelled.

    Raises:
        ReportError: where no column has the step or a gradient norm, or a value could be taken for another.
    """

    form = ""
    """The file's format, where it is not a CSV."""
    unit = "step"
    """What the step's column counts."""

    def __init__(self, source: Source, names: list[str], rows: Iterator[list[str]], delimiter: str):
        self.source = source
        sample = list(islice(rows, SAMPLE))
        self.names = self._with_index(names, sample)
        self.rows = chain(sample, rows)
        self.step_at = _step_column(self.names)
        if self.step_at is None and (found := _epochs(self.names, sample)) is not None:
            self.step_at, self.unit = found
        if all(number(name) is not None for name in self.names):
            raise ReportError(
                f"{source.name} has {len(self.names)} columns of numbers without names: put a line above them that "
                "names each, such as step,loss or loss,grad_norm."
            )
        if self.step_at is None and not _says_training(self.names) and not self._may_be_rows_of_steps(sample):
            raise ReportError(
                f"{source.name} has no step column and none that looks like a gradient norm: rename one to `step`; "
                f"there is {listed(self.names)}."
            )
        if self.step_at is None:
            self.unit = "row"
            source.notes.append(
                f"{source.name} has no step column, so its rows are numbered from 1, the first below the head."
            )
        self.has_decimal_comma = delimiter not in ", " or self._has_decimal_comma(sample)
        self.long = self._long(sample)
        steps = [self._number(cells, self.step_at) for cells in sample]
        odd = [step for step in steps if step is not None and not step.is_integer()]
        if len(odd) > len(steps) / 2:
            raise ReportError(
                f"{source.name}: the column {self.names[self.step_at or 0]!r} holds no whole numbers (such as "
                f"{self._text(sample[0], self.step_at) or 'nothing'}): it is not the step, or columns are shifted."
            )

    def _with_index(self, names: list[str], sample: list[list[str]]) -> list[str]:
        """Return the columns with a name for the one that a frame's rows are numbered by."""
        if sample and len(names) > 1 and len(sample[0]) == 1 and _step_column(sample[0]) is not None:
            return [sample.pop(0)[0], *names]  # pandas prints an index's name on a line of its own
        lengths = [len(cells) - (len(cells) > len(names) and not cells[-1].strip()) for cells in sample]
        if len(lengths) > 1 and all(length == len(names) + 1 for length in lengths) and _is_index(names, sample):
            return ["", *names]
        num_off = sum(length != len(names) for length in lengths)
        if num_off > len(lengths) / 2:
            raise ReportError(
                f"{self.source.name} has {plural(len(names), 'column')} in its head and {lengths[-1]} in its rows, so "
                "a value could be taken for another: write it again as a CSV, such as by DataFrame.to_csv."
            )
        return names

    def _has_decimal_comma(self, sample: list[list[str]]) -> bool:
        """Return whether quoted numbers are as 0,49; raises ReportError where others are as 0.49."""
        cells = [cell.strip() for row in sample for cell in row]
        commas = [cell for cell in cells if _DECIMAL_COMMA.fullmatch(cell) and not _THOUSANDS.fullmatch(cell)]
        points = [cell for cell in cells if re.fullmatch(r"[-+]?\d+\.\d+", cell)]
        if commas and points:
            raise ReportError(
                f"{self.source.name} has numbers as {commas[0]} and as {points[0]}: write it again with one decimal "
                "sign."
            )
        return bool(commas)

    def _text(self, cells: list[str], at: int | None) -> str:
        return cells[at].strip() if at is not None and at < len(cells) else ""

    def _is_too_long(self, cells: list[str]) -> bool:
        """Return whether a row has more cells than the head, as two rows' parts do."""
        return len(cells) > len(self.names) and any(map(str.strip, cells[len(self.names) :]))

    def _number(self, cells: list[str], at: int | None) -> float | None:
        return number(self._text(cells, at), self.has_decimal_comma)

    def _long(self, sample: list[list[str]]) -> tuple[int, list[int], int | None] | None:
        """Return where the value, the metric's name and the run's are, where a row holds one value; else None.

        Repeated steps with one numeric column and a few categorical columns also count as such a table.
        """
        if (found := long_columns(self.names)) is not None:
            value, keys, run = found
            return self.names.index(value), [*map(self.names.index, keys)], self.names.index(run) if run else None
        own = [at for at, name in enumerate(self.names) if at != self.step_at and name and not _PLACE.search(name)]
        if [self.names[at].lower() for at in own] in (["value"], ["metric"]):
            return own[0], [], None
        cells = {at: [self._text(row, at) for row in sample] for at in range(len(self.names)) if at != self.step_at}
        others = {at: kept for at, kept in cells.items() if not _TIMES.search(self.names[at]) and any(kept)}
        numeric = [at for at, kept in others.items() if any(number(c, True) is not None for c in kept)]
        texts = [at for at, kept in others.items() if at not in numeric and 1 < len({*kept}) <= len(kept) // 2]
        steps = [self._text(row, self.step_at) for row in sample]
        is_long = len(numeric) == 1 and texts and 2 * len({*steps}) <= len(steps)
        return (numeric[0], texts, None) if is_long else None

    def read_long(self, value_at: int, tags: list[int], run_at: int | None) -> list[Recording]:
        """Return one value a row, and maybe the name of its metric and of its run."""
        stem = re.sub(r"(\.csv|\.tsv|\.gz|\.txt)+$", "", self.source.name)
        tag = _TAG.search(stem)
        alone = tag[1] if tag else stem
        if not tags and not is_norm(alone) and not OF_TRAINING.search(alone):
            self.source.note_one_metric()
            alone = "grad_norm"
        is_named = bool(tags) or alone != "grad_norm" or is_norm(stem)
        runs: dict[str, list[tuple[int, str, float]]] = {}
        known = set()
        for cells in self.rows:
            if self._is_too_long(cells):
                continue
            step, value = as_step(self._number(cells, self.step_at)), self._number(cells, value_at)
            name = "/".join(filter(None, (_CONTEXT.sub(r"\1", self._text(cells, at)) for at in tags))) or alone
            if value is None and name in known and value_at < len(cells) and not self._text(cells, value_at):
                value = math.nan  # as pandas writes it: a row of a value has one
            if step is not None and value is not None:
                known.add(name)
                runs.setdefault(self._text(cells, run_at), []).append((step, name, value))
        for found in () if is_named else runs.values():
            if 2 * len({step for step, *_ in found}) <= len(found) + 1:  # the last value may be cut off
                raise ReportError(
                    f"{self.source.name} has several values for a step and no column that names their metric, so they "
                    "could be of different ones: add a column `metric`, or name a file of one metric."
                )
        is_tensorboards = not tags and any(name.lower() == "wall time" for name in self.names)
        form = "TensorBoard's CSV" if is_tensorboards else self.form or "a table of values"
        return [
            Recording(self.source.name, form, run if len(runs) > 1 else "", rows=gather(found), notes=self.source.notes)
            for run, found in runs.items()
        ]

    def read_wide(self) -> list[Recording]:
        """Return a column for each metric, or W&B's for each run and metric; MIN and MAX are of the steps in one
        point.
        """
        source, runs = self.source, self._columns_by_run()
        shared = runs.pop("", {}) if len(runs) > 1 else {}
        is_wandb = any(runs) or any(column.endswith(("__MIN", "__MAX")) for column in self.names)
        form = "W&B's CSV" if is_wandb else self.form or "CSV"
        made = {run: Recording(source.name, form, run if len(runs) > 1 else "", notes=source.notes) for run in runs}
        num_bad = num_rows = num_empty = 0
        for cells in self.rows:
            num_rows += 1
            num_empty += 1
            is_short = 2 * len(cells) < len(self.names) > SAMPLE  # cut off, or made to cost much
            is_long = self._is_too_long(cells)
            is_short |= self.step_at is None and len(cells) < len(self.names)  # no step says that it is whole
            step = as_step(self._number(cells, self.step_at))
            if is_short or is_long or step is None and self.step_at is not None:
                is_rule = all(_FRAME.fullmatch(cell or " ") for cell in cells)
                num_rows -= is_rule
                num_bad += not is_rule
                continue
            for run, places in runs.items():
                known = {name: self._number(cells, at) for at, name in (shared | places).items()}
                values = {name: value for name, value in known.items() if value is not None}
                if values and any(self._text(cells, at) for at in places):
                    num_empty = 0
                    made[run].rows.append((num_rows if step is None else step, values))
        for recording in made.values():
            recording.receipt = f"{num_rows - num_bad:,} of {num_rows:,} rows read"
            recording.unit = self.unit
            source.notes += _gaps(recording)
        if num_bad > num_rows / 2:
            raise ReportError(
                f"{source.name}: {num_bad:,} of its {num_rows:,} rows do not say their step; it was not read."
            )
        if 1 < num_empty < num_rows:
            source.notes.append(f"The last {num_empty:,} rows of {source.name} are empty, as pandas writes NaN.")
        if num_bad:
            source.notes.append(f"GradLoc left out {plural(num_bad, 'row')} of {source.name} without a step.")
        return list(made.values())

    def _may_be_rows_of_steps(self, sample: list[list[str]]) -> bool:
        """Return whether a table has numbers alone, and a loss or reward or many rows: one of several experiments has
        texts.
        """
        is_trained = any(is_training_loss(name) or is_reward(name) for name in self.names)
        cells = (cell for cells in sample for cell in cells if cell.strip())
        return (is_trained or len(sample) >= _MANY) and all(number(cell) is not None for cell in cells)

    def _columns_by_run(self) -> dict[str, dict[int, str]]:
        """Return by run, the places of its metrics and their names."""
        runs: dict[str, dict[int, str]] = {}
        for place, column in enumerate(self.names):
            if place == self.step_at or not column or _TIMES.search(column) or column.endswith(("__MIN", "_timestamp")):
                continue
            run, _, metric = column.rpartition(" - ")
            if column.endswith("__MAX"):
                metric = metric.removesuffix("__MAX") + "_max"
            runs.setdefault(run.strip(), {})[place] = metric.strip()
        return runs


def _gaps(recording: Recording) -> Iterator[str]:
    """Note at which few of many steps a norm is not there, as where pandas has written a NaN."""
    for name in filter(is_norm, {*chain(*(values for _, values in recording.rows))}):
        empty = [step for step, values in recording.rows if name not in values and any(map(is_training_loss, values))]
        if 0 < 20 * len(empty) <= len(recording.rows):
            at = ", ".join(map(str, empty[:5])) + ", ..." * (len(empty) > 5)
            yield f"{name} is empty at {plural(len(empty), 'step')} ({at}), which may be NaN as pandas writes it."


def _is_index(names: list[str], sample: list[list[str]]) -> bool:
    """Return whether the first of the rows' cells counts them, and is not a step next to a number that a comma has
    cut.
    """
    first = [number(cells[0]) for cells in sample]
    step_at = _step_column(names)
    steps = {cells[0 if step_at is None else step_at + 1] for cells in sample}
    return first == sorted(first, key=lambda count: -1.0 if count is None else count) and len(steps) == len(sample)


# ---- with a frame: either a head and a row for each step, or a name and a value in each row, of one step

_SIDES = "|│┃║"
_FRAME = re.compile(r"[\s|+=:\-\u2500-\u257f]+")
"""A line that is nothing but a frame."""
_RULE = re.compile(r"[:\- ]*-[:\- ]*(?:\|[:\- ]*-[:\- ]*)+")
"""The line below the head of a table of Markdown that has no frame at its sides."""
_COUNT = re.compile(r"(?:step|iteration|epoch)s?", re.IGNORECASE)
_TIMESTEPS = "total_timesteps"
"""The step of Stable-Baselines' files."""
_LINES = 400
"""The number of lines in which a table has to begin."""


def is_boxed(source: Source) -> bool:
    """Return whether the first lines hold a framed table with a gradient norm, with steps and a loss, or of one step
    with a reward.
    """
    return any(map(_holds_training, _boxes(source.text_head.splitlines()[:_LINES])))


def _holds_training(rows: list[list[str]]) -> bool:
    cells = [cell for cells in rows for cell in cells]
    has_rewards = any(map(is_reward, cells)) and all(len(row) == 2 for row in rows)  # Ray's status has one, and no step
    has_losses = has_rewards or any("loss" in cell.lower() or "success_rate" in cell for cell in cells)
    return any(map(is_norm, cells)) or has_losses and _has_step(cells)


def read_boxes(source: Source) -> list[Recording]:
    """Return one run, from all framed tables of a file; lines between them are passed over.

    Raises:
        ReportError: where the tables of single steps are out of order, so that a row may have slipped into another.
    """
    boxes = [(_is_one_steps(box[0]), [*_steps_in(box)]) for box in _boxes(source.lines())]
    each = [values for _, its in boxes for values in its]
    usual = Counter(filter(None, map(step_name, each))).most_common(1)
    name = usual[0][0] if usual else "epoch"  # a last table may count otherwise
    if 2 * sum(_TIMESTEPS in values for values in each) > len(each):  # Stable-Baselines counts iterations as well
        name = _TIMESTEPS
    found = [(as_step(values.get(name)), values) for values in each if usual or not any(map(is_norm, values))]
    alone = [values[name] for is_alone, its in boxes if is_alone for values in its if name in values]
    num_back = sum(later < step for step, later in pairwise(alone))
    if num_back > len(alone) / 10:
        raise ReportError(
            f"{source.name}: the steps of its tables go back {num_back} times, so a row may have slipped into another "
            "step's table: name the file that the trainer wrote."
        )
    made = Recording(source.name, "printed tables", notes=source.notes)
    made.rows = [(step, values) for step, values in found if step is not None]
    if not made.rows and HEADED_BY_STEP.search(source.text_head):
        return []  # headlines between the tables may say it
    if not made.rows:
        made.rows, made.unit = list(enumerate((values for values in each if any(map(is_norm, values))), 1)), "row"
        made.notes.append(
            f"{source.name} has no column of steps, so its rows are numbered from 1, the first with a norm."
        )
    return [made]


def _boxes(lines: Iterable[str]) -> Iterator[list[list[str]]]:
    """Yield the cells of each table, row by row; a line outside of a frame ends it."""
    rows: list[list[str]] = []
    above, num_signs = "", 0
    for line in lines:
        text = plain(line).strip()
        is_frame = bool(text) and _FRAME.fullmatch(text) is not None
        if not rows and _RULE.fullmatch(text) and above.count("|") == text.count("|"):
            rows, num_signs = [_cells(above)], text.count("|")
        elif rows and 0 < num_signs == text.count("|"):
            rows.append(_cells(text))
        elif len(text) > 2 and text[0] in _SIDES and text[-1] in _SIDES and not is_frame:
            rows.append(_cells(text[1:-1]))
            num_signs = 0
        elif rows and (not is_frame or len(rows) > 1 and _is_one_steps(rows[0])):
            yield rows
            rows, num_signs = [], 0
        above = text
    if rows:
        yield rows


def _cells(text: str) -> list[str]:
    return [_named(cell.strip(" *`")) for cell in re.split(f"[{_SIDES}]", text)]


def _named(cell: str) -> str:
    """Return a cell, that of a count as others call it: Epochs, Step."""
    return cell.lower().removesuffix("s") if _COUNT.fullmatch(cell) else cell


def _steps_in(box: list[list[str]]) -> Iterator[dict[str, float]]:
    """Yield the numbers of each step in a table, by their names."""
    if not _is_one_steps(box[0]):
        names, rows = box[0], box[1:]
        if rows and len(rows[0]) == len(names) and not any(number(cell) is not None for cell in rows[0]):
            names = [" ".join(parts).strip() for parts in zip(names, rows.pop(0), strict=True)]  # a head of two lines
        yield from filter(None, (numbers(dict(zip(names, cells, strict=False))) for cells in rows))
        return
    values: dict[str, str] = {}
    for name, value in (cells for cells in box if len(cells) == 2):
        if name in values:  # the next step's, right below
            yield numbers(values)
            values = {}
        values[name] = value
    yield numbers(values)


def _is_one_steps(head: list[str]) -> bool:
    """Return whether a table's first row has a name and a value, and so is no head."""
    if len(head) != 2:
        return False
    is_head = any(map(is_norm, head)) or _has_step(head[:1])
    return not is_head or number(head[1]) is not None


def _has_step(cells: Sequence[str]) -> bool:
    """Return whether one of a head's cells is a step, or an epoch that each row may be."""
    return step_name(cells) is not None or "epoch" in cells


# ---- parquet and spreadsheets, read by the packages of ``pip install '.[logs]'``


def read_parquet(source: Source) -> list[Recording]:
    """Return the runs of a parquet file, some rows at a time."""
    package = _package("pyarrow.parquet", f"{source.name} is parquet")
    with _sentence_of(source, "parquet"), package.ParquetFile(source.path) as file:
        found = columns_of_parquet(file.metadata, source.path.stat().st_size)
        types = {name: kind for name, kind in found.items() if "list<" not in kind}
        names, texts = [*types], [name for name, kind in types.items() if kind.endswith(("string", "binary"))]
        with package.ParquetFile(source.path, read_dictionary=texts) as dense:
            batches = dense.iter_batches(256, columns=names)
            rows = (row.values() for batch in batches for row in _bounded(batch).to_pylist())
            return read_columns(source, names, as_texts(rows))


def _bounded(batch: Any) -> Any:
    """Return a batch whose texts, each stored once, may be written out; raises ValueError where that takes too much."""
    dictionaries = [column.dictionary for column in batch.columns if hasattr(column, "dictionary")]
    longest = sum(max((len(text) for text in texts.to_pylist() if text), default=0) for texts in dictionaries)
    if longest * batch.num_rows + batch.nbytes > DOCUMENT:
        raise ValueError(f"texts of {longest:,} characters in a row")
    return batch


def read_spreadsheet(source: Source) -> list[Recording]:
    """Return the runs of every sheet with a step and numbers; their values, not their formulas."""
    made, refusal = [], None
    package = _package("openpyxl", f"{source.name} is a spreadsheet")
    with (
        _sentence_of(source, "a spreadsheet"),
        source.path.open("rb") as file,
    ):  # by its path, it wants the ending .xlsx
        _refuse_heavy_parts(file)
        for sheet in package.load_workbook(file, read_only=True, data_only=True).worksheets:
            rows = as_texts(_rows_of(sheet))
            try:
                made += read_columns(source, next(rows, []), rows)
            except ReportError as error:  # notes of one's own next to the run
                refusal = refusal or error
    if refusal and not any(recording.rows for recording in made):
        raise refusal
    return made


def _refuse_heavy_parts(file: BinaryIO) -> None:
    """Raise ValueError where openpyxl would hold more of a part than a row; 10,000 nested tags take 3 MB."""
    with ZipFile(file) as archive:
        for name in archive.namelist():
            rows = re.split(rb"</(?:\w+:)?(?:row|si)\b", archive.read(name))
            if max(row.count(b"<") + row.count(b"=") for row in rows) > TAGS:
                raise ValueError(f"more than {TAGS:,} tags and attributes in a row")


def _rows_of(sheet: Any) -> Iterator[tuple]:
    if (sheet.max_column or 0) > COLUMNS:
        sheet.reset_dimensions()
    num_cells = 0
    for row in sheet.iter_rows(values_only=True):
        num_cells += len(row) + 1
        if num_cells > VALUES:
            raise ValueError(f"more than {VALUES:,} cells")
        yield row


@contextmanager
def _sentence_of(source: Source, what: str) -> Iterator[None]:
    """Make a ReportError of whatever a package raises on a damaged file."""
    try:
        yield
    except ReportError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise ReportError(f"{source.name} is {what} that cannot be read ({said}): save it as a CSV.") from None


def as_texts(rows: Iterable[Iterable[Any]]) -> Iterator[list[str]]:
    """Yield rows as texts, an empty one for None."""
    for row in rows:
        yield ["" if value is None else str(value) for value in row]


def _package(package: str, what: str) -> Any:
    """Return the package; raises ReportError where it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.partition(".")[0]
        raise ReportError(
            f"{what}, which needs {name} to be read: pip install {name}, or save it as a CSV and name that."
        ) from None
