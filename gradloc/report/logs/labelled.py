# SPDX-License-Identifier: Apache-2.0
"""Reads lines that say their step and have names with numbers, in any of their spellings: most loops' own."""

import re
from collections import Counter, defaultdict
from itertools import pairwise
from math import isnan, nan

from .grammars import DRAWN, EPOCH, HEADED_BY_STEP, HEADED_GLOBALLY, NOT_TRAINING, STEP, Grammar
from .names import is_norm, is_training_loss
from .pairs import NUMBER, PAIRS, as_float, pairs, wanted

_HEADED = re.compile(
    r"\b(?:(?<!skipped )(?<!nan )iterations?|iter|it|num_updates|update|env_step|total_(?:time)?steps"
    rf"|(?<!train )batch(?: count)?(?=\W{{0,3}}\d+\s*/))\b(?:\(\w+\))?{STEP}",
    re.IGNORECASE,
)
_COUNT = re.compile(  # 73/120, [73/120], 73it/120it, 4.60kit/100kit, wherever a bar is
    r"(?=\d)(?<![\w./:-])" + "".join(f"(?<!epoch{' ' * width})" for width in range(1, 8)) + r"(?<!epoch: )"
    r"(?<!epoch \[)(?<!epoch=)(?!0\d)"
    r"(\d{1,15}(?:\.\d+(?=k))?k?)(?:(?:it)?\s*/\s*(?:\d+(?:\.\d+)?k?(?:it)?|\?)(?![\w./]*\d|[a-z]|\s+\d\d:\d\d))"
    r"|\bepisode\b\W{0,3}(\d{1,15})"
    r"|^\W*(\d{1,15})(?:\]\s+| [|:] )(?=[a-z])",  # [73] train-logloss:0.4, 73 | loss 2.0
    re.IGNORECASE,
)
_MODULE = re.compile(r"\s*\d+ *\| *\w+ *\| *\w+ *\| *[\d.]+ *[KMB]?\s*(?:\||$)")
"""A row of Lightning's summary of a model: ``5 | criterion | CrossEntropyLoss | 0``."""
_OF_TOTAL = re.compile(r"\s*/\s*(\d{1,15})")
_BATCH = re.compile(  # WeNet writes TRAIN Batch 7/300 for epoch 7
    r"(?:\bepoch\b\W*(\d{1,9}).{0,12}?\bbatch\b\W*|\bTRAIN Batch (\d{1,9})/)(\d{1,15})(?:\s*/\s*(\d{1,15}))?",
    re.IGNORECASE,
)
_EVALUATION = re.compile(
    rf"(?:^|[\s|>-])((?:eval(?:uation)?|val(?:id(?:ation)?)?|test)[ _]loss)\s*[:=]\s*({NUMBER})\s*$", re.IGNORECASE
)
"""An evaluation on a line of its own, below the step after which it was made."""
_ERROR = re.compile(r"\s*[\w.]+(?:Error|Exception|Warning):")
"""A line that names an exception: its numbers are no metrics."""
_ROUND = re.compile(r"\b(?:iteration|round)\W{0,3}(\d{1,9})\W{1,3}$", re.IGNORECASE)
"""Matches what some call an epoch, before a step in it: ``iteration:3 step:100/1687``."""
_ITERATION = re.compile(r"\biter(?:ation)?\s+(\d{1,12})\s+$", re.IGNORECASE)
_IN_EPOCH = re.compile(  # Epoch [2][ 50/7330], epoch 001  4000 / 331737, Train: 2 [ 50/1251 (4%)], [2][50/391]
    r"(?:\b(?:epochs?\b(?:\(train\))?|train(?:ing)?\b)[\s:\[]*|^\s*\[)(\d{1,6})(?:/\d+)?(?:\s*\( *\d+%\))?[\]\s:,|\[(]+"
    r"(?:TRAIN\W+|progress )*(\d{1,12})\s*/\s*(\d{1,12})\b",
    re.IGNORECASE,
)
_HEADS = (_HEADED, _IN_EPOCH, _BATCH, _COUNT)
"""Forms of a step or of a place in an epoch, the surest first."""
_BAR = re.compile(r"\d{1,3}%\|[^|]*\|?|\[[=>. #]{8,}\]|[━╸╺]+|[▏▎▍▌▋▊▉█]+")
_SAID = re.compile(r"(?<![^\s\])|])(step|iter|iteration)\W{1,3}(\d{1,12})\b", re.IGNORECASE)


