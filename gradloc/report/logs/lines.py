# SPDX-License-Identifier: Apache-2.0
"""Reads the steps that trainers print, line by line, among everything else that a console shows.

Each grammar knows one way to print a step. Every line goes to the first grammar that takes it, the surest first. The
grammar with the most gradient norms is the log; a note counts the norms of the others.
"""

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ...explain.text import plural
from ...record.files import LITERAL
from ..errors import ReportError
from .grammars import (
    DRAWN,
    HEADED_BY_STEP,
    HEADED_GLOBALLY,
    Console,
    ConsoleTable,
    Grammar,
    Headed,
    Json,
    Printed,
)
from .guessed import Guessed
from .labelled import Labelled
from .names import is_norm, is_training_loss, listed, number
from .pairs import NUMBER, SYMBOL, as_float, repeated_names
from .prometheus import Exposed
from .recording import READ_IN_ORDER, SKIPPED, Recording, Row, Skip, flat
from .skips import OF_SKIPS, SkippedSteps, skip_in
from .source import Source
from .unwrap import ANSI, plain, unwrapped, whole_lines

_PROCESS = re.compile(
    r"\(\w[^()]*\bpid=(\d+)|^\s*(\d+):\s|\[(?:rank|default)[ :=]*(\d+)\]|\brank[=:] ?(\d+)\b|\[\d+,(\d+)\]<std",
    re.IGNORECASE,
)
_REPEATED = re.compile(r"(?<!\s)\s*\[repeated \d+x across cluster\].*$")
_SPELLED = re.compile(  # the letter comes first, and as a set: only that is scanned for
    r"[gG](?i:(?<!max_g)(?<!clip_g)(?!\w*(?:clip|limit|thresh))(?:rad(?:ient)?[ _.]*norm|norm)"
    rf"[\w/.]*['\"]?\s*[:=]\s*['\"]?(?:[\w.]+\()?{NUMBER})"
)
_DECIMAL_COMMA = re.compile(r"[=:]\s*-?(?:0,\d+|\d+,(?:\d{1,2}|\d{4,}))(?![\d,.])")
_DECIMAL_POINT = re.compile(r"[=:]\s*-?\d+\.\d")
_SPELLINGS = (
    (("\x1b", "[0m"), ANSI, ""),
    (("{‘",), re.compile("[‘’]"), "'"),  # as word processors and forums write it
    (("{“", "{'“"), re.compile("[“”]"), '"'),
    (("|g", "∇", "‖"), SYMBOL, "grad_norm"),
    # Cost after iteration 100: 0.64, Loss at epoch 2 and iteration 500 is 0.25
    (
        (" at ", " after ", " for ", " in "),
        re.compile(
            r"\b((?:[a-z]+ )?(?:loss|cost|norm)) (?:at|after|for|in) ((?:step|iteration|batch|epoch) +\d{1,12}"
            r"(?:,? and (?:step|iteration|batch) +\d{1,12})?)(?: *[:=]| is\b)",
            re.IGNORECASE,
        ),
        r"\2 \1:",
    ),
    ((": ",), re.compile(r"\b(idx|index|i|it): ?(\d{1,12})(?=loss)"), r"step \2 "),
    (("[epoch", "[step", "[iter"), re.compile(r"(?<=\[)(epoch|step|iter)(?=\d{1,12}\])"), r"\1 "),
    (("[Train ",), re.compile(r"\[Train (\d{1,12}/\d{1,12})\]"), r"step \1:"),
    # Deeplearning4j's loss
    ((" - Score at",), re.compile(r".* - Score at iteration (\d{1,12}) is "), r"iteration \1 score loss: "),
    # torchtune's epoch and step: 1|73|Loss: 0.25
    (("|L",), re.compile(r"(?<!\S)(\d{1,6})\|(\d{1,12})\|(?=L)"), r"step \2 epoch: \1 | "),
    # build-nanogpt's step, split and loss
    ((" train ", " val "), re.compile(rf"^(\d{{1,12}}) (train|val) ({NUMBER})\s*$"), r"step \1 \2 loss: \3"),
    # YOLACT's epoch, step, and losses by a letter, of which T is the total
    (
        ("|| ETA",),
        re.compile(rf"^\W*\[ *\d+\] +(\d{{1,12}}) \|\| .*\bT: ({NUMBER}) \|\| ETA.*"),
        r"step \1 total loss: \2",
    ),
)
"""Spellings that are made those which a grammar knows: a quick look, a pattern, and what replaces it."""
_COMMA = re.compile(r"(?<=[=:\s]\d),(?=\d)|(?<=\d\d),(?=\d)")
_SAVED = re.compile(
    r"(?:\bsav(?:ed|ing)\b.*?|step_folder: )(?P<path>[\w./~-]*(?:global_step_|checkpoint-)(?P<step>\d{1,15}))\b"
    r"|saved checkpoint from iteration +(?P<iteration>\d{1,15}) to (?P<folder>[\w./~-]+)",
    re.IGNORECASE,
)
"""A checkpoint that was written, as verl, a Trainer and Megatron say it."""
_WORDS = re.compile(
    r"[{•│]|orm|oss|grad|tep|iter|poch|batch|reward|cost|perplexity|nll|xent|entropy|\bkl\b|return|it/|:\[|^\d+ train "
    r"|\|\| ETA|\|g|∇|‖|\btrl:",
    re.IGNORECASE,
)
"""Matches where a grammar may want a line: a quick look before any is tried."""
_WRAPPED = re.compile(r"(?:^|\) )\s*- \S+:")
_CONFIG_BEGINS = re.compile(r"(?:^|\)\s*)\{'\w+': \{")
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_MOST_SHAPES, _LONGEST_SHAPE = 10_000, 500
"""The shapes of lines that no grammar wanted, all but digits: how many are known, and of how many characters."""
_LONGEST_LINE = 200_000
"""Characters of a line beyond which it is read as JSON or not at all."""
_NUMBER, _FEWEST = re.compile(rf"(?:(?:epoch|step|iter(?:ation)?)\W{{0,2}}\d+[\s,:;=]+)?({NUMBER})", re.IGNORECASE), 8
"""A number, which may have its place before it, and how many a text of nothing else has at least."""
_FEW = 3
"""Rows below which a text is read anew, by whatever names it repeats."""
_CONFIG_LINES = 4000
"""Lines that a printed configuration has at most."""


