# SPDX-License-Identifier: Apache-2.0
"""Choose the tokens of a sequence that a page carries, shows or folds, and shade them.

A response can have 32,000 tokens, but a reader wants the culprits and their context. So there are three sets, each
within the next: shown at first; carried (a click unfolds them); all. Tokens that are not carried are counted; a report
of one event (``--event``) has them.

A shade is a level from -10 to 10 on a square-root scale, so that a share of 1% is visible next to one of 99%; its sign
picks the colour. Levels are one character per token, so that the page's script needs no arithmetic. All sequences of
an event share one scale.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ...explain.numbers import number, percent, with_error
from ...explain.text import visible
from ...record import Culprit, turns_in
from ...record.bundle import Sequence
from ...record.columns import COLUMNS, SHOWN, Column

LEVELS = 10
ZERO = ord("k")  # the letter of level 0: levels run from a to u
NOT_FINITE = "z"
NOT_KNOWN = "-"


@dataclass
class Shades:
    """One measure over an event's sequences."""

    name: str
    column: Column
    levels: list[str]
    """Per sequence one character per token."""
    scale: float
    """Value of the full shade."""

    @property
    def ends(self) -> tuple[str, str]:
        """Return the values of the scale's two ends, as text."""
        if self.column.is_ratio:
            return number(float(np.exp(-self.scale)), 3), number(float(np.exp(self.scale)), 3)
        show = percent if self.column.is_summed else number
        is_diverging = self.column.shade is not None and self.column.shade.is_diverging
        return (show(-self.scale) if is_diverging else "0"), show(self.scale)


def values(sequence: Sequence, name: str) -> np.ndarray | None:
    """Return a column over the tokens (T,); None when it is not known."""
    found = sequence.column(name)
    return None if found is None else np.array(found, dtype=float)


def shade(sequences: list[Sequence]) -> list[Shades]:
    """Return the shades of every column that is known of a sequence, the default one first.

    The default is the share; where the strategy did not measure it, the loss coefficient.
    """
    shades = []
    for name, measure in COLUMNS.items():
        if measure.shade is None:
            continue
        columns = [values(sequence, name) for sequence in sequences]
        if measure.is_ratio:
            with np.errstate(divide="ignore"):
                columns = [None if column is None else np.log(column) for column in columns]
        sizes = [np.abs(column[np.isfinite(column)]) for column in columns if column is not None]
        if sizes:
            scale = max([measure.shade.least, *(float(each.max()) for each in sizes if len(each))])
            pairs = zip(columns, sequences, strict=True)
            levels = [_levels(column, scale, len(sequence)) for column, sequence in pairs]
            shades.append(Shades(name, measure, levels, scale))
    return shades


def _levels(column: np.ndarray | None, scale: float, length: int) -> str:
    """Return a letter for each of a sequence's tokens."""
    if column is None:
        return NOT_KNOWN * length
    is_finite = np.isfinite(column)
    safe = np.where(is_finite, column, 0.0)
    level = np.rint(np.sign(safe) * LEVELS * np.sqrt(np.minimum(np.abs(safe) / scale, 1.0)))
    codes = np.where(is_finite, ZERO + level, ord(NOT_FINITE)).astype(np.uint8)
    return codes.tobytes().decode("ascii")[:length].ljust(length, NOT_KNOWN)


CONTEXT = 60
"""Tokens shown on either side of a culprit."""
SHORT = 240
"""Sequences up to this length are shown whole."""
BYTES_PER_TOKEN = 85
"""Size of a carried token in the page, measured on GRPO runs with all arrays recorded."""
LABELS = {name: column.label for name, column in SHOWN.items()}
"""Labels of the columns on the page."""
Interval = tuple[int, int]
"""Positions [start, end)."""


@dataclass(frozen=True)
class Piece:
    """A stretch of tokens that is treated alike."""

    kind: str
    """``shown``, ``fold`` or ``absent`` (not carried)."""
    start: int
    end: int
    share: float | None = None
    """Sum of the shares in a fold, where known."""
    error: float | None = None
    """Its standard error."""

    @property
    def share_text(self) -> str:
        return with_error(self.share, self.error, 3, percent)


@dataclass
class TokenView:
    """One sequence as a page shows it."""

    sequence: Sequence
    culprits: list[int]
    """Positions that belong to culprits, ascending."""
    pieces: list[Piece] = field(default_factory=list)
    carried: list[Interval] = field(default_factory=list)
    """Intervals with text and numbers in the page."""
    turns: dict[int, int] = field(default_factory=dict)
    """Number of each turn by its first position; empty for a single turn."""
    ids: dict[int, int] = field(default_factory=dict)
    """Culprits' token ids by position."""
    left_out: frozenset[int] = frozenset()
    """Positions between turns: what a tool answered, left out of the loss."""

    def __len__(self) -> int:
        return len(self.sequence)

    def text(self, position: int) -> str:
        """Return one token as visible text; its number where the run kept no text."""
        tokens, ids = self.sequence.tokens or [], self.sequence.token_ids or []
        if position < len(tokens):
            return visible(tokens[position])
        found = ids[position] if position < len(ids) else self.ids.get(position)
        return f"<position {position}> " if found is None else f"<{found}> "

    @property
    def has_text(self) -> bool:
        return bool(self.sequence.tokens)


