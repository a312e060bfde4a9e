# SPDX-License-Identifier: Apache-2.0
"""The ways in which trainers print a step: each grammar knows one, and takes a line or leaves it to the next."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable
from functools import lru_cache
from itertools import pairwise
from sys import intern
from typing import NamedTuple

from ...record.files import parse_json
from .names import as_step, is_norm, is_training_loss, leaves, long_columns, number, numbers, points, step_of
from .pairs import NUMBER, as_float, pairs, wanted
from .recording import OF_WATCH, Row, gather

_CONSOLE = re.compile(r"\bstep:(\d{1,15}) - (.+)")
_MORE_OF_CONSOLE = re.compile(r"(?:^|\s)- ([\w./@-]+:\S+(?: - .+)?)$")
_BEFORE_DICT = re.compile(
    r"\b(global step|step|rollout|perf|iteration|iter)\s*[:=]?\s*(\d{1,15})[^{]{0,40}$", re.IGNORECASE
)
STEP = (  # Step... (500 | is Flax'
    r"(?:\.\.\. \(|\((?=\d+/))?\s*[:=#]?\s*\[?\s*(\d{1,3}(?:,\d{3})+|\d{1,15}(?:\.?\d*[KM]\b)?)(?!\d|\.\d|\s*%)"
    r"(?:\s*/\s*\d+(?![\d.]))?\]?"
)
HEADED_BY_STEP = re.compile(
    rf"\b(?<!episode )(?:(?:global|train|training)[_ ])?steps?(?:\b|_)(?:\(\w+\)|(?<=\[step)\])?{STEP}", re.IGNORECASE
)
HEADED_GLOBALLY = re.compile(
    r"\bglobal[_ ](?:steps?|iter(?:ation)?s?|updates?)\b\s*[:=#]?\s*(\d{1,15})(?!\d)()", re.IGNORECASE
)
EPOCH = re.compile(r"\bep(?:och)?\b\W{0,3}?\s*(\d{1,9})", re.IGNORECASE)
_UPDATES = re.compile(r"\bupdates (\d{1,12})/\d+ episodes")
"""MAPPO's headline."""
NOT_TRAINING = re.compile(r"\b(?:eval(?:uation)?|val(?:id(?:ation)?)?|test|best)\b", re.IGNORECASE)
_CELL = re.compile(rf"[•│]\s*([A-Za-z][\w ()/.@-]*?)\s*[:│=]\s*({NUMBER})(?![\w.])", re.IGNORECASE)
_HEADLINE = re.compile(
    r"(?<![=─━])[=─━]{3,}(?: \[\w+\] -)?[ \w]{0,60}step ?(?P<nemo>\d{1,15})(?:/\d+)?\s*[=─━]{3,}"
    r"|\bTrain step (?P<areal>\d{1,15})/\d+ done"
    r"|\[(?:step|batch)=(?P<olmo>\d{1,15})/[^\]]*\]:?\s*$"
    r"|-- GLOBAL_STEP:? (?P<step>\d{1,15})\s*$"
    r"|^\S+:\[(?P<vits>\d{1,12}), \d[\d.e-]*\]$"  # INFO:run:[200, 0.0001]: step and learning rate
    r"|\(global_step (?P<tensorpack>\d{1,12})\)"  # Epoch 7 (global_step 2730) finished
    r"|(?:^|[\s:])(?P<word>(?:global_)?step|iter|epoch)(?:s|ation)?\b\W{0,12}(?P<plain>\d{1,15})"
    r"(?:\s*/\s*\d+)?(?: \[\d+%\])?\W*$",
    re.IGNORECASE,
)
_OF_HEADLINES = ("tep", "TEP", "iter", "Iter", "ITER", "poch", "POCH", "batch=", ":[")
"""A part of each headline: a quick look before its pattern."""
_TITLES = {
    "nemo": "NeMo-RL's log",
    "areal": "AReaL's log",
    "olmo": "OLMo's or Composer's log",
    "global step": "OpenRLHF's log",
}
_RAY = re.compile(r"^\([^()]*pid=[^()]*\) ?")
_YAML = re.compile(r"( *)([\w/.@-]+):(?: +(\S+))?\s*")
ALONE = re.compile(rf"[\s│|]*[A-Za-z][\w ()/.-]{{0,60}}\s*[:=]\s*{NUMBER}[\s│|]*", re.IGNORECASE)
"""A line that is a name and a number."""
_STEP_COLUMNS = {"epoch", "step", "iter", "iteration", "itn.", "e", "#"}
_LOSS_COLUMN = re.compile(r"loss|rmse_|\bbox +obj +cls\b", re.IGNORECASE)
_TWO_WORDS = re.compile(
    r"\b(train(?:ing)?|val(?:id(?:ation)?)?|test|eval|lm|total|avg|mean|grad(?:ient)?|learning|loss) "
    r"(?=(?:loss|acc(?:uracy)?|ppl|perplexity|reward|error|norm|rate|scale)\b)",
    re.IGNORECASE,
)
"""The first word of a column's name of two, in a head with single blanks."""
_REMARKS = re.compile(r"\s(?:Δ|notes?\b|remarks?\b|comments?\b|status\b|flags?\b).*", re.IGNORECASE)
"""The columns from the first on that some rows leave out."""
_OF_BOXES = {"box": "box_loss", "obj": "obj_loss", "cls": "cls_loss"}
"""Losses in YOLOv5's heads."""
_CUT_DICT = re.compile(r"\s*'\w[\w/ .-]*': [^{}]*\}\s*$")
"""A dict whose beginning was not pasted."""
DRAWN = re.compile(r"(\d{1,15})/(\d{1,15}) \[[\d:]+<")