def read_lines(source: Source, text: str | None = None) -> list[Recording]:
    """Return the steps that a text prints, by the process that printed them; ``text`` replaces the file's own."""
    reader = _Reader()
    reader.read(_lines(source, text))
    is_unknown = len([*islice(reader.rows, _FEW)]) + reader.guessed.num_kept < _FEW
    if is_unknown and (names := repeated_names(_lines(Source(source.path), text))):
        reader = _Reader(names)
        reader.read(_lines(Source(source.path), text))
    elif is_unknown and (values := _bare(_lines(Source(source.path), text))):
        name = "loss" if "loss" in source.name.lower() else "value"
        bare = Recording(source.name, "a number a line", rows=[(at, {name: each}) for at, each in enumerate(values, 1)])
        bare.unit, bare.notes = "row", [f"{source.name} holds numbers alone: each line is taken for a row's {name}."]
        return [bare]
    best = reader.best(source.name)
    skips = reader.skipped.found_in(best)
    if not any(best.rows.values()):
        if all(skip.is_nan_loss for skip in skips):
            reader.refuse_unplaced(source.name)
            return []
        skips = reader.make_rows_of_skips(best, skips)
    notes = [*_notes(source, reader, best), *(note for note in [reader.counted] if note and best is reader.labelled)]
    made = _by_process(source.name, best, reader)
    if num_alike := len(best.rows) - len(made):
        others = "1 other process" if num_alike == 1 else f"{num_alike} other processes"
        notes.append(f"{others} in {source.name} printed the same {'gradient norms' if reader.norms else 'losses'}.")
    made[0].notes, made[0].skips = notes, skips
    return made


