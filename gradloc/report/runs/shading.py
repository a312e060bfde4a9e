# SPDX-License-Identifier: Apache-2.0
"""How strongly each token is shaded, for every measure that a reader can choose.

A shade is a level from -10 to 10 on a square-root scale (a share of 1% must still show beside one
of 99%); its sign picks the colour. Levels travel as one character per token, so that the page's
script needs no arithmetic. All sequences of an event share one scale, so that they compare.
"""

from dataclasses import dataclass

import numpy as np

from ...record import Sequence
from ...words.numbers import number, percent

LEVELS = 10
ZERO = ord("k")  # the letter of level 0: levels run from a to u
NOT_FINITE = "z"
NOT_KNOWN = "-"


@dataclass(frozen=True)
class Shading:
    name: str
    label: str
    meaning: str
    least_scale: float
    """The full shade stands for at least this much: noise is not blown up to full colour."""
    is_diverging: bool = True


MEASURES = (
    Shading("share", "share of the spike", "orange adds to the spike, blue pulls the other way", 1e-6),
    Shading(
        "coefficient",
        "loss coefficient",
        "d loss / d log-prob; orange lowers the token's probability (a critic's value), blue raises it",
        1e-12,
    ),
    Shading("ratio", "ratio to the old policy", "log of new / old; orange above 1, blue below", 0.2),
    Shading("advantage", "advantage", "orange positive, blue negative", 1.0),
    Shading("entropy", "entropy", "of the distribution the token was drawn from, in nats", 1.0, False),
    Shading("gap", "log-prob gap", "trainer minus rollout engine; orange above, blue below", 0.1),
)


@dataclass
class Shades:
    """One measure over an event's sequences."""

    measure: Shading
    levels: list[str]
    """Per sequence one character per token."""
    scale: float
    """What the full shade stands for."""

    @property
    def ends(self) -> tuple[str, str]:
        """What the two ends of the scale stand for, as text."""
        if self.measure.name == "ratio":
            return number(float(np.exp(-self.scale)), 3), number(float(np.exp(self.scale)), 3)
        show = percent if self.measure.name == "share" else number
        return (show(-self.scale) if self.measure.is_diverging else "0"), show(self.scale)


def values(sequence: Sequence, name: str) -> np.ndarray | None:
    """One measure's numbers over the tokens (T,), NaN where one is null; None when not recorded."""
    if name == "ratio":
        return _difference(sequence.log_prob, sequence.old_log_prob)
    if name == "gap":
        return _difference(sequence.log_prob, sequence.rollout_log_prob)
    numbers = getattr(sequence, name)
    return None if numbers is None else np.array(numbers, dtype=float)


def _difference(ours: list | None, theirs: list | None) -> np.ndarray | None:
    if ours is None or theirs is None:
        return None
    num = min(len(ours), len(theirs))
    with np.errstate(invalid="ignore"):
        return np.array(ours[:num], dtype=float) - np.array(theirs[:num], dtype=float)


def shade(sequences: list[Sequence]) -> list[Shades]:
    """Every measure that is recorded for at least one of the sequences, the default one first.

    The default is the share; where the strategy did not measure it, the loss coefficient.
    """
    shades = []
    for measure in MEASURES:
        columns = [values(sequence, measure.name) for sequence in sequences]
        known = [np.abs(c[np.isfinite(c)]) for c in columns if c is not None]
        if known:
            scale = max([measure.least_scale, *(float(c.max()) for c in known if len(c))])
            levels = [_levels(c, scale, len(s)) for c, s in zip(columns, sequences, strict=True)]
            shades.append(Shades(measure, levels, scale))
    return shades


def _levels(column: np.ndarray | None, scale: float, length: int) -> str:
    if column is None:
        return NOT_KNOWN * length
    is_finite = np.isfinite(column)
    safe = np.where(is_finite, column, 0.0)
    level = np.rint(np.sign(safe) * LEVELS * np.sqrt(np.minimum(np.abs(safe) / scale, 1.0)))
    codes = np.where(is_finite, ZERO + level, ord(NOT_FINITE)).astype(np.uint8)
    return codes.tobytes().decode("ascii")[:length].ljust(length, NOT_KNOWN)
