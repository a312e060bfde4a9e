# SPDX-License-Identifier: Apache-2.0
"""Every token's share of a gradient, from two forwards along it. docs/method.md, section 3, derives what is here.

Let R be a direction, at first the spike's gradient itself, which training left in ``.grad``. Two forwards at
theta + s R and theta - s R, the *legs*, give <g_t, R> for all tokens of all ranks at once:

    <g_t, R> = [l_t(theta + s R) - l_t(theta - s R)] / (2 s),    l_t = c_t (1 - p_t) logit(p_t) + e_t H_t

with c_t = dL/dlog p_t, e_t = dL/dH_t, and p_t in front as it was in training. A critic's values are linear, and are
taken as they are. The measured sum of the shares <g_t, R> / ||R||^2, the *closure*, is 1 if the tokens make all of R.

*The step s* is judged by the *response* r: how far log-odds move of the tokens that carry R. Curvature's error grows as
r^2, that of rounded log-odds falls as 1 / r. The first guess, s = r max|c (1 - p)| / ||R||^2, is right for a single
dominating token.

*The move.* Rounding the weights changes how far they move along R. <R, true move> is known exactly, so it takes the
place of s ||R||^2.

Shapes: B rows of a micro-batch, T response positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.certificate import CERTAIN
from ..core.gradients import Gradient
from ..core.precision import TF32_UNIT, UNITS, NoFloat32
from ..core.probe import Prober
from ..core.step import Outputs, Recorded, only
from .weights import MovedWeights, forward_on_routes, hold_routes

_ROUNDING = 64.0  # unit roundoffs that a forward's log-odds may be off by: 0.25 in bfloat16; TF32 was not measured
_CURVATURE = 0.2  # closure's error over the squared response: 0.01 was measured with 135M weights, 1 with 60k
_LEAST_RESPONSE = 0.05  # log-odds: a shorter step of 135M weights is near the last place of a float32
_FINE = 0.02  # of closure: an error that is not worth another step

FAR = 3.0  # a factor: a gradient in half precision differs from the function's own by less
_LAST_PLACES = 16 * UNITS[torch.float32]  # error of a log-prob in float32, whose logits are near 10
_LEAST_REST = UNITS[torch.float32]  # the smallest 1 - p that float32 distinguishes from 0

Found = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Tokens' <g_t, R> and their standard errors by micro-batch, float64 (B, T) each."""


@dataclass
class ShareMap:
    """Every token's inner product with a direction R."""

    products: list[torch.Tensor]
    """Per micro-batch <g_t, R>, float64 (B, T), this rank's tokens."""
    errors: list[torch.Tensor]
    """Their standard errors, by rounding and curvature."""
    square: float
    """||R||^2"""
    closure: float
    """Sum of all shares over all ranks; NaN where rounding undid the move or outputs overflowed."""
    noise: float
    """Standard error of closure: the root of the sum of all tokens' squared errors."""
    unseen: float
    """An estimate of the part of ||R||^2 in micro-batches that were not read, by their norms; 0 if all were."""
    is_exact: bool
    """Whether products are right to some digits. If not, as read in half precision, only their order is."""
    num_tokens: int
    """Tokens with a coefficient, over all ranks."""
    step: float
    """s, as it was settled on; 0 if nothing was measured."""
    seen: frozenset[int] = frozenset()
    """The micro-batches that were read; products of the others are 0."""

    def shares(self, micro_batch: int) -> torch.Tensor:
        """Return the share of R per token, float64 (B, T)."""
        return self.products[micro_batch] / self.square

    @property
    def is_trusted(self) -> bool:
        """Whether the shares are exact and add up to R, within a factor for training's own half precision."""
        return self.is_exact and (self.unseen > 0 or 1 / FAR <= self.closure <= FAR)

    @property
    def closure_error(self) -> float:
        """Standard error of closure: its noise, and the part of R that was not read."""
        return math.hypot(self.noise, self.unseen)

    def doubt(self, micro_batch: int) -> torch.Tensor:
        """Return how much of each product may be chance, float64 (B, T): about the largest of N normal draws."""
        chance = max(CERTAIN, math.sqrt(2 * math.log(max(self.num_tokens, 2))))
        return chance * self.errors[micro_batch]