def _lines(source: Source, text: str | None) -> Iterator[str]:
    return whole_lines(source.lines() if text is None else text.split("\n"))


def _bare(lines: Iterable[str]) -> list[float]:
    """Return the numbers of a text that is nothing else, one on each line; empty where few have decimals."""
    values, num_decimals = [], 0
    for line in lines:
        found = _NUMBER.fullmatch(line.strip())
        if found is None:
            return []
        values.append(as_float(found[1]))
        num_decimals += "." in line
    return values if 2 * num_decimals > len(values) >= _FEWEST else []


class _Reader:
    """Reads a text line by line: each line goes to the first grammar that takes it, the surest first.

    ``also`` names metrics that are wanted though their names say nothing of training.
    """

    def __init__(self, also: frozenset[str] = frozenset()) -> None:
        self.console, self.json, self.printed, self.labelled = Console(), Json(), Printed(), Labelled()
        self.columns, self.headed, self.guessed, self.exposed = ConsoleTable(), Headed(), Guessed(), Exposed()
        self.grammars: list[Grammar] = [self.console, self.json, self.exposed, self.printed, self.labelled]
        self.grammars += [self.columns, self.headed, self.guessed]
        self.labelled.also = self.guessed.also = self._also = also
        self.config, self.skipped = _Config(), SkippedSteps(self.grammars)
        self.last = ""
        """The last line that is not empty."""
        self.taken: Grammar | None = None
        """The grammar that took it."""
        self.saved: dict[int, str] = {}
        """The checkpoints that were written, by their steps."""
        self.num_seen = 0
        """Gradient norms that the lines spell."""
        self.counted = ""
        """A sentence on steps that were counted through the epochs."""
        self._process = ""
        self._num_commas = 0
        """Lines with decimal commas."""
        self._shapes: set[bytes] = set()
        """Lines that no grammar wanted, all but digits."""
        self._is_sifting = True
        """Whether lines of these shapes are passed over."""

    @property
    def rows(self) -> Iterator[dict[str, float]]:
        """Yield the values of every row that any grammar has read."""
        return (values for grammar in self.grammars for rows in grammar.rows.values() for _, values in rows)

    @cached_property
    def norms(self) -> set[str]:
        """The names of norms, once everything is read."""
        return set(filter(is_norm, set().union(*self.rows)))

    def read(self, lines: Iterable[str]) -> None:
        """Read all lines."""
        console, config = self.console, self.config
        for line in lines:
            if not config.is_open and console.take_alike(line):
                self.last, self.taken = line, console
                self.num_seen += line.count("grad_norm")
            else:
                self._take(line)
        self.exposed.close()
        self.printed.resolve()
        self.json.resolve()

    def _take(self, line: str) -> None:
        shape = line[:_LONGEST_SHAPE].encode(errors="replace").translate(_DIGITS)
        if self._is_sifting and shape in self._shapes:  # most lines of a long log
            self.taken = None
            return
        is_again = line == self.last and self.taken is None and self._is_sifting
        if is_again and "OVERFLOW" in line and "orm" not in line:
            self.skipped.take(line, None, self._process)  # a scaler's line, again and again
            return
        if line:
            self.last, self.taken = line, None
        if len(line) > _LONGEST_LINE:
            self.taken = self.json if line[:1] in "{[" and self.json.take(line, "") else None
            return
        is_plain = not self._note(line)
        if self._is_wanted(line):
            self._give(self._cleaned(line))
        elif is_plain and 0 < len(line) < _LONGEST_SHAPE and len(self._shapes) < _MOST_SHAPES:
            self._shapes.add(shape)

    def _note(self, line: str) -> bool:
        """Note settings, a checkpoint or a bar's count, and return whether a line may say one of the last two."""
        if self.config.is_open or "{'" in line:
            self.config.take(plain(line))
        found = _SAVED.search(line) if "heckpoint" in line or "step_folder" in line else None
        if found is not None:
            self.saved[int(found["step"] or found["iteration"])] = found["path"] or found["folder"]
        if "<" in line and (drawn := DRAWN.search(line)):
            self.printed.draw(int(drawn[1]), int(drawn[2]))
        return "<" in line or found is not None

    def _is_wanted(self, line: str) -> bool:
        is_below_head = self.headed.is_by_step and (line[:1].isspace() or ":" in line)
        is_below = self.columns.names or self.exposed.is_open or is_below_head
        return bool(is_below or self._also or _WORDS.search(line) or "- " in line and _WRAPPED.search(line))

    def _cleaned(self, line: str) -> str:
        """Return a line without colours, with its signs, quotation marks and decimals as grammars know them."""
        for words, spelling, known in _SPELLINGS:
            if any(map(line.__contains__, words)):
                line = spelling.sub(known, line)
        if "," in line and _DECIMAL_COMMA.search(line) and not _DECIMAL_POINT.search(line):
            self._num_commas += 1
            return _COMMA.sub(".", line)
        is_among_others = self._num_commas > 2 and not _DECIMAL_POINT.search(line)  # as 903,000 among 0,481
        return _COMMA.sub(".", line) if is_among_others else line

    def _give(self, line: str) -> None:
        """Give a line to the grammars, and to what counts skipped steps."""
        self.num_seen += sum(len(_SPELLED.findall(part)) for part in line.split(" - ") if "orm" in part)
        line, self._process = _stripped(line)
        says_skip = any(word in line for word in OF_SKIPS)
        verdict = skip_in(line) if "orm" in line and says_skip else None
        is_verdict = verdict is not None and (verdict.is_lost or "ad grad" in line)  # Bad grad_norm (grad_norm=nan)
        takers = (grammar for grammar in self.grammars if grammar.take(line, self._process))
        self.taken = taken = None if is_verdict else next(takers, None)
        if taken is self.console and "step:" in line:
            self.console.heads[self.last.partition("step:")[0]] = self._process
        elif taken is None:
            if "lobal" in line and (head := HEADED_GLOBALLY.search(line)):
                self.skipped.step = int(head[1])
            if "tep" in line[:_LONGEST_SHAPE] and (head := HEADED_BY_STEP.search(line)):
                self.printed.draw(int(head[1]) if head[1].isdecimal() else 0, 0)
        if taken is not self.console and says_skip:
            self.skipped.take(line, taken, self._process)
        is_open = self.config.is_open or self.exposed.is_open or self.headed.is_by_step
        self._is_sifting = not (is_open or self.columns.names)

    def best(self, name: str) -> Grammar:
        """Return the grammar that has read the most; raise ReportError where its rows would get wrong steps."""
        is_out_of_order, self.counted = self.labelled.is_out_of_order, self.labelled.count_through_epochs()
        best, guessed = max(self.grammars, key=_amount), self.guessed
        is_little = 4 * _amount(best)[1] < guessed.num_kept and not best.num_norms
        if is_little or 2 * best.num_norms < self.num_seen > 8:
            guessed.resolve()
            best = max(self.grammars, key=_amount)
        if best is self.labelled and is_out_of_order:
            raise ReportError(
                f"{name} gives epoch and batch, not the step, and batches go back within an epoch, so steps cannot be "
                "counted. Log the step, or read one epoch by --pattern 'Batch (?P<step>\\d+).*norm=(?P<value>\\S+)'."
            )
        if best is self.headed and best.is_mixed:  # such headlines may be none
            guessed.resolve()
            is_surer = guessed.rows and guessed.num_norms >= best.num_norms and guessed.unit != "row"
            best = guessed if is_surer else best
        if best.is_mixed:
            raise ReportError(
                f"{name} has its steps in headlines, with the values below. Headlines are missing or out of order, so "
                "values would get a wrong step: name the file that one process wrote."
            )
        if not any(best.rows.values()):
            guessed.resolve_unfinite()
            best = guessed if guessed.rows else best
        if self.num_read < self.num_seen / 2 and self.num_seen > 8:
            raise ReportError(
                f"{name} prints {self.num_seen:,} gradient norms, and only {self.num_read:,} can be read: the form of "
                "their lines is not known. Say where the norm is: --pattern "
                "'step=(?P<step>\\d+).*grad_norm=(?P<value>\\S+)'."
            )
        counts = dict(self.skipped.counts) if best.unit == "step" else {}
        for step, values in chain.from_iterable(best.rows.values()):
            if step in counts:
                values[SKIPPED] = float(counts[step])
        return best

    @cached_property
    def num_read(self) -> int:
        """Gradient norms that grammars have read, once everything is read."""
        num_drawn = sum(grammar.num_drawn for grammar in self.grammars)
        return sum(name in values for values in self.rows for name in self.norms) + num_drawn

    def refuse_unplaced(self, name: str) -> None:
        """Raise ReportError where lines hold values, and none says of which step."""
        lost = self.guessed.lost
        if names := self.guessed.names + self.exposed.unplaced:
            are_lost = f", of which {listed(lost, 3)} {'is' if len(lost) == 1 else 'are'} not finite" if lost else ""
            raise ReportError(
                f"{name} has values ({listed(names, 3)}){are_lost}, and no line says of which step: also paste the "
                "step's headline, or name a log with several steps."
            )

    def make_rows_of_skips(self, best: Grammar, skips: Sequence[Skip]) -> list[Skip]:
        """Make rows of skipped steps, which are all that a text says, and return these with the rows' steps."""
        counts, is_placed = self.skipped.counts, all(skip.step is not None for skip in skips)
        best.title = "fp16's overflow lines" if any(skip.is_overflow for skip in skips) else "lines of skipped steps"
        best.unit = "step" if counts or is_placed else "row"
        skips = [replace(skip, step=skip.step if best.unit == "step" else None, row=None) for skip in skips]
        for step, count in counts:
            best.add("", step, {SKIPPED: float(count)})
        for count, skip in enumerate(skips if not counts else (), 1):
            values = {"loss scale": skip.scale} if skip.scale is not None else {"skipped": 1.0}
            best.add("", count if best.unit == "row" or skip.step is None else skip.step, values)
        return skips


