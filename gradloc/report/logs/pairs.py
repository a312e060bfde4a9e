# SPDX-License-Identifier: Apache-2.0
"""The pairs of a name and a number in a line, whatever is between them and whichever comes first."""

import math
import re
from collections import defaultdict
from collections.abc import Container, Iterable
from itertools import islice
from sys import intern

from .names import is_norm

NUMBER = (  # (?!\d): a part of a number is not tried, which would take the square of its digits
    r"[-+]?(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?|\d+(?!\d)(?:\.\d*(?!\d))?(?:[eE][-+]?\d+(?!\d))?"
    r"|nan(?:\.0)?|inf(?:inity)?)"
)
_OPENED = r"(?!\[\s?\[)(?:(?!nan\b|inf\b)[a-z_][\w.]*\(|[\['\"])*"
"""Opening text before a number: ``tensor(``, ``[``, a quotation mark; not that of a list of lists."""
_IS = "(?:[:=]>?|->|→)"
"""Signs between a name and its number."""
PAIRS = re.compile(
    rf"['\"]([^'\"]{{1,120}})['\"]\s*{_IS}\s*{_OPENED}({NUMBER})(?![\w.])"
    # a name of at most eight words: a line may hold a whole answer
    rf"|(?<![\w./@-])([A-Za-z][\w./@()-]{{0,80}}(?: (?:[A-Za-z@]|\((?=[A-Za-z]|\d+ [a-z]))[\w./@()-]{{0,40}}){{0,7}})"
    rf"\s*{_IS}\s*{_OPENED}({NUMBER})(?![\w.]*\d)"
    # no sign between: the name is known, or the line's parts are set apart; a step may come first: loss 73 0.25
    r"|(?<![a-z_/.\d])((?:[a-z]{2,12} )?[a-z_/]{0,40}"
    r"(?:norm|loss(?:_[a-z]{1,20})?|\bmse|reward|entropy|grad_l2|cost|\bnll|\bgn|\bgrad)(?:/[a-z]+)?)"
    rf"\]?\s+(?:(?:so far\s+)?(?:is|of)\s+|\|\s+|\(|\d+\s+(?=[-\d]|nan\b))?({NUMBER})(?![\w.]*\d)"
    rf"|(?:[|,;]| /)\s*([a-z][\w/.-]{{0,40}})\s+({NUMBER})(?=\s*(?:[|,;(]|/ |$|ms\b|s\b|%))",
    re.IGNORECASE,
)
_WORDS = re.compile(rf"(?:(?<!\s)\s*\b([a-z][\w/.-]{{0,40}})\s+({NUMBER}))(?=\s+[a-z]|\s*$)", re.IGNORECASE)
"""A name and a number, on a line that holds nothing else."""
_UNITS = r"(?:(?:%|m?s\b|[KMG]i?B\b)\s?)?"
_BEHIND = re.compile(
    rf"[\s|,;/\]\[)}}>:-]*((?<![\w.]){NUMBER}\s?{_UNITS}[a-z][\w/.]*(?: [a-z][\w/.]*)?"
    rf"(?:[\s|,;/\]\[-]+{NUMBER}\s?{_UNITS}[a-z][\w/.]*(?: [a-z][\w/.]*)?)+)[\s|,;/\]\[-]*$",
    re.IGNORECASE,
)
"""Numbers with the name behind each, to the end of a line."""
_ENDS_IN_UNIT = re.compile(r"\d\s?(?:m?s|secs?|seconds?|min|h|x|[KMG]i?B|\w+/s\w*|s/\w+)$", re.IGNORECASE)
_ITS_PAIRS = re.compile(rf"({NUMBER})\s?{_UNITS}([a-z][\w/.]*(?: [a-z][\w/.]*)?)", re.IGNORECASE)
SYMBOL = re.compile(r"(?:\|{1,2}|‖)\s*(?:g|grad|∇\w?)\s*(?:\|{1,2}|‖)", re.IGNORECASE)
"""A gradient norm as formulas have it."""
_STATISTICS = {"mean", "avg", "average", "median", "min", "max", "std"}
_SUBJECT = re.compile(r"\s*([A-Za-z][\w ]{0,40}):\s+(?=[a-z]+[=:])")
"""What the statistics on a line are of: ``Reward: mean=0.5, std=0.1``."""
_PLACE = re.compile(r"[\w/-]+(?:\.\w+)+:\d{1,5}")
"""Where a line was printed: ``data.py:31``, ``yolox.core.trainer:253``."""
_BEFORE = re.compile(
    r"^(?:with (?=loss|grad|norm)|[KMGkmg]i?[Bb] |m?s |[a-z]+/s(?:ec|tep)? |s/[a-z]+ |(?:[A-Z]?\d+/\d+ )+)(?=\S)"
)
"""At the beginning of a name, a unit of the value before, counts as ``E2/10 B50/500``, or a word that joins it."""
_INNER = re.compile(r"([\w./-]{1,80})['\"]?\s*[:=]\s*\{([^{}]{1,2000})\}")
"""A name and what is in braces after it."""
OF_TRAINING = re.compile(
    r"(?<!min_)loss(?!_scale_window)|\bl_[a-z]|\bnll\b|rew(?:ard|\b)|kl\b|entropy|return|\bxent|\bcost\b|perplexity|\bppl\b"
    r"|smooth_?l1|\btrl\b",
    re.IGNORECASE,
)
"""Names of what training is about."""
_LONGEST = 1000
"""Characters of a text in which numbers with the name behind each are looked for."""
_MOST_LINES, _REPEATED = 100_000, 8
"""Lines, and values of a name, by which the metrics of an unknown loop are known."""
NO_METRIC = re.compile(
    r"sec|time|mem|tok|\blr\b|learning|eta\b|speed|size|duration|\bm?s\b|[km]b\b|/s(?:ec|tep|ample)?(?![a-z])",
    re.IGNORECASE,
)
"""Names of what a run needs, and of settings."""