def shrunk(values: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """Move values towards 0 by their errors, and not beyond."""
    return values.sign() * (values.abs() - errors).clamp(min=0.0)


@dataclass
class ShareMeasurement:
    """One measurement of <g_t, R> for every token of every rank. All ranks make it together.

    Costs two forwards of each micro-batch, and two more of one where the first step was too long or too short. A
    mixture of experts takes one more of each to note its routes.
    """

    prober: Prober
    """The step. Weights are moved and restored bit for bit; ``.grad`` is not touched."""
    readouts: list["Readout"]
    """One for each micro-batch; tokens that are no part of R read 0."""
    direction: Gradient
    """``scale`` times R, finite."""
    scale: float
    """Positive factor on ``direction``."""
    micro_batches: Sequence[int]
    """Read only these; closure is then the part of R that they carry."""
    known: ShareMap | None = None
    """A map along the same direction, to be completed, or read again, at its step."""
    increments: Sequence[float] = ()
    """About the norm of each micro-batch's own gradient; without those of all it is not used."""
    known_square: float | None = None
    """||R||^2, where it was measured."""

    def __post_init__(self) -> None:
        num_micro_batches, known = self.prober.step.num_micro_batches, self.known
        increments = self.increments if len(self.increments) == num_micro_batches else ()
        square = self.known_square
        self.square = self.prober.space.norm(self.direction) ** 2 / self.scale**2 if square is None else square
        self.seen = frozenset(self.micro_batches) | (known.seen if known is not None else frozenset())
        unseen = [index for index in range(num_micro_batches) if index not in self.seen]
        # of ||R||^2, as if micro-batches were orthogonal; without norms it may be anything
        carried = sum(increments[index] ** 2 for index in unseen) if increments else math.inf
        self.unseen = min(carried / self.square, 1.0) if unseen and self.square > 0 else 0.0
        # over 1 if micro-batches cancel: a token may then respond that much more than ||R|| suggests
        self.loudest = max(increments, default=0.0) / self.square**0.5 if increments and self.square > 0 else 0.0
        self.at: float | None = None  # the step at which the weights are now
        self.moved: torch.Tensor  # this process' part of <direction, the true move of the weights>

    def run(self) -> ShareMap:
        largest = self.prober.ranks.run_local_synced(lambda: [_largest(each.slope) for each in self.readouts])
        square = self.square
        (most,) = self.prober.ranks.max([max(largest, default=0.0)])
        if square <= 0 or most <= 0 or not math.isfinite(square):
            nothing = [torch.zeros_like(readout.slope) for readout in self.readouts]
            return ShareMap(nothing, nothing, square, 0.0, 0.0, 0.0, False, 0, 0.0)
        hold_routes(self.prober, self.micro_batches)
        pilot = max(self.micro_batches, key=lambda index: largest[index])
        while True:
            try:
                return self._run(most, pilot)
            except NoFloat32:  # the same in training's precision
                self.at = None

    def _run(self, largest: float, pilot: int) -> ShareMap:
        """Measure at a step that a pilot settles: on each rank the micro-batch with its largest coefficient."""
        prober, known = self.prober, self.known
        self.rounding = _ROUNDING * prober.unit
        is_float = prober.step.dtype == torch.float32
        self.training_unit = UNITS[torch.float32 if is_float else torch.bfloat16]
        # where the errors of rounding and of curvature, rounding / r + _CURVATURE r^2, are least
        self.target = max(_LEAST_RESPONSE, (self.rounding / (2 * _CURVATURE)) ** (1 / 3))
        step = self.target * largest / self.square / max(self.loudest, 1.0) if known is None else known.step
        rest = [index for index in self.micro_batches if index != pilot]
        parts = [[pilot], rest] if known is None and rest else [list(self.micro_batches)]
        found: Found = {}
        with MovedWeights(prober.space, prober.step.dtype, is_wide=prober.is_wide) as weights:
            for number, part in enumerate(parts):
                read, step = self._settled(weights, step, part, is_first=number == 0 and known is None)
                found |= read
        return self._combine(found, step)

    def _settled(self, weights: MovedWeights, step: float, part: list[int], is_first: bool) -> tuple[Found, float]:
        """Read these micro-batches, at this step or a better one; returns what they read and the step."""
        found, response = self._read(weights, step, part)
        least = min(self.target / 4, self.rounding / _FINE) if is_first else 0.0
        most = max(2 * self.target, (_FINE / _CURVATURE) ** 0.5)  # beyond it curvature's error is worth a step
        if response == 0 or least <= response <= most:
            return found, step
        step *= min(max(self.target / response, 0.1), 10.0)  # an inf makes it a tenth
        return self._read(weights, step, part)[0], step

    def _read(self, weights: MovedWeights, step: float, part: list[int]) -> tuple[Found, float]:
        """Return the legs' products and errors, and the largest response of all ranks."""
        signs = (-1, 1) if self.at == -step else (1, -1)  # begin where the weights are: one move fewer
        legs = {sign: self._leg(weights, sign * step, part) for sign in signs}
        (plus, up), (minus, down) = legs[1], legs[-1]
        moved = self.prober.space.reduce(lambda: torch.stack([up, down]))
        up, down = (moved / self.scale).tolist()
        per_move = 2 * self.square / (up - down) if up != down else math.nan

        def local() -> list[float]:
            offs = torch.cat([self.readouts[index].off(plus[index], minus[index]) for index in part])
            responses = [self.readouts[index].response(plus[index], minus[index]) for index in part]
            return [max(responses, default=0.0), float(offs.median()) if len(offs) else 0.0]

        response, off = self.prober.ranks.max(self.prober.ranks.run_local_synced(local))
        if off > _ROUNDING * self.training_unit:  # forwards that do not repeat, and not training's own rounding
            self.rounding = max(self.rounding, off)

        unit = self.rounding + _CURVATURE * min(response, 1.0) ** 3

        def products() -> Found:
            found = {}
            for index in part:
                readout = self.readouts[index]
                half = (readout.read(plus[index]) - readout.read(minus[index])) / 2
                found[index] = half * per_move, readout.error(unit) * abs(per_move)
            return found

        return self.prober.ranks.run_local_synced(products), response

    def _leg(
        self, weights: MovedWeights, step: float, micro_batches: Sequence[int]
    ) -> tuple[dict[int, Outputs], torch.Tensor]:
        """Return the outputs at this step, and this process' part of <``direction``, the weights' true move>."""
        prober = self.prober
        if step != self.at:
            self.at, self.moved = step, weights.move(self.direction, step / self.scale)
        return {index: forward_on_routes(prober, index) for index in micro_batches}, self.moved

    def _combine(self, found: Found, step: float) -> ShareMap:
        """Join these products with those known before, and total them over all ranks."""

        def local() -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
            pairs = [found.get(index) or self._known(index) for index in range(len(self.readouts))]
            products, errors = ([pair[number] for pair in pairs] for number in (0, 1))
            counted = [readout.slope != 0 for readout in self.readouts]
            parts = products, [error.square() for error in errors], counted
            return products, errors, [sum(float(values.sum()) for values in part) for part in parts]

        products, errors, totals = self.prober.ranks.run_local_synced(local)
        carried, variance, count = self.prober.ranks.sum(totals)
        closure, noise = carried / self.square, math.sqrt(variance) / self.square
        is_exact = self.rounding <= _ROUNDING * TF32_UNIT and math.isfinite(closure)
        given = self.square, closure, noise, self.unseen, is_exact, int(count), step, self.seen
        return ShareMap(products, errors, *given)

    def _known(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.known is not None:
            return self.known.products[index], self.known.errors[index]
        return (torch.zeros_like(self.readouts[index].slope),) * 2


def _largest(values: torch.Tensor) -> float:
    return float(values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()) if values.numel() else 0.0


# ---- what a forward reads


def log_odds(log_prob: torch.Tensor) -> torch.Tensor:
    """Return log p - log(1 - p) in float64. A p that float32 rounds to 1 counts as 1 - 2^-24, so it stays finite."""
    log_prob = log_prob.double()
    return log_prob - torch.log((-torch.expm1(log_prob)).clamp(min=_LEAST_REST))


class Readout:
    """Reads, from a forward, what each token of one micro-batch adds to the loss, to first order.

    Args:
        recorded: training's own forward.
        log_prob: c_t (B, T); tokens with 0 read 0, whatever garbage their position holds.
        entropy: e_t (B, T); None if the loss has no entropy term.
    """

    def __init__(self, recorded: Recorded, log_prob: torch.Tensor, entropy: torch.Tensor | None):
        self._recorded = recorded
        self._log_prob, self._entropy = log_prob.double(), None if entropy is None else entropy.double()
        rest = 1.0 if recorded.is_linear else (-torch.expm1(recorded.log_prob.double())).clamp(min=0.0)
        self.slope = torch.where(self._log_prob != 0, self._log_prob * rest, 0.0)
        """c_t (1 - p_t), the derivative of the loss by the log-odds: float64 (B, T)."""

    @property
    def log_prob_weight(self) -> torch.Tensor:
        """|c_t|, how much the loss weighs each token by its log-prob: float64 (B, T)."""
        return self._log_prob.abs()

    @property
    def weight(self) -> torch.Tensor:
        """|c_t| + |e_t|, how much the loss weighs each token: float64 (B, T)."""
        return self.log_prob_weight if self._entropy is None else self.log_prob_weight + self._entropy.abs()

    def scores(self, log_prob: torch.Tensor) -> torch.Tensor:
        """Return log-odds, or a critic's values unchanged: float64 (B, T)."""
        return log_prob.double() if self._recorded.is_linear else log_odds(log_prob)

    def read(self, outputs: Outputs) -> torch.Tensor:
        """Return l_t, the loss that each token adds, up to a constant: float64 (B, T)."""
        log_prob, entropy = outputs[:2]
        read = only(self.slope, self.scores(log_prob))
        if self._entropy is not None and entropy is not None:
            read += only(self._entropy, entropy.double())
        return read

    def error(self, off: float) -> torch.Tensor:
        """Return the standard error of half a difference of two :meth:`read`, float64 (B, T), if log-odds are ``off``
        by this much."""
        size = self.slope.abs() if self._entropy is None else self.slope.abs() + self._entropy.abs()
        return (off * size + _LAST_PLACES * self.weight) / 2**0.5

    def off(self, plus: Outputs, minus: Outputs) -> torch.Tensor:
        """Return how far the middle of two legs is from training's score, for tokens with a slope: 1D."""
        middle = (self.scores(plus[0]) + self.scores(minus[0])) / 2
        return (middle - self.scores(self._recorded.readout)).abs()[self.slope != 0]

    def response(self, plus: Outputs, minus: Outputs) -> float:
        """Return how far scores move: the mean weighted by what tokens carry; inf if that is not finite."""
        moves = (self.scores(plus[0]) - self.scores(minus[0])).abs()[self.slope != 0] / 2
        parts = self.slope[self.slope != 0].abs() * moves
        total = float(parts.sum())
        if not 0 < total < math.inf:
            return 0.0 if total == 0 else math.inf
        return float((parts * moves).sum()) / total