def _by_process(name: str, best: Grammar, reader: _Reader) -> list[Recording]:
    """Return a recording for each process whose rows no other one printed."""
    if len(best.rows) > 1 and all(len(rows) == 1 and str(rows[0][0]) == of for of, rows in best.rows.items()):
        best.rows = {"": [row for rows in best.rows.values() for row in rows]}  # 47: 0.25 is no process' line
    receipt, count = "", max(min(reader.num_read, reader.num_seen), best.num_norms)
    if reader.num_seen:
        receipt = f"{count:,} of {max(count, reader.num_seen):,} gradient norms read"
        receipt += " in the whole file" if len(best.rows) > 1 else ""
    judged = reader.norms or set(filter(is_training_loss, set().union(*reader.rows)))
    made, printed_by, apart = list[Recording](), list[set[tuple]](), _processes_apart(best.rows)
    for process, rows in sorted(best.rows.items(), key=lambda entry: -len(entry[1])):
        printed = {(step, name, repr(values[name])) for step, values in rows for name in judged if name in values}
        if printed and any(printed <= other for other in printed_by):
            continue
        printed_by.append(printed)
        run = f"process {process}" if process in apart else ""
        made.append(Recording(name, best.title, run, process, rows, reader.config.settings, unit=best.unit))
        made[-1].verdicts, made[-1].saved, made[-1].receipt = reader.json.verdicts, reader.saved, receipt
    return made