class Grammar:
    """One way to print a step; ``take`` says whether a line was of it."""

    title = ""
    has_places = True
    """Whether ``last`` says after which row a line comes."""
    also: Container[str] = ()
    """Names that are wanted though they say nothing of training."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = defaultdict(list)
        """The runs by the process that printed them; several may print into one log."""
        self.unit = "step"
        """What the rows' steps count, see :class:`~.recording.Recording`."""
        self.num_drawn = 0
        """Norms that stood for a step that has one already."""
        self.num_again = 0
        """Metrics that came again below one headline, as where headlines are missing."""
        self.last: tuple[str, int] | None = None
        """The process and the place of the row that was added last."""

    def take(self, line: str, process: str) -> bool:
        raise NotImplementedError

    def add(self, process: str, step: int, values: dict[str, float]) -> bool:
        if values:
            self.last = process, len(self.rows[process])
            self.rows[process].append((step, values))
        return bool(values)

    def name_by_place(self, process: str, lines: Iterable[dict[str, float]]) -> None:
        """Make rows of lines that say no step, or none that can be known."""
        self.unit, self.rows[process] = "row", list(enumerate(lines, 1))

    def step_at(self, place: tuple[str, int] | None) -> int | None:
        """Return the step of a row by its place."""
        return None if place is None else self.rows[place[0]][place[1]][0]

    @property
    def is_mixed(self) -> bool:
        """Whether lines below a headline may be of another step."""
        return self.num_again > sum(map(len, self.rows.values())) / 10

    @property
    def num_norms(self) -> int:
        return sum(any(map(is_norm, values)) for rows in self.rows.values() for _, values in rows[:10000])


class Console(Grammar):
    """``step:7 - actor/grad_norm:0.31 - ...``, behind whatever Ray puts before it."""

    title = "verl's console log"

    def __init__(self) -> None:
        super().__init__()
        self.heads: dict[str, str] = {}
        """The process by what is before the step, as lines taken so far have it."""

    def take_alike(self, line: str) -> bool:
        """Take a line that begins as an earlier one, where nothing but names and plain numbers can follow."""
        head, _, rest = line.partition("step:")
        step, _, text = rest.partition(" - ")
        if head not in self.heads or not text or not step.isdecimal() or len(step) > 15:
            return False
        return not any(sign in text for sign in "[,<{&") and self.add(self.heads[head], int(step), _dashed(text))

    def take(self, line: str, process: str) -> bool:
        step = _CONSOLE.search(line)
        if step is not None:
            return self.add(process, int(step[1]), _dashed(step[2]))
        more = _MORE_OF_CONSOLE.search(line) if self.rows.get(process) and line.lstrip().startswith("- ") else None
        if more is not None:  # a line that a terminal or a mail has wrapped
            self.rows[process][-1][1].update(_dashed(more[1]))
        return more is not None


_CALL = re.compile(r":[a-z][\w.]*\(")
"""The beginning of a value such as ``np.float64(0.3)``."""


