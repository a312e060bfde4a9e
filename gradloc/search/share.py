# SPDX-License-Identifier: Apache-2.0
"""Every token's share of a gradient, from two forwards along it.

Token t's gradient is g_t = c_t grad(log p_t) + e_t grad(H_t), with c_t = d loss / d log p_t and e_t = d loss / d H_t.
Along a direction R

    <g_t, R> = [l_t(theta + s R) - l_t(theta - s R)] / (2 s),    l_t = c_t (1 - p_t) logit(p_t) + e_t H_t

for all tokens of all ranks at once; :mod:`.readout` says why in log-odds. The shares <g_t, R> / ||R||^2 of R = sum_t
g_t add up to 1: *closure*, which checks the measurement. A share bounds the token's norm from below: ||g_t|| >=
|share_t| ||R|| (Cauchy-Schwarz).

The step s aims at a response, how far the log-odds move of the tokens that carry R. A first guess s = T max|c (1 -
p)| / ||R||^2 is exact when one token dominates. Two errors depend on the response r: curvature's, up to r^2 / 5, and
the noise of reading log-odds, which goes with 1 / r. Both are known once the first micro-batch has been read, so the
step is taken anew where that halves a large error. What is left of the noise is every share's standard
error.

What rounding leaves of the move along R, some per cent more or less in half precision and of a short move in float32,
is known exactly, as an inner product of weights; shares are per what the weights really moved.

Shapes: B rows of a micro-batch, T response positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.gradients import Gradient
from ..core.probe import Prober
from .readout import Outputs, Readout
from .weights import MovedWeights, forward_on_routes, hold_routes

_TARGET = {torch.float32: 0.05, torch.bfloat16: 0.8, torch.float16: 0.8}
_CURVATURE = 0.2  # error of closure over the response squared (measured: 0.01 with 135M weights, 1 with 60k)
_RESPONSES = (0.05, 2.0)  # between these the step is chosen
_FINE = {torch.float32: 0.02, torch.bfloat16: 0.15, torch.float16: 0.15}  # an error of closure to live with
_BAND = {torch.float32: 0.03, torch.bfloat16: 0.15, torch.float16: 0.15}  # how far closure may be off beside its noise
_CERTAIN, _LIKELY = 3.0, 2.0  # standard errors
_FAR = 3.0  # a factor that neither the step nor rounding puts closure off by
_HEARD = 0.05  # of closure: where the noise may be more, it is measured
_USABLE = 1 / _CERTAIN  # a closure whose standard error is larger does not tell 1 from 0
_PARTIAL_CLOSURE = 0.5  # a part of the micro-batches will do where it carries at least this much
_SHRINKING = (0.1, 0.7)  # least and most of the step that is kept where curvature puts closure off
_BENT = {0.6: 0.1, 0.3: 0.25}  # most of the step that is kept where closure is off by more than the key
_LATER = 2.0  # times the target: how far micro-batches after the first may respond
_NOTABLE = 0.1  # of the absolute parts of a micro-batch: tokens that carry more settle the response

Legs = tuple[dict[int, Outputs], dict[int, Outputs]]
"""Per micro-batch what is read at theta + s R and at theta - s R; the second is empty where one leg is enough."""
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
    """Standard error of closure by what was read."""
    unseen: float
    """The part of ||R||^2 in micro-batches that were not read, estimated from their norms."""
    is_trusted: bool
    """Whether closure is 1 within what is known of its error."""
    num_tokens: int
    """That were read, over all ranks."""
    step: float
    seen: frozenset[int] = frozenset()
    """The micro-batches that were looked at; products of the others are 0."""
    shrinking: float = 1.0
    """What to multiply the step with: 1 where noise is what puts closure off, else what makes both errors alike."""
    certainty: float | None = None
    singled_out: list[torch.Tensor] | None = None
    """Tokens, bool (B, T), that something other than their shares points at."""
    num_draws: int = 1
    """How many measurements this is the mean of, each with a dither of its own."""

    def shares(self, micro_batch: int) -> torch.Tensor:
        """Share of R per token, float64 (B, T)."""
        return self.products[micro_batch] / self.square

    @property
    def closure_error(self) -> float:
        """Standard error of closure: the noise, and what was not read."""
        return math.hypot(self.noise, self.unseen)

    @property
    def is_noisy(self) -> bool:
        """Whether noise hides closure, or would at a step short enough for curvature."""
        return self.noise / self.shrinking > _USABLE

    @property
    def is_short(self) -> bool:
        """Whether what was not read seems to carry what is missing: more than half, or no more than Cauchy-Schwarz
        allows by its norms; twice that, as they are rough."""
        missing = 1 - self.closure
        return self.unseen > 0 and (missing > 1 - _PARTIAL_CLOSURE or 0 < missing <= 2 * math.sqrt(self.unseen))

    @property
    def is_far(self) -> bool:
        """Whether everything was read and closure is further off than a step or rounding explains."""
        return not self.unseen and not 1 / _FAR <= self.closure <= _FAR

    @property
    def chance(self) -> float:
        """How many standard errors no one of so many tokens strays by chance; ``certainty`` overrides it."""
        return self.certainty or max(_CERTAIN, math.sqrt(2 * math.log(max(self.num_tokens, 2))))

    def doubt(self, micro_batch: int) -> torch.Tensor:
        """How much of each product may be chance: float64 (B, T); less for tokens singled out by something else."""
        errors = self.errors[micro_batch]
        if self.singled_out is None:
            return self.chance * errors
        return torch.where(self.singled_out[micro_batch], min(_LIKELY, self.chance), self.chance) * errors

    def least(self, micro_batch: int) -> torch.Tensor:
        """Each product less what may be chance, with its sign: float64 (B, T)."""
        return shrunk(self.products[micro_batch], self.doubt(micro_batch))


def shrunk(values: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """Values less their errors, towards 0."""
    return values.sign() * (values.abs() - errors).clamp(min=0.0)


def measure_shares(
    prober: Prober,
    readouts: list[Readout],
    direction: Gradient,
    scale: float,
    micro_batches: Sequence[int] | None = None,
    known: ShareMap | None = None,
    refined: ShareMap | None = None,
    increments: Sequence[float] | None = None,
) -> ShareMap:
    """Measure <g_t, R> for every token of every rank.

    Args:
        prober: the step. Weights are moved and restored bit for bit; ``.grad`` is not touched.
        readouts: per micro-batch; tokens that are no part of R read 0.
        direction: ``scale`` times R, finite.
        scale: positive factor on ``direction``.
        micro_batches: look at these only; closure is then the part of the direction that they carry.
        known: a map of other micro-batches along the same direction, to be completed at the step that it took.
        refined: a map of these micro-batches along the same direction that is not trusted. Where noise is why, its mean
            with another draw; where curvature is, another at a shorter step.
        increments: estimate of each micro-batch's own gradient norm, where that is known.

    Returns:
        2 forwards of each micro-batch, at most 2 more of one to settle the step, in half precision one more of one to
        measure noise, once a search, and of a model of experts one more of each to note its routes.
    """
    chosen = range(prober.step.num_micro_batches) if micro_batches is None else micro_batches
    return _Measurement(prober, readouts, direction, scale, chosen, known, refined, increments).run()


class _Measurement:
    def __init__(
        self,
        prober: Prober,
        readouts: list[Readout],
        direction: Gradient,
        scale: float,
        micro_batches: Sequence[int],
        known: ShareMap | None,
        refined: ShareMap | None,
        increments: Sequence[float] | None,
    ):
        self.prober, self.readouts = prober, readouts
        self.direction, self.scale = direction, scale
        self.micro_batches, self.known = micro_batches, known
        self.seen = frozenset(micro_batches) | (known.seen if known is not None else frozenset())
        self.unseen = [index for index in range(prober.step.num_micro_batches) if index not in self.seen]
        self.dtype = prober.step.compute_dtype
        self.target = _TARGET[self.dtype]
        self.square = prober.space.norm(direction) ** 2 / scale**2
        # as if micro-batches were orthogonal; without norms the unread part may be anything
        carried = sum(increments[index] ** 2 for index in self.unseen) if increments else math.inf
        self.carried_unseen = min(carried / self.square, 1.0) if self.unseen and self.square > 0 else 0.0
        # where micro-batches cancel, something louder than the largest coefficient tells carries R
        self.loudest = max(increments, default=0.0) / self.square**0.5 if increments and self.square > 0 else 0.0
        shrinking = 1.0 if refined is None else refined.shrinking
        self.mean_of = refined if shrinking == 1.0 else None
        earlier = known or refined
        self.fixed_step = None if earlier is None else earlier.step * shrinking
        self.draw = 0 if self.mean_of is None else self.mean_of.num_draws
        self.at: float | None = None  # the step at which the weights are,
        self.moved = 0.0  # and <R, how far they really are from where they were>

    def run(self) -> ShareMap:
        self.sizes = self.prober.ranks.agree(lambda: [_largest(readout.slope) for readout in self.readouts])
        largest, square = self.prober.ranks.max([max(self.sizes, default=0.0)])[0], self.square
        if square <= 0 or largest <= 0 or not math.isfinite(square):
            nothing = [torch.zeros_like(readout.slope) for readout in self.readouts]
            return ShareMap(nothing, nothing, square, 0.0, 0.0, 0.0, False, 0, 0.0)
        step = self.fixed_step or self.target * largest / square / max(self.loudest, 1.0)
        hold_routes(self.prober, self.micro_batches)
        with MovedWeights(self.prober.space, self.dtype, seed=self.draw) as weights:
            return self._measured(weights, step)

    def _measured(self, weights: MovedWeights, step: float) -> ShareMap:
        """A pilot, the micro-batch with this rank's largest coefficient, settles the step for the others."""
        pilot = max(self.micro_batches, key=lambda index: self.sizes[index])
        rest = [index for index in self.micro_batches if index != pilot]
        parts = [[pilot], rest] if self.fixed_step is None and rest else [list(self.micro_batches)]
        seen: list[tuple[Legs, float]] = []
        for number, part in enumerate(parts):
            legs, step, moved = self._legs(weights, step, part, number == 0 and self.fixed_step is None)
            seen.append((legs, moved))
        found = self.prober.ranks.agree(lambda: self._read(seen))
        if self.dtype != torch.float32 and self.prober.scatter is None and self._is_heard(found):
            self._measure_scatter(weights, pilot, seen[0][0])
            found = self.prober.ranks.agree(lambda: self._read(seen))
        return self._combine(found, step)

    def _is_heard(self, found: Found) -> bool:
        """Whether the bound of the noise is notable beside closure."""

        def local() -> list[float]:
            return [sum(float(error.square().sum()) for _, error in found.values())]

        (variance,) = self.prober.ranks.sum(self.prober.ranks.agree(local))
        return math.sqrt(variance) > _HEARD * self.square

    def _measure_scatter(self, weights: MovedWeights, pilot: int, legs: Legs) -> None:
        """Hold the bound of the noise against what the pilot scatters by with no move at all: a forward."""
        still = self._leg(weights, 0.0, [pilot])[0][pilot]
        readout, ranks = self.readouts[pilot], self.prober.ranks
        part = ranks.agree(lambda: readout.scatter(legs[0][pilot], legs[1][pilot], still))
        (self.prober.scatter,) = ranks.max([part])

    def _legs(self, weights: MovedWeights, step: float, part: list[int], is_first: bool) -> tuple[Legs, float, float]:
        """The forwards at +step and -step, the step that was settled on, and half of <R, the weights' true move>."""
        if self.at == -step:  # the weights are still there
            (minus, plus), step, moved = self._legs_from(weights, -step, part, is_first)
            return (plus, minus), -step, -moved
        return self._legs_from(weights, step, part, is_first)

    def _legs_from(
        self, weights: MovedWeights, step: float, part: list[int], is_first: bool
    ) -> tuple[Legs, float, float]:
        """See :meth:`_legs`; the step may be negative."""
        plus, up = self._leg(weights, step, part)
        minus, down = self._leg(weights, -step, part) if self.dtype != torch.float32 else ({}, 0.0)
        factor = self._rescaling((plus, minus), abs(step), is_first)
        if factor != 1.0:
            step *= factor
            plus, up = self._leg(weights, step, part)
            minus = {}
        if not minus:
            minus, down = self._leg(weights, -step, part)
        return (plus, minus), step, (up - down) / 2

    def _leg(
        self, weights: MovedWeights, step: float, micro_batches: Sequence[int]
    ) -> tuple[dict[int, Outputs], float]:
        """The forwards at this step, and <R, the weights' true move>."""
        prober = self.prober
        if step != self.at:
            moved = weights.move(self.direction, step / self.scale)
            self.at, self.moved = step, float(prober.space.reduce(lambda: moved)) / self.scale
        return {index: forward_on_routes(prober, index) for index in micro_batches}, self.moved

    def _rescaling(self, legs: Legs, step: float, is_first: bool) -> float:
        """What to multiply the step with; 1 where another would not make the error much smaller."""

        def local() -> list[float]:
            return [*self._response(legs), self._noise(legs)]

        # the largest over the ranks: the micro-batch of the loudest token is some rank's pilot
        response, noise = self.prober.ranks.max(self.prober.ranks.agree(local))
        noise /= step * self.square
        if not math.isfinite(response):
            return 0.1
        if response == 0:
            return 1.0
        if not is_first:
            return 1.0 if response <= _LATER * self.target else self.target / response
        error = _CURVATURE * response**2 + noise
        least, most = _RESPONSES
        best = min(max((noise * response / (2 * _CURVATURE)) ** (1 / 3), least), most)
        if error <= _FINE[self.dtype] or _CURVATURE * best**2 + noise * response / best > error / 2:
            return 1.0
        return min(max(best / response, 0.1), 10.0)

    def _response(self, legs: Legs) -> list[float]:
        """How far log-odds move: the most of any token with a notable part of the absolute total; where none has one,
        the mean weighted by those parts; inf where one does not stay finite.
        """
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
        """Of the noise's bound, as far as that is known."""
        return 1.0 if self.prober.scatter is None else self.prober.scatter

    def _read(self, seen: list[tuple[Legs, float]]) -> Found:
        """What these legs say; each comes with half of <R, the weights' true move>."""
        found: Found = {}
        for legs, moved in seen:
            per_move = self.square / moved if moved else math.nan
            for index, plus in legs[0].items():
                readout, minus = self.readouts[index], legs[1][index]
                half = (readout.read(plus) - readout.read(minus)) / 2
                found[index] = half * per_move, readout.error(plus, minus, self._part) * abs(per_move)
        return found

    def _combine(self, found: Found, step: float) -> ShareMap:
        def local() -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
            products, errors = [], []
            for index, readout in enumerate(self.readouts):
                product, error = found.get(index) or self._known(index) or (readout.slope * 0, readout.slope * 0)
                if self.mean_of is not None:
                    before, count = self.mean_of, self.mean_of.num_draws
                    product = (count * before.products[index] + product) / (count + 1)
                    error = ((count * before.errors[index]).square() + error.square()).sqrt() / (count + 1)
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
            num_draws=self.draw + 1,
        )

    def _known(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self.known is None else (self.known.products[index], self.known.errors[index])

    def _shrinking(self, closure: float, noise: float) -> float:
        """See :class:`ShareMap`: curvature's error goes with the square of the step, noise with its inverse."""
        off = max(abs(1 - closure) - self.carried_unseen, 0.0)
        if off <= max(_BAND[self.dtype], _CERTAIN * noise):
            return 1.0
        least, most = _SHRINKING
        most = next((part for bent, part in _BENT.items() if off > bent), most)
        return min(max((noise / (2 * off)) ** (1 / 3), least), most)

    def _is_trusted(self, closure: float, noise: float) -> bool:
        most = max(_BAND[self.dtype], _CERTAIN * noise)
        low = max(_PARTIAL_CLOSURE, 1 - most - 2 * self.carried_unseen) if self.unseen else 1 - most
        return noise <= _USABLE and low <= closure <= 1 + most


def _largest(values: torch.Tensor) -> float:
    return float(values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()) if values.numel() else 0.0