def _processes_apart(rows: dict[str, list[Row]]) -> set[str]:
    """Return the processes whose steps all come after those of one that is below them in the file, as of two runs."""
    ends = [(process, min(row[0] for row in its), max(row[0] for row in its)) for process, its in rows.items() if its]
    return {process for at, (process, first, _) in enumerate(ends) if any(first > last for *_, last in ends[at + 1 :])}


def _amount(grammar: Grammar) -> tuple[int, int, bool]:
    """Return how many norms and rows a grammar has read, and whether the rows say their step."""
    return grammar.num_norms, sum(map(len, grammar.rows.values())), grammar.unit != "row"


def _stripped(line: str) -> tuple[str, str]:
    """Return a line without Ray's mark of repetition, and the process that printed it."""
    if "[repeated " in line:
        line = _REPEATED.sub("", line)
    process = _PROCESS.search(line[:80])
    return line, next(filter(None, process.groups()), "") if process else ""


def _notes(source: Source, reader: _Reader, best: Grammar) -> list[str]:
    notes, num_bad = list(source.notes), reader.json.num_bad
    if best.unit == "row":
        notes.append(f"{source.name} gives no step numbers, so its {READ_IN_ORDER}")
    for other in reader.grammars:
        if other is not best and other.num_norms:
            notes.append(
                f"{source.name} also has {plural(other.num_norms, 'row')} with a gradient norm in another form "
                f"({other.title}). Only the form with more such rows was read ({best.title})."
            )
    if isinstance(best, Json) and num_bad == 1 and not source.ends_whole:
        notes.append(f"The last line of {source.name} is cut off and was left out.")
    elif isinstance(best, Json) and num_bad:
        notes.append(f"GradLoc left out {plural(num_bad, 'line')} of {source.name} that it cannot read.")
    return notes


