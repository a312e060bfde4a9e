# SPDX-License-Identifier: Apache-2.0
"""Reads the steps that trainers print, line by line, among everything else that a console shows.

Each grammar knows one way to print a step. Every line goes to the first grammar that takes it, the surest first. The
grammar with the most gradient norms is the log; a note counts the norms of the others.
"""

import ast
import functools
import html
import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

from ...explain.text import plural
from ...record.files import LITERAL, parse_json
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
    Labelled,
    Printed,
)
from .guessed import Guessed
from .names import is_norm, is_training_loss, leaves, listed, may_lack_digits, number, step_of
from .pairs import NUMBER, SYMBOL, as_float, pairs, wanted
from .prometheus import Exposed
from .recording import SKIPPED, Recording, Row, Skip, flat
from .source import Source

_COLOUR, _COLOUR_WITHOUT_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]"), re.compile(r"\[\d{1,3}(?:;\d{1,3})*m")
_PROCESS = re.compile(
    r"\(\w[^()]*\bpid=(\d+)|^\s*(\d+):\s|\[(?:rank|default)[ :=]*(\d+)\]|\brank[=:] ?(\d+)\b|\[\d+,(\d+)\]<std",
    re.IGNORECASE,
)
_REPEATED = re.compile(r"(?<!\s)\s*\[repeated \d+x across cluster\].*$")
_SPELLED = re.compile(  # the letter comes first, and as a set: only that is scanned for
    r"[gG](?i:(?<!max_g)(?<!clip_g)(?!\w*(?:clip|limit|thresh))(?:rad(?:ient)?[ _.]*norm|norm)"
    rf"[\w/.]*['\"]?\s*[:=]\s*['\"]?(?:[\w.]+\()?{NUMBER})"
)
_SKIPPED = re.compile(
    r"(overflow(?:!| detected| occurs|\. +skip))"
    r"|skipping (?:the |this )?(?:optimi[sz]er |gradient |weight )?(?:step|updat(?:e|ing))\b"
    r"|do not update (?:the )?model|grad(?:ient)?[_ ]norm is not finite|bad grad(?:ient)?[_ ]norm"
    r"|(reducing dynamic loss scale)",
    re.IGNORECASE,
)
_SCALE = re.compile(
    rf"scale\D{{0,3}}(?: to| from)?:? *({NUMBER}),?(?: reducing)? to ({NUMBER})|scale to:? *({NUMBER})", re.IGNORECASE
)
_NAN_LOSS = re.compile(
    r"diverged with loss|\bloss became (?:infinite|nan)|\bnan loss (?:encountered|during|detected|with)"
    r"|(?:received|got|found|detected)(?: an?)? nan loss|\bloss is \S+ stop"
    r"|loss = \S+ is not finite|unexpected result (?:nan|inf)",
    re.IGNORECASE,
)
_DECIMAL_COMMA = re.compile(r"[=:]\s*-?(?:0,\d+|\d+,(?:\d{1,2}|\d{4,}))(?![\d,.])")
_DECIMAL_POINT = re.compile(r"[=:]\s*-?\d+\.\d")
_COMMA = re.compile(r"(?<=[=:\s]\d),(?=\d)|(?<=\d\d),(?=\d)")
_AT_MINIMUM = re.compile(
    r"loss scale already at minimum|minimum loss scale reached|grad[_ ]scale is too small", re.IGNORECASE
)
_OVERFLOWED_AT = re.compile(r"overflow on iteration:? (\d{1,12})\b", re.IGNORECASE)
_COUNTED = re.compile(r"\bstep=(\d{1,12}), skipped=(\d{1,12})\b")
_LOST = re.compile(r"norm(?: is |=)(?:nan|inf|not finite)", re.IGNORECASE)
_OF_SKIPS = (
    *("verflow", "OVERFLOW", "kipping", "inimum", "o not update", "not finite", "diverged", " loss ", "became"),
    *("topping", "result", "skipped=", "cale is", "ad grad"),
)
_SAVED = re.compile(
    r"(?:\bsav(?:ed|ing)\b.*?|step_folder: )(?P<path>[\w./~-]*(?:global_step_|checkpoint-)(?P<step>\d{1,15}))\b"
    r"|saved checkpoint from iteration +(?P<iteration>\d{1,15}) to (?P<folder>[\w./~-]+)",
    re.IGNORECASE,
)
"""A checkpoint that was written, as verl, a Trainer and Megatron say it."""
_WORDS = re.compile(
    r"[{•│]|orm|oss|grad|tep|iter|poch|batch|reward|cost|perplexity|nll|xent|entropy|\bkl\b|return|it/|:\[|^\d+ train "
    r"|\|\| ETA",
    re.IGNORECASE,
)
"""Matches where a grammar may want a line: a quick look before any is tried."""
_WRAPPED = re.compile(r"(?:^|\) )\s*- \S+:")
_CONFIG_BEGINS = re.compile(r"(?:^|\)\s*)\{'\w+': \{")
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_QUOTES = str.maketrans("‘’“”", "''\"\"")
_MOST_SHAPES, _LONGEST_SHAPE = 10_000, 500
"""The shapes of lines that no grammar wanted, all but digits: how many are known, and of how many characters."""
_LONGEST_LINE = 200_000
"""Characters of a line beyond which it is read as JSON or not at all."""
_MOST_SKIPS = 10_000
"""Lines of skipped steps that are kept."""
_CONFIG_LINES = 4000
"""Lines that a printed configuration has at most."""


def read_lines(source: Source, text: str | None = None) -> list[Recording]:
    """Return the steps that a text prints, by the process that printed them; ``text`` replaces the file's own."""
    console, json_lines, printed, labelled = Console(), Json(), Printed(), Labelled()
    columns, headed, guessed, exposed = ConsoleTable(), Headed(), Guessed(), Exposed()
    grammars = [console, json_lines, exposed, printed, labelled, columns, headed, guessed]
    config, skipped = _Config(), _Skipped(grammars)
    last, taken, process = "", None, ""
    num_bad = num_seen = num_commas = 0
    saved, shapes, is_sifting = dict[int, str](), set[bytes](), True
    lines = source.lines() if text is None else text.split("\n")
    for line in _joined(_redrawn(unwrapped(filter(None, lines)))):
        if not config.is_open and console.take_alike(line):
            last, taken = line, console
            num_seen += line.count("grad_norm")
            continue
        shape = line[:_LONGEST_SHAPE].encode(errors="replace").translate(_DIGITS)
        if is_sifting and shape in shapes:  # most lines of a long log
            taken = None
            continue
        if line == last and taken is None and is_sifting and "OVERFLOW" in line and "orm" not in line:
            skipped.take(line, None, process)  # a scaler's line, again and again
            continue
        if line:
            last, taken = line, None
        if len(line) > _LONGEST_LINE:
            taken = json_lines if line[:1] in "{[" and json_lines.take(line, "") else None
            num_bad += taken is None and line.startswith('{"')
            continue
        if config.is_open or "{'" in line:
            config.take(_plain(line))
        found = _SAVED.search(line) if "heckpoint" in line or "step_folder" in line else None
        if found is not None:
            saved[int(found["step"] or found["iteration"])] = found["path"] or found["folder"]
        if "<" in line and (drawn := DRAWN.search(line)):
            printed.draw(int(drawn[1]), int(drawn[2]))
        is_below = columns.names or exposed.is_open or headed.is_by_step and (line[:1].isspace() or ":" in line)
        if not (is_below or _WORDS.search(line) or "- " in line and _WRAPPED.search(line)):
            if "verflow" in line or "OVERFLOW" in line or "inimum" in line or "cale is" in line:
                skipped.take(line, None)
            elif "<" not in line and found is None and 0 < len(line) < _LONGEST_SHAPE and len(shapes) < _MOST_SHAPES:
                shapes.add(shape)
            continue
        if "\x1b" in line or "[0m" in line:
            line = _plain(line)
        if "{‘" in line:  # as word processors and forums write it
            line = line.translate(_QUOTES)
        if "|g" in line or "∇" in line or "‖" in line:
            line = SYMBOL.sub("grad_norm", line)
        if "," in line and _DECIMAL_COMMA.search(line) and not _DECIMAL_POINT.search(line):
            num_commas += 1
            line = _COMMA.sub(".", line)
        elif num_commas > 2 and not _DECIMAL_POINT.search(line):  # as 903,000 among 0,481
            line = _COMMA.sub(".", line)
        num_seen += sum(len(_SPELLED.findall(part)) for part in line.split(" - ") if "orm" in part)
        line, process = _stripped(line)
        verdict = _skip_in(line) if "orm" in line and any(word in line for word in _OF_SKIPS) else None
        is_verdict = verdict is not None and (verdict.is_lost or "ad grad" in line)  # Bad grad_norm (grad_norm=nan)
        taken = None if is_verdict else next((grammar for grammar in grammars if grammar.take(line, process)), None)
        if taken is console and "step:" in line:
            console.heads[last.partition("step:")[0]] = process
        num_bad += taken is None and line.startswith('{"')
        if taken is None and "lobal" in line and (head := HEADED_GLOBALLY.search(line)):
            skipped.step = int(head[1])
        if taken is None and "tep" in line[:_LONGEST_SHAPE] and (head := HEADED_BY_STEP.search(line)):
            printed.draw(int(head[1]) if head[1].isdecimal() else 0, 0)
        if taken is not console and any(word in line for word in _OF_SKIPS):
            skipped.take(line, taken, process)
        is_sifting = not (config.is_open or exposed.is_open or headed.is_by_step or columns.names)
    exposed.close()
    printed.resolve()
    json_lines.resolve()
    is_out_of_order, counted = labelled.goes_back, labelled.count_through_epochs()
    best = max(grammars, key=_amount)
    if 4 * _amount(best)[1] < guessed.num_kept and not best.num_norms or 2 * best.num_norms < num_seen > 8:
        guessed.resolve()
        best = max(grammars, key=_amount)
    if best is labelled and is_out_of_order:
        raise ReportError(
            f"{source.name} gives epoch and batch, not the step, and batches go back within an epoch, so steps cannot "
            "be counted. Log the step, or read one epoch by --pattern 'Batch (?P<step>\\d+).*norm=(?P<value>\\S+)'."
        )
    if best is headed and best.is_mixed:  # such headlines may be none
        guessed.resolve()
        is_surer = guessed.rows and guessed.num_norms >= best.num_norms and guessed.unit != "row"
        best = guessed if is_surer else best
    if best.is_mixed:
        raise ReportError(
            f"{source.name} has its steps in headlines, with the values below. Headlines are missing or out of order, "
            "so values would get a wrong step: name the file that one process wrote."
        )
    if not any(best.rows.values()):
        guessed.resolve_unfinite()
        best = guessed if guessed.rows else best
    every_row = [values for grammar in grammars for rows in grammar.rows.values() for _, values in rows]
    norms = set(filter(is_norm, set().union(*every_row)))
    num_read = sum(name in values for values in every_row for name in norms) + sum(
        grammar.num_drawn for grammar in grammars
    )
    if num_read < num_seen / 2 and num_seen > 8:
        raise ReportError(
            f"{source.name} prints {num_seen:,} gradient norms, and only {num_read:,} can be read: the form of their "
            "lines is not known. Say where the norm is: --pattern 'step=(?P<step>\\d+).*grad_norm=(?P<value>\\S+)'."
        )
    skips = skipped.found_in(best)
    counts = dict(skipped.counts) if best.unit == "step" else {}
    for step, values in chain.from_iterable(best.rows.values()):
        if step in counts:
            values[SKIPPED] = float(counts[step])
    if not any(best.rows.values()):
        if all(skip.is_nan_loss for skip in skips):
            if names := guessed.names + exposed.unplaced:
                verb = "is" if len(guessed.lost) == 1 else "are"
                lost = f", of which {listed(guessed.lost, 3)} {verb} not finite" if guessed.lost else ""
                raise ReportError(
                    f"{source.name} has values ({listed(names, 3)}){lost}, and no line says of which step: paste the "
                    "headline of the step, too, or name a log with several steps."
                )
            return []
        best.title = "fp16's overflow lines" if any(skip.is_overflow for skip in skips) else "lines of skipped steps"
        best.unit = "step" if skipped.counts or all(skip.step is not None for skip in skips) else "row"
        skips = [replace(skip, step=skip.step if best.unit == "step" else None, row=None) for skip in skips]
        for step, count in skipped.counts:
            best.add("", step, {SKIPPED: float(count)})
        for count, skip in enumerate(skips if not skipped.counts else (), 1):
            values = {"loss scale": skip.scale} if skip.scale is not None else {"skipped": 1.0}
            best.add("", count if best.unit == "row" else skip.step, values)
    notes = _notes(source, grammars, best, num_bad) + [counted] * (best is labelled and bool(counted))
    is_cut = text is None and not source.ends_whole
    if best is taken and not isinstance(best, Json | Printed | Headed) and is_cut:
        notes += _drop_cut_value(best, _plain(last))
    if len(best.rows) > 1 and all(len(rows) == 1 and str(rows[0][0]) == of for of, rows in best.rows.items()):
        best.rows = {"": [row for rows in best.rows.values() for row in rows]}  # 47: 0.25 is no process' line
    made, printed_by = list[Recording](), dict[str, set[tuple]]()
    judged = norms or set(filter(is_training_loss, set().union(*every_row)))
    apart = _processes_apart(best.rows)
    for process, rows in sorted(best.rows.items(), key=lambda entry: -len(entry[1])):
        printed = {(step, name, repr(values[name])) for step, values in rows for name in judged if name in values}
        if not printed or not any(printed <= other for other in printed_by.values()):
            printed_by[process] = printed
            run = f"process {process}" if process in apart else ""
            made.append(Recording(source.name, best.title, run, process, rows, config.settings))
            made[-1].verdicts = json_lines.verdicts
    if num_alike := len(best.rows) - len(made):
        others = "1 other process" if num_alike == 1 else f"{num_alike} other processes"
        notes.append(f"{others} in {source.name} printed the same {'gradient norms' if norms else 'losses'}.")
    made[0].notes, made[0].skips = notes, skips
    for recording in made:
        recording.saved = saved
        recording.unit = best.unit
        if num_seen:
            count = max(min(num_read, num_seen), best.num_norms)
            recording.receipt = f"{count:,} of {max(count, num_seen):,} gradient norms read"
    return made


def _processes_apart(rows: dict[str, list[Row]]) -> set[str]:
    """Return the processes whose steps all come after those of one that is below them in the file, as of two runs."""
    ends = [(process, min(row[0] for row in its), max(row[0] for row in its)) for process, its in rows.items() if its]
    return {process for at, (process, first, _) in enumerate(ends) if any(first > last for *_, last in ends[at + 1 :])}


def _amount(grammar: Grammar) -> tuple[int, int, bool]:
    """Return how many norms and rows a grammar has read, and whether the rows say their step."""
    return grammar.num_norms, sum(map(len, grammar.rows.values())), grammar.unit != "row"


_DICT_BEGINS = re.compile(r"\{'[\w/ .-]+': [^{}]*,\s*$")
_JSON_BEGINS = re.compile(r"^[^{]*[^{\s][^{]*\{\"[^{}]{60,}$")
"""JSON behind something else, in a line that a terminal has wrapped."""
_BARS = re.compile(
    r"\^M|(?<=\w)(?=\| epoch \d)|\s*(?=Epoch \d{1,9}:?[^|%]{0,20}\d{1,3}%\|)"
    r"|(?<=\])\s*(?=\d{1,3}%\||(?:INFO|WARNING|ERROR):)"
    r"|[^\s,]*(?=Metric \w+ improved|Epoch \d+, global step \d)"
)
"""Before each of several progress bars on a line; a carriage return, as a pager shows it; what Lightning prints behind
a bar that the terminal has cut, with the bar's last word."""
_SEVERAL = ("^M", " global step ", "Metric ", "]INFO:", "]WARNING:", "]ERROR:")
_HEAD = re.compile(r"[A-Za-z][a-z_ ]{2,20}[:=] ?(?=\d)")
"""A name at the beginning of a line, and where its number begins."""
_ROW_BEGINS = re.compile(r"\W*iteration\s+\d{1,12}\s*/\s*\d+ \|(?!.*(?:loss|norm)).*\|\s*$")
_OF_ROW = re.compile(r"\s*[a-z][a-z ()-]{2,40}: +\S+ *(?:\||$)")
_BEHIND_BAR = re.compile(r"(?<=\d)(?=Epoch \d+, global step \d|20\d\d-\d\d-\d\d \d\d:\d\d)")
"""Before what is printed right behind the last value of a bar that is whole."""


_BELOW_BAR = re.compile(r" {20,}\x1b\[3m")
"""The beginning of what rich has wrapped below a bar: blanks, and italics."""


def _redrawn(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines; a bar that rich has drawn on a terminal with the values that are wrapped below it."""
    bar = ""
    for line in lines:
        if bar and _BELOW_BAR.match(line):
            bar += f" {_plain(line).strip()}"
            continue
        if bar:
            yield bar
        bar = _plain(line).rstrip() if "\x1b[2K" in line and "━" in line else ""
        if not bar:
            yield line
    yield from filter(None, [bar])


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines, those of a dict that is printed over several put together, and bars on one line apart."""
    parts: list[str] = []
    closes = ""  # the end of what a terminal has wrapped, || of a row that somebody has broken at its bars
    for line in lines:
        if closes and ("{" in line or "consumed samples" in line or len(parts) > (20 if closes == "||" else 4)):
            yield from parts
            parts, closes = [], ""
        if closes == "||" and not _OF_ROW.match(line):
            yield " ".join(parts)
            parts, closes = [], ""
        if closes:
            parts.append(line.strip() if closes == "||" else line)
            if closes != "||" and ("}" in line if closes == "}" else line.rstrip().endswith("|")):
                yield "".join(parts)
                parts, closes = [], ""
        elif parts and line[:1].isalpha():  # of another process
            yield line
        elif parts:
            parts = [] if line.rstrip().endswith("[") else [*parts, line.strip()]  # the dicts that it holds come next
            if "}" in line or len(parts) > 200:
                yield " ".join(parts)
                parts = []
        elif "%|" in line and (
            line.count("%|") > 1 or line.count("| epoch ") > 1 or any(map(line.__contains__, _SEVERAL))
        ):
            yield from filter(None, _BARS.split(line))
        elif len(line) > 2000 and (head := _HEAD.match(line)) and line.count(head[0]) > 5:  # written without line ends
            yield from filter(None, re.split(f"(?={re.escape(head[0])})", line))
        elif "━" in line and _BEHIND_BAR.search(line):
            yield from _BEHIND_BAR.split(line)
        elif _ROW_BEGINS.match(line):
            parts, closes = [line.strip()], "||"
        elif "consumed samples" in line and "iteration" in line and not line.rstrip().endswith("|"):
            parts, closes = [line], "|"
        elif "{" not in line:
            yield line
        elif "{'" in line and line[0] != "(" and _DICT_BEGINS.search(line) or line.strip() == "{":
            parts = [line.rstrip()]
        elif '{"' in line and _JSON_BEGINS.search(line):
            parts, closes = [line], "}"
        else:
            yield line
    yield from [" ".join(parts)] if closes == "||" else parts


class _Skipped:
    """The lines in which a trainer says that it skipped an optimizer step, as fp16's loss scalers do."""

    def __init__(self, grammars: list[Grammar]) -> None:
        self.step: int | None = None
        """The last message on a line without values."""
        self._last: dict[bool, Skip] = {}
        """The last message of the scaler itself, which DeepSpeed prints next to another, and the last other one."""
        self._said: int | None = None
        """The iteration that DeepSpeed says has overflowed."""
        self.counts: list[tuple[int, int]] = []
        """Steps, and how many of them were skipped, as DeepSpeed counts them."""
        self._grammars = grammars
        self._found: list[tuple[Skip, list[tuple[str, int] | None], bool]] = []
        """Skips, with the rows before them by each grammar, and whether the scaler itself says it."""
        self._grows = False
        """Whether a scale was seen to rise to a new one: then it may fall to one that it has been at."""
        self._seen: dict[tuple, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        """How often each process printed a message, by the message and the rows before it."""

    def take(self, line: str, taken: Grammar | None, process: str = "") -> None:
        """Takes a line; ``taken`` is the grammar that has read a step from it."""
        if said := _OVERFLOWED_AT.search(line):
            self._said = int(said[1])
        skip = _skip_in(line)
        if (counts := _COUNTED.search(line)) and len(self.counts) < _MOST_SKIPS:
            self.counts.append((int(counts[1]), int(counts[2])))
        if skip is None or skip.is_nan_loss and taken or len(self._found) > _MOST_SKIPS or line.startswith("# "):
            return
        is_scalers = "educing dynamic" in line
        last = self._last.get(is_scalers)
        step = self._said or (self.step if taken or skip.step is None else skip.step)
        is_same = last and (last.before, last.scale) == (skip.before, skip.scale) and self._said in (None, last.step)
        if is_same and skip.before and skip.scale < skip.before:
            return  # the same one, of another rank: a scale falls but once from where it is
        skip = replace(skip, step=step, is_after=taken is None and self.step is None and not self._said)
        places = [grammar.last for grammar in self._grammars]
        # of one overflow, each rank has its line: the bar may have gone on between them
        has_scale = skip.scale is not None
        alike = replace(skip, step=None) if has_scale and process and not self._said else skip
        times = self._seen[(is_scalers, alike, *places)]
        times[process] += 1
        is_new = times[process] > max((count for other, count in times.items() if other != process), default=0)
        if last and has_scale and last.scale is not None and skip.scale > last.scale:
            self._grows |= all(skip.scale != known.scale for known, *_ in self._found)
        is_again = times[process] > 1 and (has_scale or skip.is_end)  # without growth, a scale falls each time
        if is_new and (not is_again or self._grows and last is not None and skip.scale != last.scale):
            self._found.append((skip, places, is_scalers))
            self._last[is_scalers] = skip

    def found_in(self, best: Grammar) -> list[Skip]:
        """Return the skipped steps, each with the step of the log's own rows that it came after, or came with."""
        at = self._grammars.index(best)
        said = Counter((skip.before, skip.scale, is_scalers) for skip, _, is_scalers in self._found if skip.scale)
        skips = []
        for skip, places, is_scalers in self._found:
            own, others = (said[skip.before, skip.scale, is_its] for is_its in (is_scalers, not is_scalers))
            if others and own < others + is_scalers:
                continue  # the scaler's message next to another one, or the other next to more of the scaler's
            place = places[at]
            row = place[1] if place else -1 if best.has_places else None
            is_own = skip.step is not None and best.unit != "row"
            skips.append(replace(skip, step=skip.step if is_own else best.step_at(place), row=row))
        (rows,) = best.rows.values() if len(best.rows) == 1 else [[]]
        if len(skips) > 1 and [skip.row for skip in skips] == [*range(-1, len(rows) - 1)]:  # one before each row
            skips = [replace(skip, step=step, is_after=False) for skip, (step, _) in zip(skips, rows, strict=True)]
        return skips


@functools.lru_cache(maxsize=64)
def _skip_in(line: str) -> Skip | None:
    """Return what a line says of a skipped step, with the step of a progress bar on it; None where it says nothing."""
    is_end, skipped, is_nan = (form.search(line) for form in (_AT_MINIMUM, _SKIPPED, _NAN_LOSS))
    if not (is_end or skipped or is_nan):
        return None
    drawn, scale = DRAWN.search(line), _SCALE.search(line)
    return Skip(
        step=int(drawn[1]) if drawn else None,
        is_after=True,
        is_overflow=bool(is_end or skipped and (skipped[1] or skipped[2])),
        before=as_float(scale[1]) if scale and scale[1] else None,
        scale=as_float(scale[2] or scale[3]) if scale else None,
        is_lost=_LOST.search(line) is not None,
        is_end=is_end is not None,
        is_nan_loss=is_nan is not None and skipped is None,
    )


def _plain(line: str) -> str:
    """Return a line without the sequences that colour a terminal."""
    return _COLOUR_WITHOUT_ESCAPE.sub("", _COLOUR.sub("", line))


def _stripped(line: str) -> tuple[str, str]:
    """Return a line without Ray's mark of repetition, and the process that printed it."""
    if "[repeated " in line:
        line = _REPEATED.sub("", line)
    process = _PROCESS.search(line[:80])
    return line, next(filter(None, process.groups()), "") if process else ""


def _notes(source: Source, grammars: list[Grammar], best: Grammar, num_bad: int) -> list[str]:
    notes = list(source.notes)
    if best.unit == "row":
        notes.append(f"The lines of {source.name} do not give their step: row 1 is the first that was read.")
    for other in grammars:
        if other is not best and other.num_norms:
            notes.append(
                f"{source.name} also has {plural(other.num_norms, 'row')} with a gradient norm in another form "
                f"({other.title}), which were not read: {best.title} has more."
            )
    if isinstance(best, Json) and num_bad == 1 and not source.ends_whole:
        notes.append(f"The last line of {source.name} is cut off and was left out.")
    elif isinstance(best, Json) and num_bad:
        notes.append(f"{plural(num_bad, 'line')} of {source.name} cannot be read, left out.")
    return notes


def _drop_cut_value(grammar: Grammar, last: str) -> list[str]:
    """Drop the last value of a file that ends within a line, which may lack digits: 90 of 903."""
    *before, (step, values) = grammar.rows[_stripped(last)[1]]
    name = next((name for name in reversed([*pairs(last)]) if name in values), next(reversed(values), None))
    if name is None or last.rstrip().endswith((")", "]")) or not math.isfinite(values[name]):
        return []
    if not may_lack_digits(last, [repr(row[name]) for _, row in before[-20:] if name in row]):
        return []
    del values[name]
    return [f"The last line is cut off: {name} of step {step} may lack digits and was left out."]


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
        made.notes.append("--pattern has no group `step`: row 1 is the first line that it finds.")
    return made


# ---- out of the JSON that Docker, journald and the log stores of clouds put around each line

TEXTS = ("log", "MESSAGE", "message", "@message", "textPayload", "line", "msg", "body")
"""The fields that hold a line."""
_TIMES = ("timestamp", "@timestamp", "time", "ts", "__REALTIME_TIMESTAMP", "__CURSOR")
_WRAPS = re.compile(rf'"(?:{"|".join(TEXTS)})"\s*:\s*["\[]')
_TAG = re.compile(r"^\s*<\w+>|</\w+>\s*$")
_CALL = re.compile(r"\b(?:[A-Za-z_]\w*\.)?[A-Za-z_]\w*\(([-+.\deE]+|nan|inf)[^()]*\)")  # np.float64(0.3), tensor(0.3)
_BARE = re.compile(r"(?<![\w.'\"])-?(?:nan|inf)(?![\w'\"])")


_NUMBER = re.compile(r"(\d+)[:-](?=\D)")
_SAYS_STEP = re.compile(r"step|iter|epoch", re.IGNORECASE)
_QUOTED = re.compile(r"^(?:>\s?)+|^\s{4,}(?=\d)")
_FIRST = 50
"""Lines by which a numbered file is known."""


def _unnumbered(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines without the numbers that ``grep -n`` puts before them, which are no steps and no ranks."""
    lines = iter(lines)
    first = list(islice(lines, _FIRST))
    found = [*map(_NUMBER.match, first)]
    numbers = [int(each[1]) for each in found if each is not None]
    is_numbered = len(numbers) == len(first) > 2 and all(before < after for before, after in pairwise(numbers))
    if is_numbered and any(_SAYS_STEP.search(line) for line in first):
        yield from (_NUMBER.sub("", line, count=1) for line in chain(first, lines))
    else:
        yield from chain(first, lines)


def unwrapped(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines without what is around each: a JSON object, a quotation's sign, or its number in a file."""
    for line in _unnumbered(lines):
        if line[:1] in " >":
            line = _QUOTED.sub("", line)
        if "&quot;" in line:
            line = _TAG.sub("", html.unescape(line))
        if line[:1] == "{" and _WRAPS.search(line):
            try:
                entry = parse_json(line)
                inner = [] if step_of(flat := leaves(entry)) is not None and wanted(flat) else texts_of(entry)
            except ValueError:
                inner = []
            if inner:
                yield from inner
                continue
        yield line


def texts_of(document: Any) -> list[str]:
    """Return the lines in an export of a log store, oldest first where times are known; empty for another file."""
    found = list(_walk(document, None))
    if all(isinstance(time, str) and time.isdigit() for time, _ in found):
        found = [(int(time), text) for time, text in found]
    times = [time for time, _ in found]
    if all(isinstance(time, str) for time in times) or all(isinstance(time, int | float) for time in times):
        found.sort(key=lambda entry: entry[0])
    return [part for _, text in found for part in text.rstrip("\n").split("\n")]


def _walk(entry: Any, time: Any) -> Iterator[tuple[Any, str]]:
    """Yield each line and its time."""
    if isinstance(entry, list):
        if len(entry) == 2 and isinstance(entry[1], str) and str(entry[0]).isdigit():  # Loki's pairs
            yield entry[0], entry[1]
            return
        for part in entry:
            yield from _walk(part, time)
    elif isinstance(entry, dict):
        time = next((entry[name] for name in _TIMES if name in entry), time)
        text = next((entry[name] for name in TEXTS if isinstance(entry.get(name), str | list)), None)
        if isinstance(text, list) and text and all(isinstance(byte, int) and 0 <= byte < 256 for byte in text):
            text = bytes(text).decode("utf-8", errors="replace")  # journald's, of what is no plain text
        if isinstance(text, str):
            yield time, text
            return
        for part in entry.values():
            if isinstance(part, dict | list):
                yield from _walk(part, time)


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
