# SPDX-License-Identifier: Apache-2.0
"""Reads forwards at moved weights: in log-odds, which move linearly where log-probs do not.

    d log p = (1 - p) d logit(p),        logit(p) = log p - log(1 - p)

logit(p) is the token's logit less the logsumexp of all others. Along a move of the weights it is nearly linear; log p
is not where p is near 1, since one leg of a difference multiplies 1 - p by e^d and the other by e^-d. So to first order
token t changes the loss by

    c_t (1 - p_t) logit(p_t at the moved weights) + e_t H_t(at the moved weights)

with c_t = d loss / d log p_t, e_t = d loss / d H_t and p_t at the weights of training. A critic's values are linear as
they are.

Shapes: B rows of a micro-batch, T response positions.
"""

import math

import torch

from ..core.step import Recorded

Outputs = tuple[torch.Tensor, torch.Tensor | None]
"""log_prob and entropy (B, T) of one forward."""

_LEAST_REST = 2.0**-24  # the smallest 1 - p that float32 tells from 0
_ROUNDING = 2.0**-20  # of a log-prob read in float32: a few units of logits near 10
_PRIOR = 3.0  # a token's own scatter is one draw; the scatter of all tokens counts as this many
_STRAY = 4.0  # standard deviations: a token further off scatters by itself
_MEDIAN = 1.4826  # a normal variable's standard deviation over its median absolute value


def log_odds(log_prob: torch.Tensor) -> torch.Tensor:
    """log p - log(1 - p) in float64; a p that rounds to 1 counts as the nearest that float32 can tell from it."""
    log_prob = log_prob.double()
    return log_prob - torch.log((-torch.expm1(log_prob)).clamp(min=_LEAST_REST))


class Readout:
    """What one micro-batch's tokens add to the loss, to first order, as read from a forward.

    Args:
        recorded: training's own forward.
        log_prob: d step loss / d log_prob (B, T); tokens with 0 read 0, whatever garbage their position holds.
        entropy: d step loss / d entropy (B, T); None when the loss has no entropy term.
        is_half: whether the model computes in half precision.
    """

    def __init__(self, recorded: Recorded, log_prob: torch.Tensor, entropy: torch.Tensor | None, is_half: bool):
        self._recorded, self._is_half = recorded, is_half
        self._log_prob, self._entropy = log_prob.double(), None if entropy is None else entropy.double()
        rest = 1.0 if recorded.is_value else (-torch.expm1(recorded.log_prob.double())).clamp(min=0.0)
        self.slope = torch.where(self._log_prob != 0, self._log_prob * rest, 0.0)
        """d step loss / d log-odds, float64 (B, T)."""

    @property
    def weight(self) -> torch.Tensor:
        """|d loss / d log_prob| + |d loss / d entropy|, float64 (B, T)."""
        return self._log_prob.abs() if self._entropy is None else self._log_prob.abs() + self._entropy.abs()

    def scores(self, log_prob: torch.Tensor) -> torch.Tensor:
        """Log-odds, or a critic's values: float64 (B, T)."""
        return log_prob.double() if self._recorded.is_value else log_odds(log_prob)

    def read(self, outputs: Outputs) -> torch.Tensor:
        """The loss that each token adds, up to a constant: float64 (B, T)."""
        log_prob, entropy = outputs
        read = _weighed(self.slope, self.scores(log_prob))
        if self._entropy is not None and entropy is not None:
            read += _weighed(self._entropy, entropy.double())
        return read

    def response(self, plus: Outputs, minus: Outputs | None) -> torch.Tensor:
        """How far each token's score moves, half the difference of two legs; of one leg, from training's: (B, T)."""
        if minus is None:
            return (self.scores(plus[0]) - self.scores(self._recorded.log_prob)).abs()
        return (self.scores(plus[0]) - self.scores(minus[0])).abs() / 2

    def error(self, plus: Outputs, minus: Outputs | None, part: float = 1.0) -> torch.Tensor:
        """Standard error of half the difference of two legs' :meth:`read`, float64 (B, T).

        Two parts. Float32 rounds a log-prob. In half precision a forward at other weights reads other scores even
        where nothing should move; see :func:`_scatter`.

        Args:
            plus: a leg.
            minus: the other; None where one is enough, and then nothing is known of what scatters.
            part: see :meth:`scatter`.
        """
        square = (self._log_prob * _ROUNDING).square() / 2
        if self._is_half and minus is not None:
            ups = self.scores(plus[0]), self.scores(minus[0]), self.scores(self._recorded.log_prob)
            square = square + _weighed(self.slope.square(), _scatter(*ups, self.slope != 0, part))
            up, down, before = plus[1], minus[1], self._recorded.entropy
            if self._entropy is not None and up is not None and down is not None and before is not None:
                scatter = _scatter(up.double(), down.double(), before.double(), self._entropy != 0, part)
                square = square + _weighed(self._entropy.square(), scatter)
        return torch.where(self._log_prob != 0, square, 0.0).sqrt()

    def scatter(self, plus: Outputs, minus: Outputs, still: Outputs) -> float:
        """What part of its bound the noise is, at most 1: by a forward at the legs' own dither and no move.

        Half the sum of the legs less that forward is noise alone for tokens that move little, and most do: its
        variance is three times that of half the difference.
        """
        up, down, before = (self.scores(part[0]) for part in (plus, minus, still))
        bound = _scatter(up, down, self.scores(self._recorded.log_prob), self.slope != 0, 1.0)[self.slope != 0]
        found = ((up + down) / 2 - before)[self.slope != 0].square() / 3
        if not len(bound) or not float(bound.median()) > 0:
            return 0.0  # no token of its own: the other ranks tell
        return min(1.0, _MEDIAN * math.sqrt(float(found.median() / bound.median())))


def _scatter(
    up: torch.Tensor, down: torch.Tensor, before: torch.Tensor, matters: torch.Tensor, part: float
) -> torch.Tensor:
    """Variance that noise alone gives half the difference of two legs: (B, T).

    Two numbers bound it from above, and the smaller one is the level of all tokens. The first is half the sum of the
    legs less training's score: a first-order move cancels in it, so noise is left, with training's own rounding. The
    second is how far most tokens move, which is noise and their true move.

    A token's own half sum says how far it is above that level. It is a single draw, so it is averaged with the level.
    A token far off all others keeps its own half sum, and in full: its slope was read at a score as far off.
    """
    own = ((up + down) / 2 - before).square()
    seen = matters & own.isfinite()
    if not seen.any():
        return torch.zeros_like(own)
    usual = own[seen].median() * _MEDIAN**2
    moved = ((up - down) / 2)[seen].abs().nan_to_num(posinf=0.0).median() * _MEDIAN
    level = part**2 * torch.minimum(usual / 2, moved.square())
    own = torch.where(own.isfinite(), own, usual)
    usual = usual.clamp(min=1e-300)
    return torch.where(own > _STRAY**2 * usual, own, level * (own + _PRIOR * usual) / ((1 + _PRIOR) * usual))


def _weighed(factor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The product, 0 where the factor is: padding holds garbage that must not turn 0 * inf into NaN."""
    return torch.where(factor != 0, factor * value, 0.0)