class _Config:
    """The settings that verl prints when it starts: one dict over many lines, behind Ray's prefix."""

    def __init__(self) -> None:
        self.settings: dict = {}
        self.is_open = False
        """Whether the lines to come are of it."""
        self._parts: list[str] = []

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
        self.is_open = bool(self._parts)


# ---- by a pattern of one's own


def read_by_pattern(path: Path, pattern: str) -> Recording:
    """Return the rows of a file by a pattern.

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
        raise ReportError(f"--pattern '{pattern}' is no regular expression: {error}.") from None
    if "value" not in known.groupindex:
        raise ReportError(f"--pattern '{pattern}' has no group for the norm: write it as 'grad_norm=(?P<value>\\S+)'.")
    if not path.is_file():
        raise ReportError(f"{path} is no file: --pattern reads lines of one.")
    source = Source(path)
    made = Recording(path.name, "lines by --pattern", notes=source.notes, folder=path.parent)
    made.unit, num_lines = "step" if "step" in known.groupindex else "row", 0
    for line in unwrapped(source.lines()):
        num_lines += 1
        texts = found.groupdict() if (found := known.search(line)) else {}
        spelled = {name: number((text or "").strip(" ,;|")) for name, text in texts.items()}
        values = {name: value for name, value in spelled.items() if value is not None}
        norm, step = values.pop("value", None), values.pop("step", None)
        if norm is not None and (made.unit == "row" or step is not None):
            made.rows.append((len(made.rows) + 1 if step is None else int(step), {"grad_norm": norm, **values}))
    if not made.rows:
        raise ReportError(f"{path.name}: --pattern '{pattern}' finds no number in its {num_lines:,} lines.")
    made.receipt = f"{len(made.rows):,} of {num_lines:,} lines read"
    if made.unit == "row":
        made.notes.append("--pattern has no group `step`, so the lines that it finds are numbered from 1.")
    return made


_CALL = re.compile(r"\b(?:[A-Za-z_]\w*\.)?[A-Za-z_]\w*\(([-+.\deE]+|nan|inf)[^()]*\)")  # np.float64(0.3), tensor(0.3)
_BARE = re.compile(r"(?<![\w.'\"])-?(?:nan|inf)(?![\w'\"])")


def literal(text: str) -> Any:
    """Return a Python literal as it was printed, such as a Trainer's ``log_history``; None where it is none.

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
