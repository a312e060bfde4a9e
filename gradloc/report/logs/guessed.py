# SPDX-License-Identifier: Apache-2.0
"""Reads lines of names and numbers whose step no grammar knows: it is the whole number that rises from line to line."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from operator import le

from .grammars import ALONE, EPOCH, NOT_TRAINING, Grammar
from .names import is_norm, is_training_loss
from .pairs import PAIRS, behind, pairs
from .recording import Row

_TIME = re.compile(
    r"\d{4}[-/]\d\d[-/]\d\d|\d+:\d\d(?::\d\d)?(?:[.,]\d+)?|\d+(?=:[a-z])|\S+\.py\b\S*|[IWE]\d{4} [\d:.]+ \d+", re.I
)
"""Dates, times, a process, and the place that printed a line."""
_COUNT = re.compile(
    r"(?<![\w.:/])(?<!e-)[A-Za-z]?(\d{1,3}(?:,\d{3})+(?!\d)|\d{1,12})(?:\s*/\s*\d+)?(?=[\s\]),:;|-]|epoch|batch|iter|step|$)",
    re.I,
)
_NO_ROW = re.compile(rf"{NOT_TRAINING.pattern}|\bWARN|\bskip|not update|Error:", re.IGNORECASE)
_OTHERS = re.compile(r"\bcost\b|perplexity|reward", re.IGNORECASE)
"""Names of what is trained for, apart from losses."""
_NO_STEP = re.compile(r"/|sec|time|mem|tok|lr|eta|loss|norm|speed|size|cost", re.IGNORECASE)
"""Names of metrics that may rise from line to line and are no steps."""
_EPOCHS = re.compile(r"\s(?=[Ee]poch\W)")
_LONGEST, _MOST, _FEWEST = 1000, 200_000, 3
"""Characters of a line, and lines, that are kept; lines by which a step is known."""


class Guessed(Grammar):
    """Lines with a norm or a training loss that no other grammar takes."""

    title = "lines of names and numbers"
    has_places = False

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[tuple, dict[str, list[tuple[list[float], dict[str, float]]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        """By the names of what is trained for and which counts are epochs, then by process: counts, and values."""
        self.num_kept = 0
        self._unfinite: list[tuple] = []
        """The keys of lines with a norm or a loss that is not finite, where a line holds nothing but metrics."""

    @property
    def names(self) -> list[str]:
        """The names of what was kept."""
        return [*dict.fromkeys(name for wanted, _ in self._kept for name in wanted)]

    @property
    def lost(self) -> list[str]:
        """The names of norms and losses that are not finite in what was kept."""
        kept = [(wanted, lines) for (wanted, _), its in self._kept.items() for lines in its.values()]
        found = [name for wanted, lines in kept for _, values in lines for name in wanted if not isfinite(values[name])]
        return [*dict.fromkeys(found)]

    def take(self, line: str, process: str) -> bool:
        """Keep a line, or its parts where it was joined of two epochs', for :meth:`resolve`; leave it to others."""
        for part in _EPOCHS.split(line) if line.count("poch") > 1 else [line]:
            self._look(part, process)
        return False

    def _look(self, line: str, process: str) -> None:
        values = pairs(line) if len(line) < _LONGEST and self.num_kept < _MOST else {}
        known = (is_norm, is_training_loss, _OTHERS.search, self.also.__contains__)
        wanted = tuple(name for name in values if any(is_known(name) for is_known in known))
        if wanted:
            found = list(PAIRS.finditer(line))
            named = [each.span(each.lastindex) for each in found]
            begin = next((each.start() for each in found if any(name in each[0] for name in wanted)), len(line))
            text = _TIME.sub(lambda found: " " * len(found[0]), line)
            if (at := behind(line)) is not None:
                named, begin = [(at, len(line))], at
            free = [at for at in _COUNT.finditer(text) if not any(a <= at.start() < b for a, b in named)]
            # what comes behind the metrics may be in some lines only
            free = [at for at in free if at.start() < begin] or free
            if named and not _NO_ROW.search(line, 0, max(begin, named[0][0])):
                epochs = {each.start(1) for each in EPOCH.finditer(line)}
                key = wanted, tuple(at.start(1) in epochs for at in free)
                self._kept[key][process].append(([float(at[1].replace(",", "")) for at in free], values))
                self.num_kept += 1
                if not all(isfinite(values[name]) for name in wanted) and (len(values) > 2 or ALONE.fullmatch(line)):
                    self._unfinite.append(key)

    def resolve(self) -> None:
        """Make rows of the lines that are most, where a count says their step; lines with a norm or a training loss
        are counted if none does.
        """
        most = max(
            self._kept, key=lambda key: (any(map(is_norm, key[0])), sum(map(len, self._kept[key].values()))), default=()
        )
        kept = self._kept.get(most, {})
        if len(kept) >= _FEWEST and all(process.isdecimal() and len(lines) == 1 for process, lines in kept.items()):
            numbered = [([float(process), *free], values) for process, [(free, values)] in kept.items()]
            kept = {"": numbered}  # 47: loss=2.1 is no process' line
        for process, lines in kept.items():
            named = Counter(name for _, row in lines for name in row if not _NO_STEP.search(name))
            counts = [name for name, count in named.items() if count >= 0.9 * len(lines)]
            lines = [line for line in lines if all(name in line[1] for name in counts)]  # without a title
            values = [values for _, values in lines]
            shared = [name for name in values[0] if all(name in row for row in values) and not _NO_STEP.search(name)]
            columns = [
                *zip(*(free for free, _ in lines), strict=True),
                *([row[name] for row in values] for name in shared),
            ]
            has_count = len(lines) > 1 and most[1]
            rows, at = _placed(columns, values) if has_count or len(lines) >= _FEWEST else ([], 0)
            if rows and [*most[1], *(name.lower() in ("epoch", "ep") for name in shared)][at]:
                self.unit = "epoch"
            is_main = (self.also or any(map(is_training_loss, most[0]))) and 2 * len(lines) > self.num_kept
            if rows:
                self.rows[process] = rows
            elif len(lines) >= 2 * _FEWEST and (is_main or any(map(is_norm, most[0]))):
                self.name_by_place(process, values)

    def resolve_unfinite(self) -> None:
        """Name the lines by their places that have a norm or a loss that is not finite, and those like them."""
        kept = max((self._kept[key] for key in self._unfinite), key=lambda its: sum(map(len, its.values())), default={})
        for process, lines in kept.items():
            self.name_by_place(process, [values for _, values in lines])


def _placed(columns: Sequence[Sequence[float]], values: Sequence[dict[str, float]]) -> tuple[list[Row], int]:
    """Return rows at the steps of the column that rises, with the epoch where it begins anew with each of one, and the
    column's place; no rows where none rises.
    """
    whole = {at: column for at, column in enumerate(columns) if all(count.is_integer() for count in column)}
    steady = [column for column in whole.values() if all(map(le, column, column[1:])) and len(set(column)) > 1]
    for place, step in whole.items():
        moves = Counter((b > a) - (b < a) for a, b in pairwise(step))
        if 8 * moves[1] < len(step) - 1 or 2 * moves[-1] > moves[1] or not moves[1]:
            continue
        for epoch in steady if moves[-1] else ():
            steps = pairwise(zip(epoch, step, strict=True))
            if all((a[0] < b[0]) == (a[1] >= b[1]) for a, b in steps):
                rows = [(int(at), {**row, "epoch": of}) for at, of, row in zip(step, epoch, values, strict=True)]
                return rows, place
        if 10 * moves[-1] <= moves[1]:
            return [(int(at), row) for at, row in zip(step, values, strict=True)], place
    return [], 0
