# SPDX-License-Identifier: Apache-2.0
"""Takes lines out of what is around them, such as a log store's JSON, and puts wrapped ones together."""

import html
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice, pairwise
from typing import Any

from ...record.files import parse_json
from .names import leaves, step_of
from .pairs import wanted

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\[\d{1,3}(?:;\d{1,3})*m")
"""A sequence that colours a terminal, whole or without its escape character."""
TEXTS = ("log", "MESSAGE", "message", "@message", "textPayload", "line", "msg", "body")
"""The fields that hold a line in the JSON that Docker, journald and the log stores of clouds put around it."""
_TIMES = ("timestamp", "@timestamp", "time", "ts", "__REALTIME_TIMESTAMP", "__CURSOR")
_WRAPS = re.compile(rf'"(?:{"|".join(TEXTS)})"\s*:\s*["\[]')
_TAG = re.compile(r"^\s*<\w+>|</\w+>\s*$")
_NUMBER = re.compile(r"(\d+)[:-](?=\D)")
_SAYS_STEP = re.compile(r"step|iter|epoch", re.IGNORECASE)
_QUOTED = re.compile(r"^(?:>\s?)+|^\s{4,}(?=\d)")
_FIRST = 50
"""Lines by which a numbered file is known."""


def whole_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines that are not empty as they were printed: unwrapped, and each entry on one line."""
    return _joined(_redrawn(unwrapped(filter(None, lines))))


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
            bar += f" {plain(line).strip()}"
            continue
        if bar:
            yield bar
        bar = plain(line).rstrip() if "\x1b[2K" in line and "━" in line else ""
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


def plain(line: str) -> str:
    """Return a line without the sequences that colour a terminal."""
    return ANSI.sub("", line)
