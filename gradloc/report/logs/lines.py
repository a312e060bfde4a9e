# SPDX-License-Identifier: Apache-2.0
"""What trainers print, line by line, among everything else that a console shows, and inside of other lines.

Each grammar knows one way to print a step. Every line goes to the first grammar that takes it, the surest first. The
grammar with the most gradient norms is the log; a note counts the norms of the others.
"""

import ast
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from sys import intern
from typing import Any

from ...record.files import LITERAL, parse_json
from ...words.text import plural
from ..errors import ReportError
from .names import as_step, is_norm, number, numbers, one_value, step_of
from .recording import Recording, Row, Skip, flat
from .source import Source

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\[\d{1,3}(?:;\d{1,3})*m")
_PROCESS = re.compile(
    r"\(\w[^()]*\bpid=(\d+)|^\s*(\d+):\s|\[(?:rank|default)[ :=]?(\d+)\]|\brank[=:] ?(\d+)\b", re.IGNORECASE
)
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_CONSOLE = re.compile(r"\bstep:(\d{1,15}) - (.+)")
_MORE_OF_CONSOLE = re.compile(r"(?:^|\s)- ([\w./@-]+:\S+(?: - .+)?)$")
_NUMBER = r"[-+]?(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
_BEFORE_DICT = re.compile(
    r"\b(global step|step|rollout|perf|iteration|iter)\s*[:=]?\s*(\d{1,15})[^{]{0,40}$", re.IGNORECASE
)
_STEP = r"\s*[:=#]?\s*\[?\s*(\d{1,3}(?:,\d{3})+|\d{1,15})(?!\d|\s*%)(?:\s*/\s*\d+)?\]?"
_HEADED_BY_STEP = re.compile(rf"\b(?:(?:global|train|training)[_ ])?steps?\b(?:\(\w+\))?{_STEP}", re.IGNORECASE)
_HEADED = re.compile(
    rf"\b(?:(?:global|train|training)[_ ])?(?:iterations?|iter|num_updates|update)\b(?:\(\w+\))?{_STEP}"
    r"|^\s*\[\s*(\d{1,15})\s*/\s*\d+\s*\]"  # [73/120]
    r"|^\s*(\d{1,15})/\d+ (?:\[[=>. ]*\]|[━╸╺]+)"  # 73/120 [====>....], as Keras has it
    r"|^\s*(\d{1,15}) \| (?=[a-z])"  # 73 | loss 2.0 |
    r"|\b(\d{1,15})(?:\.0)?it/\d",  # 73it/120it
    re.IGNORECASE,
)
_HEADED_GLOBALLY = re.compile(
    r"\bglobal[_ ](?:steps?|iter(?:ation)?s?|updates?)\b\s*[:=#]?\s*(\d{1,15})(?!\d)()", re.IGNORECASE
)
_EPOCH = re.compile(r"\bepoch\b\W{0,3}(\d+)", re.IGNORECASE)
_NOT_TRAINING = re.compile(r"\b(?:eval(?:uation)?|val(?:id(?:ation)?)?|test|best)\b", re.IGNORECASE)
_OPENED = r"(?:[\w.]+\(|[\['\"])*"
"""What may open before a number: tensor( [ a quotation mark."""
_PAIRS = re.compile(
    rf"['\"]([^'\"]{{1,120}})['\"]\s*[:=]\s*{_OPENED}({_NUMBER})(?![\w.])"
    # a name of at most eight words: a line may hold a whole answer
    rf"|(?<![\w./@-])([A-Za-z][\w./@()-]{{0,80}}(?: [A-Za-z(@][\w./@()-]{{0,40}}){{0,7}})"
    rf"\s*[:=]\s*{_OPENED}({_NUMBER})(?![\w.]*\d)"
    # no sign between: the name is known, or the line's parts are set apart
    r"|(?<![a-z_/.])((?:[a-z]{2,12} )?[a-z_/]{0,40}(?:norm|loss|reward|entropy|grad_l2))"
    rf"\s+(?:is\s+)?({_NUMBER})(?![\w.]*\d)"
    rf"|[|,;]\s*([a-z][\w/.-]{{0,40}})\s+({_NUMBER})(?=\s*(?:[|,;(]|$|ms\b|s\b|%))",
    re.IGNORECASE,
)
_INNER = re.compile(r"([\w./-]{1,80})['\"]?\s*[:=]\s*\{([^{}]{1,2000})\}")
"""A name and what is in braces after it."""


def pairs(text: str, start: int = 0, end: int | None = None) -> dict[str, float]:
    """Extracts names and numbers from a part of a line, whatever is between a name and its number.

    Entries of a norm in braces, of one group of parameters each, add up to the norm of all.

    >>> pairs("train loss 2.5 | norm 0.4812 | lr 3.00e-04 | (12 ms | 4242 tok/s)")
    {'train loss': 2.5, 'norm': 0.4812, 'lr': 0.0003}
    >>> pairs("{'loss': '0.1', 'kl': nan} gnorm=3.1 spiky (norm=2.2)")
    {'loss': 0.1, 'kl': nan, 'gnorm': 3.1, 'norm': 2.2}
    >>> pairs("grad_norm={'0_a': 3.0, '1_b': 4.0} tgs=7")
    {'tgs': 7.0, 'grad_norm': 5.0}
    """
    text = text[start:end]
    made: dict[str, float] = {}
    norms = {}
    for inner in _INNER.finditer(text) if "{" in text and "orm" in text else ():
        if is_norm(inner[1]) and (parts := pairs(inner[2])):
            norms[inner[1]] = math.sqrt(sum(part * part for part in parts.values()))
            text = text.replace(inner[0], " ")
    for found in _PAIRS.finditer(text):
        name, value = (found[found.lastindex - 1], found[found.lastindex])
        if name.count("(") > name.count(")"):  # behind a bracket that it does not close
            name = name.rpartition("(")[2]
        # a name as data.py:31 is where a line was printed
        if not name.endswith(".py") and (name := name.strip(" |,-(")):
            made[intern(name)] = _float(value)
    return made | norms


_OF_TRAINING = re.compile(r"loss|reward|kl\b|entropy|return", re.IGNORECASE)
_BLOCK = re.compile(
    r"[=─━]{4,}\s*Step (\d{1,15})(?:/\d+)?\s*[=─━]{4,}|\bTrain step (\d{1,15})/\d+ done"
    r"|\[(?:step|batch)=(\d{1,15})/[^\]]*\]:?\s*$|^(?:global_)?step:? (\d{1,15})\s*$"
)
_CELL = re.compile(rf"[•│]\s*([A-Za-z][\w ()/.@-]*?)\s*[:│=]\s*({_NUMBER})(?![\w.])", re.IGNORECASE)
_BATCH = re.compile(r"\bepoch\b\W*(\d+).{0,12}?\bbatch\b\W*(\d+)(?:\s*/\s*\d+)?", re.IGNORECASE)
_IN_EPOCH = re.compile(  # Epoch [2][ 50/7330], epoch 001  4000 / 331737, Train: 2 [ 50/1251 (4%)], [2][50/391]
    r"(?:\b(?:epochs?\b(?:\(train\))?|train(?:ing)?\b)[\s:\[]*|^\s*\[)(\d{1,6})(?:/\d+)?[\]\s:,|\[(]+(\d{1,12})\s*/\s*(\d{1,12})\b",
    re.IGNORECASE,
)
_BAR = re.compile(r"(\d{1,15})/\d+ \[[\d:]+<[^\],]*,\s*[^\],]*(?:[a-z]/s|s/[a-z]+),\s*([^\]]+)")
_DRAWN = re.compile(r"(\d{1,15})/(\d{1,15}) \[[\d:]+<")
_SPELLED = re.compile(  # the letter comes first, and as a set: only that is scanned for
    r"[gG](?i:(?<!max_g)(?<!clip_g)(?:rad(?:ient)?[ _.]*norm|norm)"
    rf"[\w/.]*['\"]?\s*[:=]\s*['\"]?(?:[\w.]+\()?{_NUMBER})"
)
_SKIPPED = re.compile(
    r"(overflow(?:!| detected| occurs|\. +skip))"
    r"|skipping (?:the |this )?(?:optimi[sz]er |gradient |weight )?(?:step|update)\b",
    re.IGNORECASE,
)
_SCALE = re.compile(
    rf"scale\D{{0,3}}(?: to)?:? *({_NUMBER}), reducing to ({_NUMBER})|scale to:? *({_NUMBER})", re.IGNORECASE
)
_AT_MINIMUM = re.compile(r"loss scale already at minimum|minimum loss scale reached", re.IGNORECASE)
_WRAPPED = re.compile(r"(?:^|\) )\s*- \S+:")
_CONFIG_BEGINS = re.compile(r"(?:^|\)\s*)\{'\w+': \{")
_MOST_SKIPS = 10_000
"""Lines of skipped steps that are kept."""
_CONFIG_LINES = 4000
"""Lines that a printed configuration has at most."""


class Grammar:
    """One way to print a step; ``take`` says whether a line was of it."""

    title = ""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = defaultdict(list)
        """By the process that printed them: several may print into one log."""
        self.is_counted = False
        """Whether the lines do not say their step, so that steps were counted."""
        self.num_drawn = 0
        """Norms that stood for a step that has one already."""
        self.last: tuple[str, int] | None = None
        """The process and the place of the row that was added last."""

    def take(self, line: str, process: str) -> bool:
        raise NotImplementedError

    def add(self, process: str, step: int, values: dict[str, float]) -> bool:
        if values:
            self.last = process, len(self.rows[process])
            self.rows[process].append((step, values))
        return bool(values)

    def step_at(self, place: tuple[str, int] | None) -> int | None:
        """The step of a row by its place."""
        return None if place is None else self.rows[place[0]][place[1]][0]

    @property
    def num_norms(self) -> int:
        return sum(any(map(is_norm, values)) for rows in self.rows.values() for _, values in rows[:10000])


class Console(Grammar):
    """``step:7 - actor/grad_norm:0.31 - ...``, behind whatever Ray puts before it."""

    title = "verl's console log"

    def take(self, line: str, process: str) -> bool:
        step = _CONSOLE.search(line)
        if step is not None:
            return self.add(process, int(step[1]), _dashed(step[2]))
        more = _MORE_OF_CONSOLE.search(line) if self.rows.get(process) and line.lstrip().startswith("- ") else None
        if more is not None:  # a line that a terminal or a mail has wrapped
            self.rows[process][-1][1].update(_dashed(more[1]))
        return more is not None


def _dashed(text: str) -> dict[str, float]:
    values = {}
    for part in text.split(" - "):
        name, _, value = part.rpartition(":")
        try:
            known: float | None = float(value)
        except ValueError:
            if value.endswith(")"):  # np.float64(0.3), tensor(0.3, device='cuda:0')
                before, bracket, inside = part.partition("(")
                name, _, value = before.rpartition(":")
                value += bracket + inside
            known = number(value)
        if known is not None and (name := name.strip()):
            values[intern(name)] = known  # one text for all rows: of a long log they are most of the memory
    return values


class Json(Grammar):
    """A JSON object on a line of its own: verl's ``file`` logger, or flat."""

    title = "JSON lines"

    def __init__(self) -> None:
        super().__init__()
        self.verdicts: list[str] = []

    def take(self, line: str, process: str) -> bool:
        if not line.lstrip().startswith(("{", "[{")):
            return False
        try:
            entry = parse_json(line)
        except ValueError:
            return False
        if isinstance(entry, list):
            return any([self._take(each, process) for each in entry if isinstance(each, dict)])
        return self._take(entry, process)

    def _take(self, entry: dict, process: str) -> bool:
        data, step = entry.get("data"), as_step(number(entry.get("step")))
        if isinstance(data, dict) and step is not None:
            self.title = "verl's file logger"
            verdict = data.get("gradloc/verdict")
            self.verdicts += map(str, verdict if isinstance(verdict, list) else [])
            self.add(process, step, numbers(data))
            return True
        if type(entry.get("rank")) is int:
            process = process or str(entry["rank"])
        values = numbers(entry)
        step = step_of(values)
        if step is not None and (one := one_value(entry)) is not None:
            return self.add(process, step, one)
        if step is None and any(map(is_norm, values)):
            self.is_counted = True
            step = len(self.rows[process]) + 1
        return step is not None and self.add(process, step, values)


class Printed(Grammar):
    """``{'loss': 0.1, 'grad_norm': 0.31}``, as a Trainer, OpenRLHF (``Global step 7: {...}``) and slime print it."""

    title = "a Trainer's printed dicts"

    def __init__(self) -> None:
        super().__init__()
        self.bars: dict[int, int] = {}
        """By their totals, the counts of the progress bars, the one that was drawn last at the end."""
        self._first: dict[int, int] = {}
        self._pending: dict[str, float] = {}
        self._bars: dict[str, list[dict[int, int]]] = defaultdict(list)
        """The bars before the lines whose steps were counted."""

    def draw(self, count: int, total: int) -> None:
        """Takes the count of a progress bar."""
        self.bars.pop(total, None)
        if len(self.bars) < 8:
            self.bars[total] = count
        if any(self._bars.values()):
            self._first.setdefault(total, count)

    def take(self, line: str, process: str) -> bool:
        start = line.find("{")
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
            self.title = "slime's log" if is_slime else "lines of `step N: {...}`"
            if kind == "global step":
                self.title = "OpenRLHF's log"
            values = {**self._pending, **values}
            self._pending = {}
        step = int(head[2]) if head is not None else step_of(values)
        if step is None:
            rows = self.rows[process]
            if not _is_training(values):  # an evaluation, or the end of training: of the last step
                if rows:
                    rows[-1][1].update({name: value for name, value in values.items() if name not in rows[-1][1]})
                return bool(rows)
            self.is_counted = True
            self._bars[process].append(dict(self.bars))
            step = _next_step(rows, values.get("epoch"))
        return self.add(process, step, values)

    def count_by_bars(self) -> None:
        """The steps of lines that do not say them, by the bar before each: a Trainer's counts its steps."""
        counted = set(self._bars)
        for process, bars in self._bars.items():
            rows = self.rows[process]
            for total in reversed(self.bars) if len(bars) == len(rows) else ():
                steps = self._steps(total, [known.get(total) for known in bars])
                if steps and all(before != after for before, after in pairwise(steps)):
                    self.rows[process] = [(step, values) for step, (_, values) in zip(steps, rows, strict=True)]
                    counted.remove(process)
                    break
        self.is_counted = bool(counted)

    def _steps(self, total: int, counts: list[int | None]) -> list[int]:
        """A bar's counts; of lines before the first bar as far apart as the next ones. Empty where not known."""
        known = [count for count in counts if count is not None]
        num_before = len(counts) - len(known)
        if not known or not num_before:
            return known
        drawn_after = self._first.get(total, known[0])  # the bar is drawn again below a printed line
        apart = known[0] - drawn_after if drawn_after < known[0] else known[1] - known[0] if len(known) > 1 else 0
        before = [known[0] - apart * back for back in range(num_before, 0, -1)]
        return before + known if apart > 0 and before[0] > 0 else []


def _is_training(values: dict[str, float]) -> bool:
    """Whether a printed dict is of training itself: it has a norm, or a loss and nothing of an evaluation."""
    if any(map(is_norm, values)):
        return True
    has_loss = any(name.rpartition("/")[2] in ("loss", "train_loss", "lm_loss", "policy_loss") for name in values)
    return has_loss and not any(name.startswith(("eval", "val", "test")) or "runtime" in name for name in values)


def _next_step(rows: list[Row], epoch: float | None) -> int:
    """The step of a line that does not say it: one more than the last, or where a resumed run's epoch is again."""
    if rows and epoch is not None and epoch < rows[-1][1].get("epoch", epoch):
        return next((step for step, values in rows if values.get("epoch", -1.0) >= epoch), 1)
    return rows[-1][0] + 1 if rows else 1


class Blocks(Grammar):
    """A headline for each step, and below it bullets (NeMo-RL), the cells of a drawn table (AReaL) or lines (OLMo)."""

    title = "NeMo-RL's log"

    def __init__(self) -> None:
        super().__init__()
        self._step: dict[str, int] = {}
        self._process = ""
        """Of the last headline: the lines below it may not say."""

    @property
    def is_open(self) -> bool:
        """Whether there was a headline."""
        return bool(self._step)

    def take(self, line: str, process: str) -> bool:
        if head := _BLOCK.search(line):
            self._process = process
            self._step[process] = int(next(filter(None, head.groups())))
            others = "Composer's log" if "[batch=" in line else "OLMo's log"
            self.title = (
                "AReaL's log" if head[2] else others if head[3] else "blocks of lines" if head[4] else self.title
            )
            return True
        process = process or self._process
        step = self._step.get(process)
        if step is None:
            return False
        values = {name: _float(value) for name, value in _CELL.findall(line)}
        if line[:1].isspace() and ("=" in line or ": " in line) and "•" not in line and "│" not in line:
            values |= pairs(line)
        if not values:
            return False
        rows = self.rows[process]
        if rows and rows[-1][0] == step and values.keys().isdisjoint(rows[-1][1]):
            rows[-1][1].update(values)
            return True
        return self.add(process, step, values)


class Labelled(Grammar):
    """``Step 7 | Loss: 0.1 | Grad. Norm: 0.31`` in any of its spellings: prime-rl, Megatron, torchtitan, own loops."""

    title = "lines of `step N ... name: value`"

    def __init__(self) -> None:
        super().__init__()
        self.batches: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """Epoch and batch of the lines that say these and no step."""
        self.lengths: dict[str, list[int]] = defaultdict(list)
        """Of the lines that say their place in an epoch, the epoch's length."""
        self.is_late = False
        """Whether the first epoch of such lines may be any."""

    def take(self, line: str, process: str) -> bool:
        head = ("lobal" in line and _HEADED_GLOBALLY.search(line)) or ("tep" in line and _HEADED_BY_STEP.search(line))
        head = head or _HEADED.search(line) or _IN_EPOCH.search(line) or _BATCH.search(line)
        if not head:
            return False
        values = pairs(line, head.end())
        if not any(map(is_norm, values)):
            if _NOT_TRAINING.search(line, 0, head.end()):
                return False
            before = pairs(line, 0, head.start())
            is_last = not any(map(_OF_TRAINING.search, values))
            values |= before if is_last or any(map(is_norm, before)) else {}
        if not any(is_norm(name) or _OF_TRAINING.search(name) for name in values):
            return False
        if " | Grad. Norm:" in line:
            self.title = "prime-rl's log"
        elif line.lstrip().startswith("iteration") and "consumed samples" in line:
            self.title = "Megatron's log"
        if head.re is _BATCH:  # batches begin again in each epoch
            self.is_counted = True
            self.batches[process].append((int(head[1]), int(head[2])))
            return self.add(process, len(self.rows[process]) + 1, values)
        if head.re is _IN_EPOCH:
            values["epoch"] = float(head[1])
            self.lengths[process].append(int(head[3]))
            return self.add(process, int(head[2]), values)
        if epoch := _EPOCH.search(line, 0, head.start()):
            values.setdefault("epoch", float(epoch[1]))
        return self.add(process, int(next(filter(None, head.groups())).replace(",", "")), values)

    def count_through_epochs(self) -> str:
        """Makes places in epochs of one length steps of the run, and says so in a sentence; empty where none are."""
        said = ""
        for process, lengths in self.lengths.items():
            rows = self.rows[process]
            if len(lengths) != len(rows) or len(set(lengths)) > 1 or rows[0][0] > lengths[0]:
                continue
            epochs = [int(values["epoch"]) for _, values in rows]
            base = min(epochs[0], 1)  # epochs are counted from 0 or from 1
            if max(epochs) > base:
                self.is_late |= epochs[0] > 1
                self.rows[process] = [
                    ((epoch - base) * lengths[0] + step, values)
                    for epoch, (step, values) in zip(epochs, rows, strict=True)
                ]
                said = f"The lines say epoch and place; steps are counted, {lengths[0]:,} an epoch, from epoch {base}."
        return said

    @property
    def skips(self) -> bool:
        """Whether batches go back, or some are missing: then lines cannot be counted as steps."""
        pairs = [pair for batches in self.batches.values() for pair in zip(batches, batches[1:], strict=False)]
        return len({b[1] - a[1] for a, b in pairs if a[0] == b[0]}) > 1 or any(a > b for a, b in pairs)


def _float(text: str) -> float:
    return float(text.replace(",", ""))


class Bar(Grammar):
    """What tqdm prints behind its bar: ``73/120 [01:10<00:45, 1.04it/s, loss=0.3, grad_norm=0.5]``."""

    title = "a progress bar's values"

    def take(self, line: str, process: str) -> bool:
        bar = _BAR.search(line) or (_DRAWN.search(line) if "orm" in line else None)
        values = {}
        if bar is not None:  # behind the bar, or as its description
            values = pairs(line, *bar.span(2)) if bar.re is _BAR else pairs(line, 0, bar.start())
        if bar is None or not any(is_norm(name) or "loss" in name for name in values):
            return False
        if epoch := _EPOCH.search(line, 0, bar.start()):
            values.setdefault("epoch", float(epoch[1]))
        rows = self.rows[process]
        is_drawn_again = rows and rows[-1][0] == int(bar[1]) and rows[-1][1].get("epoch") == values.get("epoch")
        if is_drawn_again:  # the last one has the step's own values
            rows[-1][1].update(values)
            self.num_drawn += sum(map(is_norm, values))
            return True
        return self.add(process, int(bar[1]), values)


def read_lines(source: Source, lines: Iterable[str] | None = None) -> list[Recording]:
    """The steps that a text prints, by the process that printed them; ``lines`` replaces the file's own."""
    json_lines, printed, labelled = Json(), Printed(), Labelled()
    blocks = Blocks()
    grammars = [Console(), json_lines, printed, blocks, Bar(), labelled]
    config, skipped = _Config(), _Skipped(grammars)
    last, taken = "", None
    num_bad = num_seen = 0
    for line in _joined(unwrapped(source.lines() if lines is None else lines)):
        if "\x1b" in line or "[0m" in line:
            line = _COLOUR.sub("", line)
        if line:
            last, taken = line, None
        if config.is_open or "{'" in line:
            config.take(line)
        if "<" in line and (drawn := _DRAWN.search(line)):
            printed.draw(int(drawn[1]), int(drawn[2]))
        if not (  # a quick look: a line that no grammar wants costs no more
            "tep" in line
            or "{" in line
            or "iter" in line
            or "•" in line
            or "│" in line
            or "orm" in line
            or "oss" in line
            or blocks.is_open
            and line[:1].isspace()
            or "it/" in line
            or "[batch" in line
            or "- " in line
            and _WRAPPED.search(line)
        ):
            if "verflow" in line or "OVERFLOW" in line or "inimum" in line:
                skipped.take(line, None)
            continue  # most lines of a long log end here: this is as fast as it gets
        if "orm" in line:
            num_seen += len(_SPELLED.findall(line))
        line, process = _stripped(line)
        taken = next((grammar for grammar in grammars if grammar.take(line, process)), None)
        num_bad += taken is None and line.startswith('{"')
        if "verflow" in line or "OVERFLOW" in line or "kipping" in line or "inimum" in line:
            skipped.take(line, taken)
    printed.count_by_bars()
    counted = labelled.count_through_epochs()
    best = max(grammars, key=lambda grammar: (grammar.num_norms, sum(map(len, grammar.rows.values()))))
    if isinstance(best, Labelled) and best.skips:
        raise ReportError(
            f"{source.name} says epoch and batch, not the step, and batches are missing or out of order: steps cannot "
            "be counted: log the step, or of one epoch, --pattern 'Batch (?P<step>\\d+).*norm=(?P<value>\\S+)'."
        )
    num_read = sum(sum(map(is_norm, values)) for g in grammars for rows in g.rows.values() for _, values in rows)
    num_read += sum(grammar.num_drawn for grammar in grammars)
    if num_read < num_seen / 2 and num_seen > 8:
        raise ReportError(
            f"{source.name} prints {num_seen:,} gradient norms, of which {num_read:,} can be read: their lines have a "
            "form that is not known. Say where the norm is: --pattern 'step=(?P<step>\\d+).*grad_norm=(?P<value>\\S+)'."
        )
    skips = skipped.found_in(best)
    if not any(best.rows.values()):
        if not skips:
            return []
        best.title = "fp16's overflow lines" if any(skip.is_overflow for skip in skips) else "lines of skipped steps"
        best.is_counted = any(skip.step is None for skip in skips)
        for count, skip in enumerate(skips, 1):
            values = {"loss scale": skip.scale} if skip.scale is not None else {"skipped": 1.0}
            best.add("", count if best.is_counted else skip.step or count, values)
    notes = _notes(source, grammars, best, num_bad) + [counted] * (best is labelled and bool(counted))
    is_cut = lines is None and not source.ends_whole
    if best is taken and not isinstance(best, Json | Printed | Blocks) and is_cut:
        notes += _drop_cut_value(best, last)
    made = [
        Recording(source.name, best.title, "", process, rows, config.settings, verdicts=json_lines.verdicts)
        for process, rows in best.rows.items()
    ]
    made[0].notes, made[0].skips = notes, skips
    for recording in made:
        recording.is_counted = best.is_counted or (best is labelled and labelled.is_late)
        if num_seen:
            recording.receipt = f"{min(num_read, num_seen):,} of {num_seen:,} gradient norms read"
    return made


_DICT_BEGINS = re.compile(r"\{'[\w/ .-]+': [^{}]*,\s*$")


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """The lines, those of a dict that pprint has printed over several put together."""
    parts: list[str] = []
    for line in lines:
        if parts:
            parts.append(line.strip())
            if "}" in line or len(parts) > 200:
                yield " ".join(parts)
                parts = []
        elif line[:2] == "{'" and _DICT_BEGINS.match(line):
            parts = [line.rstrip()]
        else:
            yield line
    yield from parts


class _Skipped:
    """The lines in which a trainer says that it skipped an optimizer step, as fp16's loss scalers do."""

    def __init__(self, grammars: list[Grammar]) -> None:
        self._grammars = grammars
        self._found: list[tuple[Skip, list[tuple[str, int] | None]]] = []
        self._seen: set[tuple] = set()

    def take(self, line: str, taken: Grammar | None) -> None:
        """Takes a line; ``taken`` is the grammar that has read a step from it."""
        is_end = _AT_MINIMUM.search(line) is not None
        skipped = _SKIPPED.search(line)
        if not (is_end or skipped) or len(self._found) > _MOST_SKIPS:
            return
        drawn, scale = _DRAWN.search(line), _SCALE.search(line)
        before, after = (scale[1], scale[2] or scale[3]) if scale else (None, None)
        skip = Skip(
            step=int(drawn[1]) if drawn and taken is None else None,
            is_after=taken is None,
            is_overflow=is_end or bool(skipped and skipped[1]),
            before=_float(before) if before else None,
            scale=_float(after) if after else None,
            is_end=is_end,
        )
        places = [grammar.last for grammar in self._grammars]
        if (skip, *places) not in self._seen:  # each rank may print it
            self._seen.add((skip, *places))
            self._found.append((skip, places))

    def found_in(self, best: Grammar) -> list[Skip]:
        """The skipped steps, each with the step of the log's own rows that it came after."""
        at = self._grammars.index(best)
        return [
            replace(skip, step=best.step_at(places[at])) if skip.step is None else skip for skip, places in self._found
        ]


def _stripped(line: str) -> tuple[str, str]:
    """A line without Ray's mark of repetition, and the process that printed it."""
    if "[repeated " in line:
        line = _REPEATED.sub("", line)
    process = _PROCESS.search(line[:80])
    return line, next(filter(None, process.groups()), "") if process else ""


def _notes(source: Source, grammars: list[Grammar], best: Grammar, num_bad: int) -> list[str]:
    notes = list(source.notes)
    if best.is_counted:
        notes.append(
            f"The lines of {source.name} do not say their step: it was counted, one for each line with a norm."
        )
    for other in grammars:
        if other is not best and other.num_norms:
            notes.append(
                f"{source.name} also holds {other.num_norms} rows with a gradient norm of another kind "
                f"({other.title}); {best.title} has more and was read."
            )
    if isinstance(best, Json) and num_bad == 1 and not source.ends_whole:
        notes.append(f"The last line of {source.name} is cut off and was left out.")
    elif isinstance(best, Json) and num_bad:
        notes.append(f"{plural(num_bad, 'line')} of {source.name} cannot be read, left out.")
    return notes


def _drop_cut_value(grammar: Grammar, last: str) -> list[str]:
    """The last value of a file that ends within a line may lack digits: 90 of 903."""
    step, values = grammar.rows[_stripped(last)[1]][-1]
    name = next(reversed(values), None)
    if name is None or last.rstrip().endswith((")", "]")):
        return []
    del values[name]
    return [f"The last line is cut off: {name} of step {step} may lack digits and was left out."]


class _Config:
    """The settings that verl prints when it starts: one dict over many lines, behind Ray's prefix."""

    def __init__(self) -> None:
        self.settings: dict = {}
        self._parts: list[str] = []

    @property
    def is_open(self) -> bool:
        return bool(self._parts)

    def take(self, line: str) -> None:
        if not self.is_open and (self.settings or not _CONFIG_BEGINS.search(line)):
            return
        self._parts.append(re.sub(r"^\([^()]*pid=[^()]*\)\s?", "", line))
        whole = "\n".join(self._parts) if line.rstrip().endswith("}") else ""
        if len(self._parts) > _CONFIG_LINES:
            self._parts = []
        elif whole and whole.count("{") <= whole.count("}"):
            self._parts = []
            self.settings = flat(_evaluated(whole))


# ---- by a pattern of one's own


def read_by_pattern(path: Path, pattern: str) -> Recording:
    """The rows of a file by a pattern.

    Args:
        path: an existing file.
        pattern: its group ``value`` is the gradient norm, ``step`` the step (else lines are counted), any other group
            a metric of that name.

    Raises:
        ReportError: when the pattern cannot be read, has no group ``value``, or finds no line.
    """
    try:
        known = re.compile(pattern)
    except re.error as error:
        raise ReportError(f"--pattern {pattern!r} is no regular expression: {error}.") from None
    if "value" not in known.groupindex:
        raise ReportError(f"--pattern {pattern!r} has no group for the norm: write it as 'grad_norm=(?P<value>\\S+)'.")
    if not path.is_file():
        raise ReportError(f"{path} is no file: --pattern reads lines of one.")
    source = Source(path)
    made = Recording(path.name, "lines by --pattern", notes=source.notes, folder=path.parent)
    num_lines = 0
    for line in unwrapped(source.lines()):
        num_lines += 1
        found = known.search(line)
        if found is None:
            continue
        values = {name: number((text or "").strip(" ,;|")) for name, text in found.groupdict().items()}
        norm, step = values.pop("value"), values.pop("step", None)
        if norm is None or ("step" in known.groupindex and step is None):
            continue
        metrics = {name: value for name, value in values.items() if value is not None}
        made.rows.append((len(made.rows) + 1 if step is None else int(step), {"grad_norm": norm, **metrics}))
    if not made.rows:
        raise ReportError(f"{path.name}: --pattern {pattern!r} finds no number in its {num_lines:,} lines.")
    made.receipt = f"{len(made.rows):,} of {num_lines:,} lines read"
    made.is_counted = "step" not in known.groupindex
    if made.is_counted:
        made.notes.append("--pattern has no group `step`: each line that it finds was counted as one.")
    return made


# ---- out of the JSON that Docker, journald and the log stores of clouds put around each line

_TEXTS = ("log", "MESSAGE", "message", "@message", "textPayload", "line", "msg", "body")
"""The fields that hold a line."""
_TIMES = ("timestamp", "@timestamp", "time", "ts", "__REALTIME_TIMESTAMP", "__CURSOR")
_WRAPS = re.compile(rf'"(?:{"|".join(_TEXTS)})"\s*:\s*["\[]')
_CALL = re.compile(r"\b(?:[A-Za-z_]\w*\.)?[A-Za-z_]\w*\(([-+.\deE]+|nan|inf)[^()]*\)")  # np.float64(0.3), tensor(0.3)
_BARE = re.compile(r"(?<![\w.'\"])-?(?:nan|inf)(?![\w'\"])")


def unwrapped(lines: Iterable[str]) -> Iterator[str]:
    """The lines, each that is a JSON object around another line replaced by that one."""
    for line in lines:
        if line[:1] == "{" and _WRAPS.search(line):
            try:
                entry = parse_json(line)
                inner = [] if any(map(is_norm, entry)) else texts_of(entry)
            except ValueError:
                inner = []
            if inner:
                yield from inner
                continue
        yield line


def texts_of(document: Any) -> list[str]:
    """The lines in an export of a log store, the oldest first where their times are known; none where it is none."""
    found = list(_walk(document, None))
    if all(isinstance(time, str) and time.isdigit() for time, _ in found):
        found = [(int(time), text) for time, text in found]
    times = [time for time, _ in found]
    if all(isinstance(time, str) for time in times) or all(isinstance(time, int | float) for time in times):
        found.sort(key=lambda entry: entry[0])
    return [part for _, text in found for part in text.rstrip("\n").split("\n")]


def _walk(entry: Any, time: Any) -> Iterator[tuple[Any, str]]:
    """Each line and its time."""
    if isinstance(entry, list):
        if len(entry) == 2 and isinstance(entry[1], str) and str(entry[0]).isdigit():  # Loki's pairs
            yield entry[0], entry[1]
            return
        for part in entry:
            yield from _walk(part, time)
    elif isinstance(entry, dict):
        time = next((entry[name] for name in _TIMES if name in entry), time)
        text = next((entry[name] for name in _TEXTS if isinstance(entry.get(name), str | list)), None)
        if isinstance(text, list) and text and all(isinstance(byte, int) and 0 <= byte < 256 for byte in text):
            text = bytes(text).decode("utf-8", errors="replace")  # journald's, of what is no plain text
        if isinstance(text, str):
            yield time, text
            return
        for part in entry.values():
            if isinstance(part, dict | list):
                yield from _walk(part, time)


def literal(text: str) -> Any:
    """A Python literal as it was printed, such as a Trainer's ``log_history``; None where it is none.

    >>> literal("[{'loss': nan, 'grad_norm': np.float64(0.5)}]")
    [{'loss': 'nan', 'grad_norm': 0.5}]
    """
    return _evaluated(_BARE.sub(lambda found: repr(found[0]), _CALL.sub(r"\1", text)))


def _evaluated(text: str) -> Any:
    if sum(map(text.count, ",([{-+")) > LITERAL:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of 65or, in what is no literal after all
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None
