# SPDX-License-Identifier: Apache-2.0
"""Every token's share of a gradient, from two forwards along it. docs/method.md, section 3, derives what is here.

Let R be a direction, at first the spike's gradient itself, which training left in ``.grad``. Two forwards at
theta + s R and theta - s R, the *legs*, give <g_t, R> for all tokens of all ranks at once:

    <g_t, R> = [l_t(theta + s R) - l_t(theta - s R)] / (2 s),    l_t = c_t (1 - p_t) logit(p_t) + e_t H_t

with c_t = dL/dlog p_t, e_t = dL/dH_t, and p_t in front as it was in training. A critic's values are linear, and are
taken as they are. The measured sum of the shares <g_t, R> / ||R||^2, the *closure*, is 1 if the measurement is right.

*The step s* is judged by the *response* r: how far log-odds move of the tokens that carry R. The first guess, s = r
max|c (1 - p)| / ||R||^2, is right for a single dominating token. Curvature's error grows as r^2, up to r^2 / 5; the
error of noisy log-odds falls as 1 / r. Both are known once a first micro-batch has been read.

*The move.* Rounding the weights changes how far they move along R, by some per cent in half precision, and for a short
step in float32. <R, true move> is known exactly, so it takes the place of s ||R||^2.

Shapes: B rows of a micro-batch, T response positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.gradients import Gradient
from ..core.precision import UNITS, NoFloat32
from ..core.probe import Prober
from ..core.step import Outputs, Recorded, only
from .weights import MovedWeights, forward_on_routes, hold_routes

_RESPONSE_PER_UNIT = 131.0  # cubed response per unit roundoff: 0.8 in bfloat16, where noise over response is measured
_LEAST_RESPONSE = 0.05  # the first guess' response: a shorter step is rounded away in float32
_CURVATURE = 0.2  # closure's error over the squared response (measured: 0.01 with 135M weights, 1 with 60k)
_RESPONSES = (0.05, 2.0)  # least and most response of a step that is taken anew
_FINE = {torch.float32: 0.02, torch.bfloat16: 0.15, torch.float16: 0.15}  # an error of closure not worth another step
_BAND = {torch.float32: 0.03, torch.bfloat16: 0.15, torch.float16: 0.15}  # error of closure allowed beside its noise
_CERTAIN, LIKELY = 3.0, 2.0  # standard errors: beyond chance of many, and of one that something else points at
_FAR = 3.0  # a factor: neither a wrong step nor rounding puts closure that far off
_HEARD = 0.1  # of closure: if the noise's bound is more, the noise is measured
_USABLE = 1 / _CERTAIN  # a larger standard error of closure would not tell 1 from 0
_PARTIAL_CLOSURE = 0.5  # some micro-batches are enough if they carry this much
_SHRINKING = (0.1, 0.7)  # least and most of the step to keep if curvature puts closure off
_BENT = {0.6: 0.1, 0.3: 0.25}  # most of it to keep if closure is off by more than the key
MOST_TO_SETTLE = 3  # forwards of one micro-batch, at most, that settle the step or measure the noise
_LATER = 2.0  # times the target: the most that micro-batches after the first may respond
_NOTABLE = 0.1  # of a micro-batch's absolute total: tokens that carry this much settle the response
_TINY = 1e-300  # instead of a step of 0
_LEAST_REST = 2.0**-24  # the smallest 1 - p that float32 tells from 0
_ROUNDING = 2.0**-20  # error of a log-prob read in float32: a few units of logits near 10
_PRIOR = 3.0  # draws that the level of all tokens counts as, beside the single draw of a token's own
_STRAY = 4.0  # standard deviations: a token further off is noisier than all others
_MEDIAN = 1.4826  # standard deviation of a normal variable over its median absolute value

Legs = tuple[dict[int, Outputs], dict[int, Outputs]]
"""By micro-batch the outputs at theta + s R and at theta - s R; the second is empty if one leg is enough."""
Found = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By micro-batch its tokens' <g_t, R> and their standard errors, float64 (B, T) each."""


