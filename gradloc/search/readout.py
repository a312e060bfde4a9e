# SPDX-License-Identifier: Apache-2.0
"""Reads forwards at moved weights in log-odds, which move linearly where log-probs do not (docs/method.md, section 3).

    logit(p) = log p - log(1 - p) = z_y - logsumexp(z without z_y),        d log p = (1 - p) d logit(p)

with z the logits and y the token. Along a move of the weights the log-odds are nearly linear. log p is not, near p = 1:
if the log-odds move by d, one leg of the difference multiplies 1 - p by e^d and the other by e^-d, which makes half
their difference sinh(d) / d times the derivative. So to first order token t changes the loss by

    c_t (1 - p_t) logit(p_t at the moved weights) + e_t H_t(at the moved weights)

with c_t = dL/dlog p_t, e_t = dL/dH_t, and p_t in front as it was in training. A critic's values are linear as they are.

Shapes: B rows of a micro-batch, T response positions.
"""

import math

import torch

from ..core.step import Outputs as Outputs
from ..core.step import Recorded

_LEAST_REST = 2.0**-24  # the smallest 1 - p that float32 tells from 0
_ROUNDING = 2.0**-20  # error of a log-prob read in float32: a few units of logits near 10
_PRIOR = 3.0  # draws that the level of all tokens counts as, beside the single draw of a token's own
_STRAY = 4.0  # standard deviations: a token further off is noisier than all others
_MEDIAN = 1.4826  # standard deviation of a normal variable over its median absolute value


def log_odds(log_prob: torch.Tensor) -> torch.Tensor:
    """log p - log(1 - p) in float64. A p that float32 rounds to 1 counts as 1 - 2^-24, so it stays finite."""
    log_prob = log_prob.double()
    return log_prob - torch.log((-torch.expm1(log_prob)).clamp(min=_LEAST_REST))


class Readout:
    """Reads, from a forward, what each token of one micro-batch adds to the loss, to first order.

    Args:
        recorded: training's own forward.
        log_prob: c_t (B, T); tokens with 0 read 0, whatever garbage their position holds.
        entropy: e_t (B, T); None if the loss has no entropy term.
        is_half: whether the model computes in half precision.
    """

    def __init__(self, recorded: Recorded, log_prob: torch.Tensor, entropy: torch.Tensor | None, is_half: bool):
        self._recorded, self._is_half = recorded, is_half
        self._log_prob, self._entropy = log_prob.double(), None if entropy is None else entropy.double()
        rest = 1.0 if recorded.is_value else (-torch.expm1(recorded.log_prob.double())).clamp(min=0.0)
        self.slope = torch.where(self._log_prob != 0, self._log_prob * rest, 0.0)
        """c_t (1 - p_t), the derivative of the loss by the log-odds: float64 (B, T)."""

    @property
    def weight(self) -> torch.Tensor:
        """|c_t| + |e_t|, how much the loss weighs each token: float64 (B, T)."""
        return self._log_prob.abs() if self._entropy is None else self._log_prob.abs() + self._entropy.abs()

    def scores(self, log_prob: torch.Tensor) -> torch.Tensor:
        """Log-odds, or a critic's values as they are: float64 (B, T)."""
        return log_prob.double() if self._recorded.is_value else log_odds(log_prob)

    def read(self, outputs: Outputs) -> torch.Tensor:
        """l_t, the loss that each token adds up to a constant: float64 (B, T)."""
        log_prob, entropy = outputs[:2]
        read = _weighed(self.slope, self.scores(log_prob))
        if self._entropy is not None and entropy is not None:
            read += _weighed(self._entropy, entropy.double())
        return read

    def response(self, plus: Outputs, minus: Outputs | None) -> torch.Tensor:
        """How far each token's score moves (B, T): half the difference of two legs, or one leg's from training's."""
        if minus is None:
            return (self.scores(plus[0]) - self.scores(self._recorded.log_prob)).abs()
        return (self.scores(plus[0]) - self.scores(minus[0])).abs() / 2

    def error(self, plus: Outputs, minus: Outputs | None, part: float = 1.0) -> torch.Tensor:
        """Standard error of half the difference of two legs' :meth:`read`, float64 (B, T).

        It has two parts. Float32 rounds each log-prob, and half a difference of two has half the variance of one. In
        half precision, a forward at other weights reads other scores even if nothing should move (:func:`_scatter`).

        Args:
            plus: one leg.
            minus: the other. None, with one leg only, leaves the scatter unknown: only rounding counts then.
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
        """Which part of its bound the noise is, in [0, 1], by a forward with the legs' dither and no move (``still``).

        For tokens that hardly move, and most do, (plus + minus) / 2 - still is noise alone. With a variance v of each
        forward it has v / 2 + v = 3 v / 2, three times the v / 2 of half the difference.
        """
        up, down, before = (self.scores(part[0]) for part in (plus, minus, still))
        bound = _scatter(up, down, self.scores(self._recorded.log_prob), self.slope != 0, 1.0)[self.slope != 0]
        found = ((up + down) / 2 - before)[self.slope != 0].square() / 3
        if not len(bound) or not float(bound.median()) > 0:
            return 0.0  # this rank has no token to tell by; others do
        return min(1.0, _MEDIAN * math.sqrt(float(found.median() / bound.median())))


def _scatter(
    up: torch.Tensor, down: torch.Tensor, before: torch.Tensor, matters: torch.Tensor, part: float
) -> torch.Tensor:
    """Variance that noise alone gives half the difference of two legs (B, T), at no cost of a further forward.

    Two numbers bound it from above; the smaller one is the level of all tokens:

    - half the sum of the legs less training's score. A first-order move cancels in it. Noise is left: the legs', and at
      least as much by the dither, which both legs share, and by training's own reading. So half of it counts;
    - how far most tokens move, which is noise and a true move.

    A token's own half sum says how noisy it is beside the others. It is one draw, so it is averaged with the level. A
    token far off all others keeps its own half sum in full: its slope, too, was taken at a score that far off.

    Args:
        up: scores at theta + s R.
        down: scores at theta - s R.
        before: scores of training.
        matters: bool (B, T), the tokens to judge by.
        part: of the noise's bound, see :meth:`Readout.scatter`.
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
    """The product, but 0 wherever the factor is: padding may hold inf or NaN."""
    return torch.where(factor != 0, factor * value, 0.0)