def view(sequence: Sequence, culprits: Iterable[Culprit], limit: int, shown: int) -> TokenView:
    """Lay out one sequence.

    Args:
        sequence: T tokens.
        culprits: those of this sequence.
        limit: how many tokens the page can carry of this sequence.
        shown: how many it can show at first.
    """
    num = len(sequence)
    culprits = list(culprits)
    mine = sorted({p for c in culprits for p in c.positions if p < num})
    turns = turns_in(sequence.columns.get("response_mask", ()))
    made = TokenView(sequence, mine)
    made.ids = {at: id for c in culprits for at, id in zip(c.positions, c.token_ids or (), strict=False)}
    if len(turns) > 1:
        made.turns = {turn.start: at for at, turn in enumerate(turns, 1)}
        made.left_out = frozenset(range(num)).difference(*turns)
    anchors = mine or ([0] if num else [])
    made.carried = around(anchors, num, limit, reach=limit)
    windows = [(0, num)] if num <= min(SHORT, shown) else around(anchors, num, shown, reach=CONTEXT)
    made.pieces = list(_pieces(made, windows))
    return made


Place = tuple[int | None, int | None, int | None]


def place(of: Culprit | Sequence) -> Place:
    """Return rank, micro-batch, and row in the micro-batch."""
    return of.rank, of.micro_batch, of.micro_batch_row


def by_sequence(culprits: Iterable[Culprit]) -> dict[Place, list[Culprit]]:
    """Return the culprits of each sequence, by its place."""
    found: dict[Place, list[Culprit]] = {}
    for culprit in culprits:
        found.setdefault(place(culprit), []).append(culprit)
    return found


def around(anchors: list[int], num: int, limit: int, reach: int) -> list[Interval]:
    """Return intervals of [0, num) within ``reach`` of the anchors, with at most ``limit`` tokens in all.

    Every anchor gets its own part of the limit, so that many culprits share the room fairly; where
    there is not room for all anchors, the first ones have it.

    >>> around([50], 100, 11, 60)
    [(45, 56)]
    """
    if num <= limit and reach >= num:
        return [(0, num)] if num else []
    reach = min(reach, num)
    while reach:
        intervals = _merge([(max(a - reach, 0), min(a + reach + 1, num)) for a in anchors])
        if sum(end - start for start, end in intervals) <= limit:
            return intervals
        reach = reach * 3 // 4 if reach > 8 else reach - 1
    return _merge([(a, a + 1) for a in anchors[:limit]])


def _merge(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in intervals:
        if merged and start <= merged[-1][1]:
            start, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((start, end))
    return merged


def _pieces(made: TokenView, windows: list[Interval]) -> Iterator[Piece]:
    """Yield the windows and the pieces between them."""
    at = 0
    for start, end in [*windows, (len(made), len(made))]:
        cuts = sorted({at, start, *(c for pair in made.carried for c in pair if at < c < start)})
        for first, last in pairwise(cuts):
            is_carried = any(a <= first and last <= b for a, b in made.carried)
            share = _sum(made.sequence.columns.get("share"), first, last)
            variance = _sum(made.sequence.columns.get("share_error"), first, last, power=2)
            error = None if variance is None else variance**0.5
            yield Piece("fold" if is_carried else "absent", first, last, share, error)
        if start < end:
            yield Piece("shown", start, end)
        at = end


def _sum(numbers: tuple[float | None, ...] | None, start: int, end: int, power: int = 1) -> float | None:
    if numbers is None:
        return None
    part = np.array(numbers[start:end], dtype=float)
    return float((part**power).sum()) if np.isfinite(part).all() else None


def payload(made: TokenView, index: int, shades: list[Shades]) -> dict[str, Any]:
    """Return the carried tokens of an event's sequence ``index`` for the page's script.

    A list whose values are all equal (GRPO's advantages, a ratio of 1) is sent as that one value.
    """
    columns = {name: values(made.sequence, name) for name in LABELS}
    parts = []
    for start, end in made.carried:
        numbers: dict[str, Any] = {}
        for name, column in columns.items():
            if column is not None:
                packed = [_json_number(value) for value in column[start:end].tolist()]
                numbers[name] = packed[0] if packed and (column[start:end] == column[start]).all() else packed
        levels = {s.name: s.levels[index][start:end] for s in shades}
        texts = [made.text(position) for position in range(start, end)]
        ids = (made.sequence.token_ids or [])[start:end]
        parts.append({"a": start, "t": texts, "i": ids, "v": numbers, "l": levels})
    return {"n": len(made), "c": made.culprits, "parts": parts}


def _json_number(value: float) -> float | str:
    if value != value or value in (float("inf"), float("-inf")):
        return "NaN" if value != value else "∞" if value > 0 else "-∞"
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e6 else rounded