@dataclass
class ShareMap:
    """Every token's inner product with a direction R, and how far the measurement can be trusted."""

    products: list[torch.Tensor]
    """Per micro-batch <g_t, R>, float64 (B, T), this rank's tokens."""
    errors: list[torch.Tensor]
    """Their standard errors."""
    square: float
    """||R||^2"""
    closure: float
    """Sum of all shares over all ranks; 1 when the measurement is right."""
    noise: float
    """Standard error of closure: the root of the sum of all tokens' squared errors."""
    unseen: float
    """About the part of ||R||^2 in micro-batches that were not read, by their norms; 0 if all were."""
    is_trusted: bool
    """Whether closure is 1 within what is known of its error."""
    num_tokens: int
    """Tokens with a coefficient, over all ranks."""
    step: float
    """s, as it was settled on; 0 if nothing was measured."""
    seen: frozenset[int] = frozenset()
    """The micro-batches that were read; products of the others are 0."""
    shrinking: float = 1.0
    """A next measurement multiplies the step with this: 1 unless curvature puts closure off."""
    certainty: float | None = None
    """Overrides :attr:`chance`."""
    singled_out: list[torch.Tensor] | None = None
    """Tokens, bool (B, T), that something other than their shares points at, such as a large coefficient."""

    def shares(self, micro_batch: int) -> torch.Tensor:
        """Share of R per token, float64 (B, T)."""
        return self.products[micro_batch] / self.square

    @property
    def closure_error(self) -> float:
        """Standard error of closure: its noise, and the part of R that was not read."""
        return math.hypot(self.noise, self.unseen)

    @property
    def is_noisy(self) -> bool:
        """Whether noise hides closure, now or at the shorter step that curvature asks for: noise goes with 1 / s."""
        return self.noise / self.shrinking > _USABLE

    @property
    def is_short(self) -> bool:
        """Whether micro-batches that were not read seem to carry what is missing of closure.

        That is so if more than half is missing, or no more than twice what Cauchy-Schwarz allows a part u of ||R||^2 to
        carry, sqrt(u) (twice, as the norms are rough).
        """
        missing = 1 - self.closure
        return self.unseen > 0 and (missing > 1 - _PARTIAL_CLOSURE or 0 < missing <= 2 * math.sqrt(self.unseen))

    @property
    def is_far(self) -> bool:
        """Whether everything was read and closure is off by more than a wrong step or rounding explains."""
        return not self.unseen and self.carries_else

    @property
    def carries_else(self) -> bool:
        """Whether what was read carries far less or more than the direction itself."""
        return not 1 / _FAR <= self.closure <= _FAR

    @property
    def chance(self) -> float:
        """Standard errors that none of N tokens strays by chance: about the largest of N normal draws, at least 3."""
        return self.certainty or max(_CERTAIN, math.sqrt(2 * math.log(max(self.num_tokens, 2))))

    def doubt(self, micro_batch: int) -> torch.Tensor:
        """How much of each product may be chance, float64 (B, T). Two standard errors do for tokens singled out, which
        are not the largest of N draws."""
        errors = self.errors[micro_batch]
        if self.singled_out is None:
            return self.chance * errors
        return torch.where(self.singled_out[micro_batch], min(LIKELY, self.chance), self.chance) * errors

    def least(self, micro_batch: int) -> torch.Tensor:
        """Each product moved towards 0 by what may be chance, float64 (B, T)."""
        return shrunk(self.products[micro_batch], self.doubt(micro_batch))