def _dashed(text: str) -> dict[str, float]:
    plain, num_calls = _CALL.subn(":", text) if "(" in text else (text, 0)
    if 0 < num_calls == text.count("(") == text.count(")"):
        plain = plain.replace(") - ", " - ").removesuffix(")")
    parts = plain.replace(" - ", ":").split(":")
    try:
        return dict(zip(_clean(tuple(parts[::2])), map(float, parts[1::2]), strict=True))
    except ValueError:  # a value that is no plain number, or a name with a colon
        return pairs(re.sub(r", ?\w+=[^()]*\)", ")", text))  # tensor(0.3, device='cuda:0')


@lru_cache(maxsize=64)
def _clean(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a line, which most lines share: of a long log they are most of the memory."""
    names = tuple(intern(name.strip()) for name in names)
    if not all(names):
        raise ValueError("a value without a name")
    return names


class Json(Grammar):
    """A JSON object on a line of its own: verl's ``file`` logger, or flat."""

    title = "JSON lines"

    def __init__(self) -> None:
        super().__init__()
        self.verdicts: list[str] = []
        self.num_bad = 0
        """Lines of JSON that cannot be read."""
        self._unplaced: dict[str, dict[str, list[Row]]] = {"row": defaultdict(list), "epoch": defaultdict(list)}
        """Rows that say no step, by their place or epoch: of the run's end or evaluations, where others say one."""

    def take(self, line: str, process: str) -> bool:
        line = line.lstrip(" \t`>")  # the last two are Markdown's
        if not line.startswith(("{", "[{")):
            return False
        try:
            entry = parse_json(line.rstrip(" ,`\r\n"))
        except ValueError:
            self.num_bad += line.startswith('{"')
            return False
        if isinstance(entry, list):
            return any([self.take_entry(each, process) for each in entry if isinstance(each, dict)])
        return self.take_entry(entry, process)

    def take_entry(self, entry: dict, process: str) -> bool:
        data, step = entry.get("data"), as_step(number(entry.get("step")))
        if isinstance(data, dict) and step is not None:
            self.title = OF_WATCH if "grad_norm_max" in data else "verl's file logger"
            verdict = data.get("gradloc/verdict")
            self.verdicts += map(str, verdict if isinstance(verdict, list) else [])
            self.add(process, step, numbers(data))
            return True
        if type(entry.get("rank")) is int:
            process = process or str(entry["rank"])
        values = numbers(entry)
        step = step_of(values)
        is_one = long_columns(flat := leaves(entry)) is not None
        if step is None or is_one:
            rows = gather(points(flat if is_one else entry))
            if rows or step is not None:
                return any([self.add(process, *row) for row in rows])
            step = _step_around(values)
        values.pop("step", None)
        if step is not None:
            return self.add(process, step, values)
        # in a deeper one are the last, least and largest of a run
        is_row = any(is_norm(name) and {name, name.rpartition("/")[0]} & entry.keys() for name in values)
        if is_row or type(entry.get("epoch")) is int:
            rows = self._unplaced["row" if is_row else "epoch"][process]
            rows.append((len(rows) + 1 if is_row else entry["epoch"], values))
            return True
        return False

    def resolve(self) -> None:
        """Name the rows by their places or epochs where none says a step."""
        for unit, unplaced in self._unplaced.items():
            if not any(self.rows.values()):
                self.rows, self.unit = unplaced, unit


def _step_around(values: dict[str, float]) -> int | None:
    """Return the step next to the outermost metric of a nested entry, or next to what holds it."""
    around = min(wanted(values), key=lambda name: name.count("/"), default="")
    while around:
        around = around.rpartition("/")[0]
        begin = f"{around}/" if around else ""
        step = step_of({name.removeprefix(begin): value for name, value in values.items() if name.startswith(begin)})
        if step is not None:
            return step
    return None


_DIGITS = 8
"""Characters of a number that does not come twice by chance."""


class _Unplaced(NamedTuple):
    """A row that does not say its step, with what may: the counts of progress bars by their totals."""

    place: int
    above: dict[int, int]
    below: dict[int, int]


class Printed(Grammar):
    """``{'loss': 0.1, 'grad_norm': 0.31}``, as a Trainer, OpenRLHF (``Global step 7: {...}``) and slime print it."""

    title = "a Trainer's printed dicts"

    def __init__(self) -> None:
        super().__init__()
        self.bars: dict[int, int] = {}
        """The counts of the progress bars by their totals, the last drawn one at the end."""
        self._pending: dict[str, float] = {}
        self._unplaced: dict[str, list[_Unplaced]] = defaultdict(list)
        self._ends: dict[str, set[int]] = defaultdict(set)
        """The places of the rows that come after a run's end."""
        self._known: dict[str, set[tuple]] = defaultdict(set)
        """What the rows that do not say their step hold."""

    def draw(self, count: int, total: int) -> None:
        """Takes the count of a progress bar; a ``total`` of 0 is that of lines which say a step and no more."""
        self.bars.pop(total, None)
        if len(self.bars) < 8:
            self.bars[total] = count
        for unplaced in self._unplaced.values():
            unplaced[-1].below.setdefault(total, count)

    def take(self, line: str, process: str) -> bool:
        if line.count(": None") + line.count(": False") > 4:  # settings
            return False
        start = 0 if _CUT_DICT.match(line) else line.find("{")
        if start < 0 or line.find("}", start) < 0 or line[:start].rstrip().endswith("="):  # a value among others
            return False
        if line.count("grad_norm") > 1 and len(parts := re.findall(r"\{[^{}]*\}", line)) > 1:  # a pasted log_history
            return any([self.take(part, process) for part in parts])
        values = pairs(line, start)
        if not values:
            return False
        head = _BEFORE_DICT.search(line[:start][-80:])
        if head is not None:
            kind = head[1].lower()
            if kind in ("rollout", "perf"):  # slime: they belong to the step that follows
                self._pending.update(values)
                return True
            is_slime = any(name.startswith("train/") for name in values)
            self.title = "slime's log" if is_slime else _TITLES.get(kind, "lines of `step N: {...}`")
            values = self._pending | values
            self._pending = {}
        step = int(head[2]) if head is not None else step_of(values)
        if step is None:
            rows = self.rows[process]
            if not _is_training(values):  # an evaluation, or the end of training: of the last step
                if "train_runtime" in values:
                    self._ends[process].add(len(rows))
                    values.pop("train_loss", None)  # the mean over the run
                if rows:
                    rows[-1][1].update(values | rows[-1][1])
                return bool(rows)
            unplaced = self._unplaced.get(process)
            if unplaced and 0 in self.bars and self.bars == unplaced[-1].above and values == rows[-1][1]:
                return True  # printed by a second handler
            whole = tuple(values.items())
            is_fine = any(len(repr(value)) > _DIGITS for name, value in values.items() if is_norm(name))
            if is_fine and whole in self._known[process]:  # pasted twice, as a diff's lines
                self.num_drawn += 1
                return True
            self._known[process].add(whole)
            if rows and _are_one_steps(values, rows[-1][1]):
                rows[-1][1].update(values)
                return True
            self._unplaced[process].append(_Unplaced(len(rows), dict(self.bars), {}))
            step = rows[-1][0] if rows else 0
        return self.add(process, step, values)

    def resolve(self) -> None:
        """Give rows that do not say their step that of the bar before each, which counts a Trainer's steps; else, in
        all processes, their place. They are left out where others say a step.
        """
        drawn: dict[str, list[int]] = {}
        for process, unplaced in self._unplaced.items():
            rows = self.rows[process]
            if len(unplaced) == len(rows):
                drawn[process] = self._by_bars(unplaced, self._epochs(process))
            for place, *_ in unplaced if len(unplaced) < len(rows) else ():
                rows[place] = (rows[place][0], {})  # others are known by their places
        if not all(drawn.values()):
            self.unit = "row"
            drawn = {process: _numbers(self._epochs(process), self._ends[process]) for process in drawn}
        for process, steps in drawn.items():
            self.rows[process] = [(at, values) for at, (_, values) in zip(steps, self.rows[process], strict=True)]

    def _by_bars(self, rows: list[_Unplaced], epochs: list[float | None]) -> list[int]:
        """Return the steps of a process's rows by the bar that counts them; empty where none does.

        A bar is drawn again below a line, with the line's own step; the one above may be late.
        """
        for total in reversed(self.bars):
            above, below = [row.above.get(total) for row in rows], [row.below.get(total) for row in rows]
            if len(below) > 2 and below[-1] is None and None not in below[:-1]:
                below[-1] = 2 * below[-2] - below[-3]  # the log ends with the line
            known, drawn = ([count for count in counts if count is not None] for counts in (above, below))
            if known and above[0] is None:  # lines before the first bar
                apart = known[0] - drawn[0] or sum(known[1:2]) - known[0]
                above = [known[0] - apart * back for back in range(len(above) - len(known), 0, -1)] + known
            if steps := next((steps for steps in (above, below) if _are_a_trainers(steps, epochs)), []):
                return steps
        return []

    def _epochs(self, process: str) -> list[float | None]:
        return [values.get("epoch") for _, values in self.rows[process]]


def _are_a_trainers(steps: list[int | None], epochs: list[float | None]) -> bool:
    """Return whether a bar's counts are the steps of lines: as far apart as a Trainer logs, in proportion to epochs."""
    if None in steps or 0 in steps:
        return False
    gaps = Counter(later - step for step, later in pairwise(steps))
    apart = gaps.most_common(1)[0][0] if gaps else steps[0]
    if apart <= 0 or any(step % apart for step in steps[steps[0] == 1 : -1]):
        return False
    known = [(step, epoch) for step, epoch in zip(steps, epochs, strict=True) if epoch is not None]
    if len(known) < 3 or known[0][0] == known[-1][0]:
        return True
    (first, begin), (last, end) = known[0], known[-1]
    rate = (end - begin) / (last - first)
    return all(abs(epoch - begin - rate * (step - first)) <= abs(rate) + 0.011 for step, epoch in known)  # of 0.01


def _numbers(epochs: list[float | None], ends: set[int]) -> list[int]:
    """Number rows from 1 on, anew behind a run's end and where the epochs begin again."""
    made: list[int] = []
    first = last = math.nan
    for at, epoch in enumerate(epochs):
        is_new = not made or at in ends or epoch is not None and epoch < last and epoch <= first
        made.append(1 if is_new else made[-1] + 1)
        last = last if epoch is None else epoch
        first = last if is_new or math.isnan(first) else first
    return made


def _is_training(values: dict[str, float]) -> bool:
    """Return whether a printed dict is of training itself: it has a norm, or a loss and nothing of an evaluation."""
    if any(map(is_norm, values)):
        return True
    return any(map(is_training_loss, values)) and not any("runtime" in name for name in values)


def _are_one_steps(values: dict[str, float], others: dict[str, float]) -> bool:
    """Return whether two dicts are of one step, as two handlers print it: one is the other with less in it, or both
    have its loss and its epoch.
    """
    shared = values.keys() & others.keys()
    is_within = 0 < len(shared) == min(len(values), len(others)) < max(len(values), len(others))
    if not is_within and not (shared >= {"loss", "epoch"} and values.keys() - shared and others.keys() - shared):
        return False
    return all(
        math.isclose(values[name], others[name], rel_tol=1e-3, abs_tol=1e-4) or values[name] != values[name]
        for name in shared
    )


class Headed(Grammar):
    """A line that says the step or epoch and nothing else, and lines, bullets or cells with the values below it."""

    title = "headlines of steps and values below"

    def __init__(self) -> None:
        super().__init__()
        self.step: int | None = None
        """What the last headline said."""
        self._word = "epoch"
        """What the headlines count: a word that comes below another one's headlines makes none of its own; empty where
        a line that says a step and no metric is one."""
        self._more: dict[str, float] = {}
        """The epoch of the last headline of a step, by itself or by the headline of an epoch above it."""
        self._epoch: dict[str, float] = {}
        """The epoch of the last headline of one."""
        self._path: list[tuple[int, str]] = []
        """The names, with their indents, that a line of YAML is below."""
        self._below: set[str] = set()
        """The names of the values that have come since the last headline."""

    @property
    def is_by_step(self) -> bool:
        """Whether the last headline said a step, not an epoch."""
        return self._word not in ("epoch", "")

    @property
    def is_mixed(self) -> bool:
        num_back = sum(
            later[0] < row[0] and not later[1].get("epoch", 0) > row[1].get("epoch", 0)
            for rows in self.rows.values()
            for row, later in pairwise(rows)
        )
        return max(self.num_again, num_back) > sum(map(len, self.rows.values())) / 10

    def _begin(self, step: int, word: str, line: str) -> None:
        epoch = EPOCH.search(line) if word != "epoch" else None
        self.step, self._word, self.unit = step, word, "epoch" if word == "epoch" else "step"
        self._below = set()
        self._more = {"epoch": float(epoch[1])} if epoch else self._epoch if word != "epoch" else {}

    def take(self, line: str, process: str) -> bool:
        head = _HEADLINE.search(line) if any(map(line.__contains__, _OF_HEADLINES)) else None
        if head is not None:
            word = (head["word"] or "step").lower()
            if word == "epoch":
                self._epoch = {"epoch": float(head[head.lastgroup])}
            if word == self._word or not self.is_by_step:
                self.title = _TITLES.get(head.lastgroup, self.title)
                self._begin(int(head[head.lastgroup]), word, line)
            return False
        if self.step is None:
            return self._begin_by_more(line)
        cells = {name: as_float(value) for name, value in _CELL.findall(line)}
        values = cells or self._named(line) or pairs(line)
        if cells or wanted(values):
            says_epoch = "epoch" in values or EPOCH.match(line.strip()) is not None
            is_own = says_epoch and not self.is_by_step
            values |= {} if self._below else self._more
            if not is_own:
                self._add_below(process, values)
            return bool(cells)  # else these may be no headlines: another grammar may know the line's own step
        rows = self.rows[process] if values and self.is_by_step and ALONE.fullmatch(_RAY.sub("", line)) else []
        if rows and rows[-1][0] == self.step:
            rows[-1][1].update(values | rows[-1][1])
        elif not rows:
            self._begin_by_more(line)
        return bool(rows)

    def _begin_by_more(self, line: str) -> bool:
        """Take a line that says a step among other words for a headline, unless there are better ones."""
        head = None if self.is_by_step else HEADED_BY_STEP.search(line) or _UPDATES.search(line)
        if head and head[1].isdecimal() and not wanted(pairs(line)) and not NOT_TRAINING.search(line):
            self._begin(int(head[1]), "", line)
        return False

    def _add_below(self, process: str, values: dict[str, float]) -> None:
        """Adds what a line below a headline says."""
        rows = self.rows[process]
        if rows and rows[-1][0] == self.step:
            is_again = not self._below.isdisjoint(wanted(values))
            self.num_again += is_again and not rows[-1][1].items() >= values.items()
            self._below.update(values)
            rows[-1][1].update(values)  # NeMo-RL prints the reward of a validation before the step's own
            return
        self.num_again += bool(self._below)
        self._below.update(values)
        self.add(process, self.step, values)

    def _named(self, line: str) -> dict[str, float]:
        """Return the value of a line of YAML by the names above it, as ``critic/score/mean``; empty of other lines."""
        entry = _YAML.fullmatch(_RAY.sub("", line))
        if entry is None:
            return {}
        while self._path and self._path[-1][0] >= len(entry[1]):
            self._path.pop()
        name, value = "/".join([*(name for _, name in self._path), entry[2]]), number(entry[3])
        if not entry[3]:
            self._path.append((len(entry[1]), entry[2]))
        return {} if value is None else {intern(name): value}


class ConsoleTable(Grammar):
    """A head of names and rows of numbers below it, with blanks between, as fastai and YOLO print them."""

    title = "columns of a console"

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        """The last head."""
        self._step_at = 0

    def take(self, line: str, process: str) -> bool:
        if _LOSS_COLUMN.search(line) and not re.search(r"\S\s{2,}\S|\t", line):
            line = _TWO_WORDS.sub(r"\1_", _REMARKS.sub("", line))
        cells = line.lstrip(" `").split()
        if cells[:1] == ["#"] and cells[-1] != "#" and cells[1].lower() in _STEP_COLUMNS:
            cells = cells[1:]
        if len(cells) > 2 and cells[0].lower().rstrip(":") in _STEP_COLUMNS and _LOSS_COLUMN.search(line):
            wide = re.split(r"\s{2,}|\t", line.strip(" `\t\r").removeprefix("# ").strip())  # LOSS TOK2VEC, of two words
            self.names = [_OF_BOXES.get(name, name) for name in (wide if len(wide) > 2 else cells)]
            if any(number(cell) is not None for cell in cells):
                self.names = []
            counts = [at for at, name in enumerate(self.names) if name.lower() in _STEP_COLUMNS - {"epoch", "e"}]
            self._step_at = counts[0] if counts else 0  # an epoch is second to a step
            self.unit = "epoch" if self.names and self.names[self._step_at].lower() in ("epoch", "e") else "step"
            return bool(self.names)
        if len(cells) < len(self.names) or not self.names:
            return False
        step = as_step(number(cells[self._step_at].rstrip(":")))
        known = {name: number(cell.rstrip(":")) for name, cell in zip(self.names, cells, strict=False)}
        known.pop(self.names[self._step_at])
        values = {intern(name): value for name, value in known.items() if value is not None}
        if step is None or len(values) <= len(known) / 2:
            return False
        rows = self.rows[process]
        if rows and rows[-1][0] == step and "%|" in line:  # a bar that is drawn again
            rows[-1][1].update(values)
            return True
        return self.add(process, step, values)