def behind(text: str) -> int | None:
    """Return where numbers with the name behind each begin; None where a name comes first, as usual.

    >>> behind("(47) 2.5 loss | 0.48 norm"), behind("loss 2.5 norm 0.48 time 12 ms")
    (5, None)
    """
    end = text[-25:].rstrip(" |]/\r")
    if len(text) > _LONGEST or not end[-1:].isalpha() or "=" in end or _ENDS_IN_UNIT.search(end):
        return None
    text = re.sub(r"\d+:\d\d(?::\d\d)?", lambda time: "0" * len(time[0]), text)
    found = _BEHIND.search(text)
    if found is None or re.search(r"[a-z_]\W{0,3}$", before := text[: found.start(1)], re.IGNORECASE):
        return None
    is_usual = any(OF_TRAINING.search(each[0]) or is_norm(each[0]) for each in PAIRS.finditer(before))
    return None if is_usual else found.start(1)


def pairs(text: str, start: int = 0, end: int | None = None) -> dict[str, float]:
    """Extracts names and numbers from a part of a line, whatever is between a name and its number.

    Entries of a norm in braces, of one group of parameters each, add up to the norm of all.

    >>> pairs("train loss 2.5 | norm 0.4812 | lr 3.00e-04 | (12 ms | 4242 tok/s)")
    {'train loss': 2.5, 'norm': 0.4812, 'lr': 0.0003}
    >>> pairs("{'loss': '0.1', 'kl': nan} gnorm=3.1 spiky (norm=2.2)")
    {'loss': 0.1, 'kl': nan, 'gnorm': 3.1, 'norm': 2.2}
    >>> pairs(" reward 0.5 kl 0.002 len 512")
    {'reward': 0.5, 'kl': 0.002, 'len': 512.0}
    >>> pairs("epoch: 3,  loss is: 2.5, acc is: 0.5")
    {'epoch': 3.0, 'loss': 2.5, 'acc': 0.5}
    >>> pairs("Reward: mean=0.5, std=0.1")
    {'Reward mean': 0.5, 'Reward std': 0.1}
    >>> pairs("grad_norm={'0_a': 3.0, '1_b': 4.0} tgs=7")
    {'tgs': 7.0, 'grad_norm': 5.0}
    >>> pairs("loss=tensor(0.25) mse: nan(683, 1024, 3)")
    {'loss': 0.25, 'mse': nan}
    >>> pairs(" | 2.5 loss | 0.48 grad norm |"), pairs("norm -> 0.48")
    ({'loss': 2.5, 'grad norm': 0.48}, {'norm': 0.48})
    """
    text = text[start:end]
    if (at := behind(text)) is not None:
        return {intern(name): as_float(value) for value, name in _ITS_PAIRS.findall(text, at)}
    subject = _SUBJECT.match(text)
    made: dict[str, float] = {}
    norms = {}
    for inner in _INNER.finditer(text) if "{" in text and "orm" in text else ():
        if is_norm(inner[1]) and (parts := pairs(inner[2])):
            norms[inner[1]] = math.sqrt(sum(part * part for part in parts.values()))
            text = text.replace(inner[0], " ")
    words = [] if ":" in text or "=" in text else list(_WORDS.finditer(text))
    is_plain = len(words) > 1 and sum(len(found[0]) for found in words) == len(text.rstrip())
    for found in words if is_plain else PAIRS.finditer(text):
        name, value = (found[found.lastindex - 1], found[found.lastindex])
        if name.count("(") > name.count(")"):  # behind a bracket that it does not close
            name = name.rpartition("(")[2]
        elif name.count("(") < name.count(")"):  # behind the value before it, as 0.5 (nan)
            name = name.partition(")")[2]
        is_place = _PLACE.fullmatch(f"{name}:{value}")
        name = _BEFORE.sub("", name.strip(" |,-(").removesuffix(" is"))
        if name and not is_place:
            made[intern(subject[1] + " " + name if subject and name in _STATISTICS else name)] = as_float(value)
    return made | norms


def as_float(text: str) -> float:
    """Return a number with commas in its thousands, or Lightning's ``nan.0``."""
    return math.nan if text[:3].lower() == "nan" else float(text.replace(",", ""))


def wanted(values: Iterable[str], also: Container[str] = ()) -> list[str]:
    """Return the names of norms and of what training is about, and those in ``also``."""
    return [name for name in values if is_norm(name) or OF_TRAINING.search(name) or name in also]


def repeated_names(lines: Iterable[str]) -> frozenset[str]:
    """Return the names that many lines give another value with decimals, whatever they mean."""
    seen: dict[str, set[float]] = defaultdict(set)
    for line in islice(lines, _MOST_LINES):
        if len(line) < _LONGEST and line.count(".") and (":" in line or "=" in line):
            for name, value in pairs(line).items():
                if not value.is_integer() and len(seen) < _MOST_LINES:
                    seen[name].add(value)
    return frozenset(name for name, values in seen.items() if len(values) >= _REPEATED and not NO_METRIC.search(name))