def shrunk(values: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """Values moved towards 0 by their errors, and not beyond."""
    return values.sign() * (values.abs() - errors).clamp(min=0.0)


@dataclass
class ShareMeasurement:
    """One measurement of <g_t, R> for every token of every rank. All ranks make it together.

    Costs two forwards of each micro-batch, and at most two more of one to settle the step. In half precision one more
    forward may measure the noise, once a search. A mixture of experts takes one more of each to note its routes.
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
    """A map of other micro-batches along the same direction, to be completed at its step."""
    refined: ShareMap | None = None
    """An untrusted map of the same micro-batches along the same direction, to be measured at a shorter step."""
    increments: Sequence[float] | None = None
    """About the norm of each micro-batch's own gradient, if known."""

    def __post_init__(self) -> None:
        increments, known, refined = self.increments, self.known, self.refined
        self.seen = frozenset(self.micro_batches) | (known.seen if known is not None else frozenset())
        self.unseen = [index for index in range(self.prober.step.num_micro_batches) if index not in self.seen]
        self.dtype = self.prober.step.numerics.dtype  # of the gradient: closure is judged by it
        self.is_fine = self.prober.unit <= UNITS[torch.float32]
        self.target = max(_LEAST_RESPONSE, (_RESPONSE_PER_UNIT * self.prober.unit) ** (1 / 3))
        self.band = _BAND[self.dtype]
        self.fine = _FINE[torch.float32 if self.is_fine else self.dtype]
        self.square = self.prober.space.norm(self.direction) ** 2 / self.scale**2
        # of ||R||^2, as if micro-batches were orthogonal; without norms it may be anything
        carried = sum(increments[index] ** 2 for index in self.unseen) if increments else math.inf
        self.carried_unseen = min(carried / self.square, 1.0) if self.unseen and self.square > 0 else 0.0
        # over 1 if micro-batches cancel: a token may then respond that much more than ||R|| suggests
        self.loudest = max(increments, default=0.0) / self.square**0.5 if increments and self.square > 0 else 0.0
        shrinking = 1.0 if refined is None else refined.shrinking
        earlier = known or refined
        self.fixed_step = None if earlier is None else earlier.step * shrinking
        self.at: float | None = None  # the step at which the weights are now,
        self.moved = 0.0  # and <R, their true move>

    def run(self) -> ShareMap:
        self.sizes = self.prober.ranks.agree(lambda: [_largest(readout.slope) for readout in self.readouts])
        largest, square = self.prober.ranks.max([max(self.sizes, default=0.0)])[0], self.square
        if square <= 0 or largest <= 0 or not math.isfinite(square):
            nothing = [torch.zeros_like(readout.slope) for readout in self.readouts]
            return ShareMap(nothing, nothing, square, 0.0, 0.0, 0.0, False, 0, 0.0)
        step = self.fixed_step or self.target * largest / square / max(self.loudest, 1.0)
        hold_routes(self.prober, self.micro_batches)
        try:
            return self._run(step)
        except NoFloat32:
            self.__post_init__()  # the same in training's precision
            for readout in self.readouts:
                readout.is_half = True
            return self.run()

    def _run(self, step: float) -> ShareMap:
        with MovedWeights(self.prober.space, self.dtype, is_wide=self.prober.is_wide) as weights:
            return self._measured(weights, step)

    def _measured(self, weights: MovedWeights, step: float) -> ShareMap:
        """Measure at a step that a pilot settles: on each rank the micro-batch with its largest coefficient."""
        pilot = max(self.micro_batches, key=lambda index: self.sizes[index])
        rest = [index for index in self.micro_batches if index != pilot]
        parts = [[pilot], rest] if self.fixed_step is None and rest else [list(self.micro_batches)]
        seen: list[tuple[Legs, float]] = []
        for number, part in enumerate(parts):
            legs, step, moved = self._legs(weights, step, part, number == 0 and self.fixed_step is None)
            seen.append((legs, moved))
        found = self.prober.ranks.agree(lambda: self._read(seen))
        if not self.is_fine and self.prober.scatter is None and self._is_heard(found):
            self._measure_scatter(weights, pilot, seen[0][0])
            found = self.prober.ranks.agree(lambda: self._read(seen))
        return self._combine(found, step)

    def _is_heard(self, found: Found) -> bool:
        """Whether the bound of the noise matters beside closure."""

        def local() -> list[float]:
            return [sum(float(error.square().sum()) for _, error in found.values())]

        (variance,) = self.prober.ranks.sum(self.prober.ranks.agree(local))
        return math.sqrt(variance) > _HEARD * self.square

    def _measure_scatter(self, weights: MovedWeights, pilot: int, legs: Legs) -> None:
        """Measure which part of the noise's bound is noise, by a forward of the pilot with the dither and no move.

        The largest part over the ranks counts, as a bound must.
        """
        still = self._leg(weights, 0.0, [pilot])[0][pilot]
        readout, ranks = self.readouts[pilot], self.prober.ranks
        part = ranks.agree(lambda: readout.scatter(legs[0][pilot], legs[1][pilot], still))
        (self.prober.scatter,) = ranks.max([part])

    def _legs(self, weights: MovedWeights, step: float, part: list[int], is_first: bool) -> tuple[Legs, float, float]:
        """The legs at +step and -step, the step settled on, and <R, half the true move from one leg to the other>."""
        is_flipped = self.at == -step  # begin with the leg where the weights are: one move fewer
        step = -step if is_flipped else step
        # In float32 one leg tells the response, from training's own reading. In half precision that rounds too much.
        plus, up = self._leg(weights, step, part)
        has_reading = self.dtype == torch.float32
        minus, down = ({}, 0.0) if has_reading else self._leg(weights, -step, part)
        factor = self._rescaling((plus, minus), abs(step), is_first)
        if factor != 1.0:
            step *= factor
            plus, up = self._leg(weights, step, part)
            minus = {}
        if not minus:
            minus, down = self._leg(weights, -step, part)
        moved = (up - down) / 2
        return ((minus, plus), -step, -moved) if is_flipped else ((plus, minus), step, moved)

    def _leg(
        self, weights: MovedWeights, step: float, micro_batches: Sequence[int]
    ) -> tuple[dict[int, Outputs], float]:
        """The outputs at this step, and <R, the weights' true move>."""
        prober = self.prober
        if step != self.at:
            moved = weights.move(self.direction, step / self.scale)
            self.at, self.moved = step, float(prober.space.reduce(lambda: moved)) / self.scale
        return {index: forward_on_routes(prober, index) for index in micro_batches}, self.moved

    def _rescaling(self, legs: Legs, step: float, is_first: bool) -> float:
        """What to multiply the step with; 1 if that would not halve the error."""

        def local() -> list[float]:
            return [*self._response(legs), self._noise(legs)]

        # the largest over the ranks: the loudest token is in some rank's pilot
        response, noise = self.prober.ranks.max(self.prober.ranks.agree(local))
        noise /= max(step * self.square, _TINY)
        if not math.isfinite(response):
            return 0.1  # far too long
        if response == 0:
            return 1.0  # nothing to judge by
        if not is_first:
            return 1.0 if response <= _LATER * self.target else self.target / response
        error = _CURVATURE * response**2 + noise
        least, most = _RESPONSES
        # At response x the error is a x^2 + n r / x, with n the noise at the present response r: least at this x.
        best = min(max((noise * response / (2 * _CURVATURE)) ** (1 / 3), least), most)
        if error <= self.fine or _CURVATURE * best**2 + noise * response / best > error / 2:
            return 1.0
        return min(max(best / response, 0.1), 10.0)

    def _response(self, legs: Legs) -> list[float]:
        """How far log-odds move: the most of any token that carries a notable part of the absolute total, else the mean
        weighted by what tokens carry; inf if that is not finite."""
        responses, carried = [], []
        for index, plus in legs[0].items():
            slope = self.readouts[index].slope
            response = self.readouts[index].response(plus, legs[1].get(index))[slope != 0]
            responses.append(response)
            carried.append(slope[slope != 0].abs() * response)
        response, parts = torch.cat(responses), torch.cat(carried)
        total = float(parts.sum())
        if not math.isfinite(total):
            return [math.inf]
        notable = response[parts >= _NOTABLE * total]
        if total == 0:
            return [0.0]
        return [float(notable.max()) if len(notable) else float((parts * response).sum()) / total]

    def _noise(self, legs: Legs) -> float:
        errors = [self.readouts[i].error(plus, legs[1].get(i), self._part) for i, plus in legs[0].items()]
        return math.sqrt(sum(float(error.square().sum()) for error in errors))

    @property
    def _part(self) -> float:
        """Which part of the noise's bound counts: what was measured, else all of it."""
        return 1.0 if self.prober.scatter is None else self.prober.scatter

    def _read(self, seen: list[tuple[Legs, float]]) -> Found:
        """Products and errors by these legs, each of which come with <R, half of their true move>."""
        found: Found = {}
        for legs, moved in seen:
            per_move = self.square / moved if moved else math.nan
            for index, plus in legs[0].items():
                readout, minus = self.readouts[index], legs[1][index]
                half = (readout.read(plus) - readout.read(minus)) / 2
                found[index] = half * per_move, readout.error(plus, minus, self._part) * abs(per_move)
        return found

    def _combine(self, found: Found, step: float) -> ShareMap:
        """These products with those known before; totals over all ranks."""

        def local() -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
            products, errors = [], []
            for index, readout in enumerate(self.readouts):
                product, error = found.get(index) or self._known(index) or (readout.slope * 0, readout.slope * 0)
                products.append(product)
                errors.append(error)
            parts = products, [error.square() for error in errors], [readout.slope != 0 for readout in self.readouts]
            totals = [sum(float(values.sum()) for values in part) for part in parts]
            return products, errors, totals

        products, errors, totals = self.prober.ranks.agree(local)
        carried, variance, count = self.prober.ranks.sum(totals)
        closure, noise = carried / self.square, math.sqrt(variance) / self.square
        return ShareMap(
            products,
            errors,
            self.square,
            closure,
            noise,
            self.carried_unseen,
            self._is_trusted(closure, noise),
            int(count),
            step,
            self.seen,
            self._shrinking(closure, noise),
        )

    def _known(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self.known is None else (self.known.products[index], self.known.errors[index])

    def _shrinking(self, closure: float, noise: float) -> float:
        """See :class:`ShareMap`. A step x times as long has the error off x^2 + noise / x, ``off`` being closure's now:
        least at x^3 = noise / (2 off)."""
        off = max(abs(1 - closure) - self.carried_unseen, 0.0)
        if self.prober.is_wide or not off > max(self.band, _CERTAIN * noise):
            return 1.0
        least, most = _SHRINKING
        most = next((part for bent, part in _BENT.items() if off > bent), most)
        return min(max((noise / (2 * off)) ** (1 / 3), least), most)

    def _is_trusted(self, closure: float, noise: float) -> bool:
        if self.prober.is_wide:  # the shares are exact, along a gradient that half precision may have turned far
            return noise <= _USABLE and (bool(self.unseen) or 1 / _FAR <= closure <= _FAR)
        most = max(self.band, _CERTAIN * noise)
        low = max(_PARTIAL_CLOSURE, 1 - most - 2 * self.carried_unseen) if self.unseen else 1 - most
        return noise <= _USABLE and low <= closure <= 1 + most


def _largest(values: torch.Tensor) -> float:
    return float(values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()) if values.numel() else 0.0


# ---- what a forward reads


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
        self._recorded, self.is_half = recorded, is_half
        self._log_prob, self._entropy = log_prob.double(), None if entropy is None else entropy.double()
        rest = 1.0 if recorded.is_linear else (-torch.expm1(recorded.log_prob.double())).clamp(min=0.0)
        self.slope = torch.where(self._log_prob != 0, self._log_prob * rest, 0.0)
        """c_t (1 - p_t), the derivative of the loss by the log-odds: float64 (B, T)."""

    @property
    def weight(self) -> torch.Tensor:
        """|c_t| + |e_t|, how much the loss weighs each token: float64 (B, T)."""
        return self._log_prob.abs() if self._entropy is None else self._log_prob.abs() + self._entropy.abs()

    def scores(self, log_prob: torch.Tensor) -> torch.Tensor:
        """Log-odds, or a critic's values as they are: float64 (B, T)."""
        return log_prob.double() if self._recorded.is_linear else log_odds(log_prob)

    def read(self, outputs: Outputs) -> torch.Tensor:
        """l_t, the loss that each token adds up to a constant: float64 (B, T)."""
        log_prob, entropy = outputs[:2]
        read = only(self.slope, self.scores(log_prob))
        if self._entropy is not None and entropy is not None:
            read += only(self._entropy, entropy.double())
        return read

    def response(self, plus: Outputs, minus: Outputs | None) -> torch.Tensor:
        """How far each token's score moves (B, T): half the difference of two legs, or one leg's from training's."""
        if minus is None:
            return (self.scores(plus[0]) - self.scores(self._recorded.read)).abs()
        return (self.scores(plus[0]) - self.scores(minus[0])).abs() / 2

    def error(self, plus: Outputs, minus: Outputs | None, part: float = 1.0) -> torch.Tensor:
        """Standard error of half the difference of two legs' :meth:`read`, float64 (B, T).

        It has two parts. Float32 rounds each log-prob, and half a difference of two has half the variance of one. In
        half precision, a forward at other weights reads other scores even if nothing should move (:func:`_scatter`);
        with one leg alone that is not known, and only rounding counts. ``part``: see :meth:`scatter`.
        """
        square = (self._log_prob * _ROUNDING).square() / 2
        if self.is_half and minus is not None:
            ups = self.scores(plus[0]), self.scores(minus[0]), self.scores(self._recorded.read)
            square = square + only(self.slope.square(), _scatter(*ups, self.slope != 0, part))
            up, down, before = plus[1], minus[1], self._recorded.entropy
            if self._entropy is not None and up is not None and down is not None and before is not None:
                scatter = _scatter(up.double(), down.double(), before.double(), self._entropy != 0, part)
                square = square + only(self._entropy.square(), scatter)
        return torch.where(self._log_prob != 0, square, 0.0).sqrt()

    def scatter(self, plus: Outputs, minus: Outputs, still: Outputs) -> float:
        """Which part of its bound the noise is, in [0, 1], by a forward with the legs' dither and no move (``still``).

        For tokens that hardly move, and most do, (plus + minus) / 2 - still is noise alone. With a variance v of each
        forward it has v / 2 + v = 3 v / 2, three times the v / 2 of half the difference.
        """
        up, down, before = (self.scores(part[0]) for part in (plus, minus, still))
        bound = _scatter(up, down, self.scores(self._recorded.read), self.slope != 0, 1.0)[self.slope != 0]
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

    Scores are those of the legs and of training; ``matters``, bool (B, T), are the tokens to judge by.
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
