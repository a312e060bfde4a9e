# SPDX-License-Identifier: Apache-2.0
"""A log's lines out of the JSON that Docker, journald and the log stores of clouds put around each of them."""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from .names import is_norm

_TEXTS = ("log", "MESSAGE", "message", "@message", "textPayload", "line", "msg", "body")
"""The fields that hold a line."""
_TIMES = ("timestamp", "@timestamp", "time", "ts", "__REALTIME_TIMESTAMP", "__CURSOR")
_WRAPS = re.compile(rf'"(?:{"|".join(_TEXTS)})"\s*:\s*["\[]')
_CALL = re.compile(r"\b(?:[A-Za-z_]\w*\.)?[A-Za-z_]\w*\(([-+.\deE]+|nan|inf)[^()]*\)")  # np.float64(0.3), tensor(0.3)
_BARE = re.compile(r"(?<![\w.'\"])-?(?:nan|inf)(?![\w'\"])")

Line = tuple[Any, str]
"""When, and what."""


def unwrapped(lines: Iterable[str]) -> Iterator[str]:
    """The lines, each that is a JSON object around another line replaced by that one."""
    for line in lines:
        if line[:1] == "{" and _WRAPS.search(line):
            try:
                entry = json.loads(line)
                inner = [] if any(map(is_norm, entry)) else texts_of(entry)
            except (ValueError, RecursionError):
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


def _walk(entry: Any, time: Any) -> Iterator[Line]:
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
    try:
        return ast.literal_eval(_BARE.sub(lambda found: repr(found[0]), _CALL.sub(r"\1", text.strip())))
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None