def _steps_apart(line: str) -> list[str]:
    """Return the parts of a line that holds several steps, as a paste without its line breaks does."""
    heads = list(_SAID.finditer(line))
    is_one = len({head[2] for head in heads}) < 2 or len(heads) < 2 * len({head[1].lower() for head in heads})
    ends = [] if is_one else [head.start() for head in heads[1:]]
    parts = [line[start:end] for start, end in pairwise([0, *ends, len(line)])]
    return parts if all(wanted(pairs(part)) for part in parts) else [line]


class Labelled(Grammar):
    """``Step 7 | Loss: 0.1 | Grad. Norm: 0.31`` in any of its spellings: prime-rl, Megatron, torchtitan, own loops."""

    title = "lines of `step N ... name: value`"

    def __init__(self) -> None:
        super().__init__()
        self.lengths: dict[str, dict[int, int]] = defaultdict(dict)
        """The epoch's length, by row, where rows give an epoch and a batch in place of a step; 0 where it is
        unknown.
        """
        self._placed: set[str] = set()
        """The processes whose lines say a place in an epoch, as ``[2][50/391]``: others may say the run's step."""
        self._epoch: float | None = None
        """The epoch that a line of its own said last."""
        self._unplaced: tuple[str, int, int] | None = None
        """The process, place and epoch's length of the last row before the first headline of an epoch."""
        self._above: str | None = None
        """The process of the line above, where one without a step may say more of its step."""
        self._shows_loss = False
        """Whether Lightning's own loss was a number: it stays NaN where a training step returns none."""
        self._has_inner = False
        """Whether fairseq's rows of single steps have come: then its rows of an epoch are their means."""

    def take(self, line: str, process: str) -> bool:
        if len(parts := _steps_apart(line)) > 1:
            return any([self.take(part, process) for part in parts])
        if self._take(line, process):
            self._above = process
            return True
        is_more = self._above is not None and self._goes_on(line, self._above)
        if not is_more and not line[:1].isspace():
            self._above = None
        return is_more

    def _take(self, line: str, process: str) -> bool:
        self._has_inner |= "| train_inner |" in line
        if "|" in line and (_MODULE.match(line) or self._has_inner and "| train |" in line):
            return False
        is_bar = bool(_BAR.search(line) or DRAWN.search(line))
        if is_bar:
            line = _BAR.sub(" ", line)
        head = ("lobal" in line and HEADED_GLOBALLY.search(line)) or ("tep" in line and HEADED_BY_STEP.search(line))
        forms = (_HEADED, _COUNT) if is_bar else _HEADS
        head = head or next(filter(None, (form.search(line) for form in forms)), None)
        if not head:
            if "poch" in line and (epoch := EPOCH.search(line)) and not NOT_TRAINING.search(line):
                self._begin_epoch(float(epoch[1]))
            if self.rows.get(process) and (found := _EVALUATION.search(line)):
                self.rows[process][-1][1].setdefault(found[1], as_float(found[2]))
            return False
        values = pairs(line, head.end())
        first = PAIRS.search(line, head.end())
        if NOT_TRAINING.search(line, 0, first.start() if first else head.end()):
            return False
        values = pairs(line, 0, head.start()) | values
        if "v_num=" in line and "train_loss" in line:
            self._shows_loss |= not isnan(values.get("loss", nan))
            values = {name: value for name, value in values.items() if name != "loss" or self._shows_loss}
        names = wanted(values, self.also)
        if not names or all(map(NOT_TRAINING.match, names)):
            return False
        if " | Grad. Norm:" in line:
            self.title = "prime-rl's log"
        elif line.lstrip().startswith("iteration") and "consumed samples" in line:
            self.title = "Megatron's log"
        length = None  # of the epoch that the step is a place in
        if head.re in (_BATCH, _IN_EPOCH):
            epoch, step, *total = map(int, filter(None, head.groups()))
            values["epoch"], length = float(epoch), sum(total)
            self._placed.add(process)
        else:
            total = _OF_TOTAL.match(line, head.end(head.lastindex))
            epoch = EPOCH.search(line, 0, head.start()) or _ROUND.search(line, 0, head.start())
            if epoch:
                values["epoch"] = float(epoch[1])
            if own := _ITERATION.search(line, 0, head.start()):
                values.setdefault("iter", float(own[1]))  # of which a step has several
            if total and self._epoch is not None:
                values.setdefault("epoch", self._epoch)
            text = next(filter(None, head.groups())).replace(",", "")
            scale = {"k": 1e3, "m": 1e6}.get(text[-1].lower(), 1.0)  # 31K means a thousand steps
            step = round(float(text.rstrip("KMkm")) * scale)
            length = int(total[1]) if total and "epoch" in values else None
            if total and self._epoch is None:
                self._unplaced = (process, len(self.rows[process]), int(total[1]))
        rows = self.rows[process]
        is_again = bool(rows) and rows[-1][0] == step and rows[-1][1].get("epoch") == values.get("epoch")
        if is_again and (is_bar or length is not None and not any(map(is_norm, values))):
            rows[-1][1].update(values)  # drawn again: the last one has the step's own values
        elif step > 0 or not (is_bar and rows):
            if length is not None:
                self.lengths[process][len(rows)] = length
            return self.add(process, step, values)
        # a bar that is not begun still has the values of the epoch before
        self.num_drawn += sum(map(is_norm, values))
        return True

    def _begin_epoch(self, epoch: float) -> None:
        """Takes a headline of an epoch: the row above the first one is of the epoch before."""
        if self._unplaced is not None and epoch > 1:
            process, at, length = self._unplaced
            if at == len(self.rows[process]) - 1:
                self.rows[process][at][1].setdefault("epoch", epoch - 1)
                self.lengths[process][at] = length
        self._epoch, self._unplaced = epoch, None

    def _goes_on(self, line: str, process: str) -> bool:
        """Adds what a line says of the step above it: an indented one, or what a terminal has wrapped."""
        values, above = pairs(line), self.rows[process][-1][1]
        if _ERROR.match(line) or not any(is_norm(name) or is_training_loss(name) for name in values):
            return False
        is_new = {name.lower() for name in values}.isdisjoint(map(str.lower, above))  # Loss is nan, stopping training
        is_more = is_new and (line[:1].isspace() or not NOT_TRAINING.search(line))
        self.num_again += not is_more and line[:1].isspace() and any(map(is_norm, values))
        if is_more:
            above.update(values)
        return is_more

    def count_through_epochs(self) -> str:
        """Count the batches of epochs of one length through the run, and say so in a sentence; empty where none are.

        Of rows that say a place and others that say a step the fewer are left out. Where batches go back within an
        epoch whose length is unknown, rows are named by their places.
        """
        said = ""
        if self._num_back:
            for process, rows in self.rows.items():
                self.name_by_place(process, [values for _, values in rows])
            return said
        for process, lengths in self.lengths.items():
            rows, known = self.rows[process], [*lengths.values()]
            if process not in self._placed:
                begins_anew = any(
                    b[0] <= a[0] and b[1].get("epoch", 0) > a[1].get("epoch", 0) for a, b in pairwise(rows)
                )
                if len(known) < len(rows) or not begins_anew:
                    continue
            is_kept = 2 * len(known) > len(rows)
            rows = self.rows[process] = [row for at, row in enumerate(rows) if (at in lengths) == is_kept]
            if not is_kept:
                continue
            length, num_alike = Counter(known).most_common(1)[0]
            if 4 * num_alike <= 3 * len(known) or not length:
                continue
            # without those of another length, such as an evaluation's
            rows = self.rows[process] = [row for row, its in zip(rows, known, strict=True) if its == length]
            epochs = [int(values["epoch"]) for _, values in rows]
            if len(rows) > 1 and all(step == length for step, _ in rows):
                self.rows[process] = [(epoch, values) for epoch, (_, values) in zip(epochs, rows, strict=True)]
                self.unit = "epoch"
                continue  # a line at the end of each epoch
            self.unit = "batch"
            base = min(epochs[0], 1)  # epochs are counted from 0 or from 1
            if max(epochs) > base:
                self.rows[process] = [
                    ((epoch - base) * length + place, values)
                    for epoch, (place, values) in zip(epochs, rows, strict=True)
                ]
                said = (
                    "The lines give epoch and batch, so batches are numbered across epochs: "
                    f"{length:,} in each epoch from epoch {base}."
                )
        return said

    @property
    def is_out_of_order(self) -> bool:
        """Whether batches often go back within an epoch, as no resume leaves them."""
        return 10 * self._num_back > sum(map(len, self.rows.values()))

    @property
    def _num_back(self) -> int:
        """How often batches go back within an epoch whose length is unknown, as after a resume."""
        return sum(
            later[0] < row[0] and later[1].get("epoch") == row[1].get("epoch")
            for process, lengths in self.lengths.items()
            if not any(lengths.values())
            for row, later in pairwise(self.rows[process])
        )
