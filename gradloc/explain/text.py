# SPDX-License-Identifier: Apache-2.0
"""Make tokens and positions readable and safe to show.

A model may emit anything: control characters, marks that reverse the reading order, spaces of no width. Those are shown
by name, everything else unchanged.
"""

import math
import re
import unicodedata
from collections.abc import Sequence

_NAMED = {"\n": "↵\n", "\t": "⇥\t", "\r": "␍"}
_ODD, _ODD_IN_LINES = re.compile(r"[^ -~]+"), re.compile(r"[^ -~\n\t]+")
_JOINERS = "\u200c\u200d"  # part of emoji and of several scripts: named only when they stand alone


def visible(text: str) -> str:
    """Spell out every character that would not show or would reorder others.

    >>> visible("a\\u202eb")
    'a⟨U+202E⟩b'
    """
    is_alone = len(text) == 1
    return _ODD.sub(lambda part: "".join(_visible(char, is_alone) for char in part[0]), text)


def _visible(char: str, is_alone: bool) -> str:
    if char in _NAMED:
        return _NAMED[char]
    category = unicodedata.category(char)
    if category == "Cs":  # half of a surrogate pair cannot be written as UTF-8
        return "\ufffd"
    if char in _JOINERS and not is_alone:
        return char
    if category in ("Cc", "Cf", "Zl", "Zp") or char == "\u00a0":
        return f"⟨U+{ord(char):04X}⟩"
    return char


def printable(text: str) -> str:
    """Make text :func:`visible` but for lines and tabs, before it goes to a terminal or a page.

    >>> printable("a\\tb\\n\\x1b[2J")
    'a\\tb\\n⟨U+001B⟩[2J'
    """
    return _ODD_IN_LINES.sub(lambda part: visible(part[0]), text)


def one_line(text: str, limit: int = 0, keep: str = "start") -> str:
    """Make text visible on one line, cut to ``limit`` characters (0: not) at its end or its start."""
    made = visible(text).replace("\n", "").replace("\t", "")
    if not limit or len(made) <= limit:
        return made
    return made[: limit - 1] + "…" if keep == "start" else "…" + made[1 - limit :]


def spoken(label: str) -> str:
    """Write a name of the record in words.

    >>> spoken("kl_term"), spoken("not_explained")
    ('KL term', 'not explained')
    """
    words = ["KL" if word == "kl" else "IS" if word == "is" else word for word in label.split("_")]
    return " ".join(words)


def times(value: float | None, typical: float | None) -> float | None:
    """Return value / typical; None where either is missing, 0 or not finite."""
    if value is None or typical is None or not typical or not math.isfinite(value):
        return None
    return value / typical


def span(positions: Sequence[int]) -> str:
    """Write positions as text: ``9``, ``9 to 14`` for one run, else ``9 to 40 (7 of them)``."""
    if not positions:
        return "–"
    first, last = positions[0], positions[-1]
    if first == last:
        return str(first)
    is_run = last - first + 1 == len(positions)
    return f"{first} to {last}" + ("" if is_run else f" ({len(positions)} of them)")


def capitalized(text: str) -> str:
    """Begin a text with a capital letter, and leave the rest unchanged."""
    return text[:1].upper() + text[1:]


def uncapitalized(text: str) -> str:
    """Begin a text with a small letter, and leave the rest unchanged."""
    return text[:1].lower() + text[1:]


def numbered(noun: str, first: int, last: int) -> str:
    """Name one thing or several in a row by their numbers: ``step 3``, ``steps 3 to 5``."""
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"


def plural(count: int, noun: str) -> str:
    """Count a noun: ``1 token``, ``2 tokens``, ``1,000 tokens``."""
    return f"{count:,} {noun if count == 1 else plural_of(noun)}"


def plural_of(noun: str) -> str:
    return noun + ("es" if noun.endswith(("h", "s")) and noun != "epoch" else "s")


_NUMBERED = re.compile(r"(?<!optimizer )\b[Ss]teps?(?= \d)(?! \d+ of epoch)|(?<=the last )step(?=, \d)")
_DISTANCE = re.compile(r"\b((?:within|every|in the) [\d.,]+ )(steps?)\b")
_LOGGED = re.compile(r"(?<=\d )(common )?step(?=s?\b)")
"""Steps in a sentence: by their numbers, as a distance between two, and a number of logged ones."""


def in_unit(sentence: str, unit: str) -> str:
    """Name in a sentence about a log what its steps count, such as rows: a step by its number, and a number of steps.

    >>> in_unit("Step 3: norm 9, finite from step 5 on, of 60 steps. Such a step was skipped.", "row")
    'Row 3: norm 9, finite from row 5 on, of 60 rows. Such a step was skipped.'
    >>> in_unit("2 of 60 steps, steps 320 to 640, rose within 96 steps.", "sample")
    '2 of 60 rows, samples 320 to 640, rose within 96 samples.'
    """
    if unit == "step":
        return sentence
    named = {"step": unit, "steps": plural_of(unit)}
    named |= {word.capitalize(): name.capitalize() for word, name in named.items()}
    sentence = _DISTANCE.sub(lambda found: found[1] + named[found[2]], sentence)
    return _NUMBERED.sub(lambda found: named[found[0]], _LOGGED.sub(r"\1row", sentence))


def first_of(names: Sequence[str]) -> str:
    """Join the first three names.

    >>> first_of(["a", "b"]), first_of("abcd")
    ('a, b', 'a, b, c, ...')
    """
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def listed(words: Sequence[str]) -> str:
    """Join words as a list in a sentence.

    >>> listed("a"), listed("ab"), listed("abc")
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
