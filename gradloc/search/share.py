# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Every token's share of a gradient, from two forwards along it.

With c_t = d loss / d logp_t and e_t = d loss / d H_t, token t's gradient is g_t = c_t grad(logp_t) + e_t grad(H_t).
Along a direction R, <grad(logp_t), R> is the directional derivative of logp_t, so

    <g_t, R> = c_t [logp_t(theta + s R) - logp_t(theta - s R)] / (2 s) + (the same with e_t and H_t)

for all tokens of all ranks at once. The shares <g_t, R> / ||R||^2 of R = sum_t g_t add up to 1: *closure*, which checks
the measurement. A share bounds the token's norm from below: ||g_t|| >= |share_t| ||R|| (Cauchy-Schwarz).

The step s aims at a log-prob change of T where it matters: s = T max|c| / ||R||^2 is exact when one token dominates;
one rescaling covers spread spikes, for each part of the micro-batches by itself. In half precision the response is half
the difference of the two legs, in which rounding offsets common to both (the dither, a read-out more precise than
training's) cancel, averaged over the tokens with their part of the product as weight: of 1e5 tokens some always stray,
and those that carry nothing do not count.
When closure is off, the step shrinks; it never grows past a response that has stopped being linear.

Shapes: B rows of a micro-batch, T response positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..core.gradients import Gradient
from ..core.probe import Prober
from .routes import forward_on_routes, hold_routes
from .weights import MovedWeights

__all__ = ["MAX_TRIES", "Coefficients", "ShareMap", "measure_shares"]

_TARGET = {torch.float32: 0.03, torch.bfloat16: 0.1, torch.float16: 0.1}
_CLOSURE = {torch.float32: (0.95, 1.05), torch.bfloat16: (0.8, 1.25), torch.float16: (0.8, 1.25)}
_PARTIAL_CLOSURE = 0.5  # from here on, some micro-batches alone are worth looking at: they carry most of the gradient
MAX_TRIES = 3
_SHRINK = 0.25  # of the step, per try
# times the target: what a response may be without having the step rescaled; under the first rounding is heard in it
_NEAR = {torch.float32: (0.1, 8.0), torch.bfloat16: (1 / 3, 2.0), torch.float16: (1 / 3, 2.0)}
_NEAR_TOO = 4.0  # at least, once a part of the micro-batches has been measured at that step

Leg = dict[int, tuple[torch.Tensor, torch.Tensor | None]]
"""Per micro-batch: log_prob and entropy (B, T) at moved weights."""


@dataclass
class Coefficients:
    """d step loss / d log_prob and d entropy of one micro-batch on this rank, zero for tokens left out."""

    log_prob: torch.Tensor
    """(B, T)"""
    entropy: torch.Tensor | None
    """(B, T); None when the loss has no entropy term."""


@dataclass
class ShareMap:
    """Every token's inner product with a direction R, and how far the measurement can be trusted."""

    products: list[torch.Tensor]
    """Per micro-batch <g_t, R>, float64 (B, T), this rank's tokens."""
    square: float
    """||R||^2"""
    closure: float
    """Sum of all shares over all ranks; 1 when the measurement is right."""
    is_trusted: bool
    """Whether closure is within the band for this precision."""
    step: float
    seen: frozenset[int] = frozenset()
    """The micro-batches that were looked at; products of the others are 0."""

    def shares(self, micro_batch: int) -> torch.Tensor:
        """Share of R per token, float64 (B, T)."""
        return self.products[micro_batch] / self.square


def measure_shares(
    prober: Prober,
    coefficients: list[Coefficients],
    direction: Gradient,
    scale: float,
    micro_batches: Sequence[int] | None = None,
    tries: Sequence[int] = range(MAX_TRIES),
    known: ShareMap | None = None,
) -> ShareMap:
    """Measure <g_t, R> for every token of every rank.

    Args:
        prober: the step. Weights are moved and restored bit for bit; ``.grad`` is not touched.
        coefficients: per micro-batch; the tokens whose sum R is, others zeroed.
        direction: ``scale`` times R, finite.
        scale: positive factor on ``direction``.
        micro_batches: look at these only; closure is then the part of the direction that they carry.
        tries: which of the step sizes to take until closure is right; 0 is the first, each next one a quarter.
        known: a map of micro-batches along the same direction, to be completed from the step that it took.

    Returns:
        The map with the best closure reached; 2 forwards of each micro-batch, mostly one more to adapt the step, and
        of a model of experts one more to note its routes.
    """
    chosen = range(prober.step.num_micro_batches) if micro_batches is None else micro_batches
    return _Measurement(prober, coefficients, direction, scale, chosen, known).run(tries)


class _Measurement:
    def __init__(
        self,
        prober: Prober,
        coefficients: list[Coefficients],
        direction: Gradient,
        scale: float,
        micro_batches: Sequence[int],
        known: ShareMap | None,
    ):
        self.prober = prober
        self.coefficients = coefficients
        self.micro_batches = micro_batches
        self.known = known
        self.seen = frozenset(micro_batches) | (known.seen if known is not None else frozenset())
        self.is_partial = len(self.seen) < prober.step.num_micro_batches
        self.direction = direction
        self.scale = scale
        self.dtype = prober.step.compute_dtype
        self.target = _TARGET[self.dtype]
        self.square = prober.space.norm(direction) ** 2 / scale**2

    def run(self, tries: Sequence[int]) -> ShareMap:
        def local() -> tuple[list[float], list[torch.Tensor]]:
            return [_largest(c) for c in self.coefficients], [c.log_prob.double() * 0 for c in self.coefficients]

        self.sizes, self.nothing = self.prober.ranks.agree(local)
        (largest,) = self.prober.ranks.max([max(self.sizes, default=0.0)])
        best = ShareMap(self.nothing, self.square, 0.0, False, 0.0)
        if self.square <= 0 or largest <= 0 or not math.isfinite(self.square):
            return best
        hold_routes(self.prober, self.micro_batches)
        step = self.target * largest / self.square * _SHRINK ** tries[0] if self.known is None else self.known.step
        with MovedWeights(self.prober.space, self.dtype) as weights:
            for attempt in tries:
                found = self._measured(weights, step, may_grow=attempt == 0 and self.known is None)
                if abs(math.log(_positive(found.closure))) <= abs(math.log(_positive(best.closure))):
                    best = found
                if found.is_trusted or (self.is_partial and found.closure < 1):
                    break  # what is missing from a part is the rest's share, no error of the step
                step = found.step * _SHRINK
        return best

    def _measured(self, weights: MovedWeights, step: float, may_grow: bool) -> ShareMap:
        """One try: a pilot, the micro-batch with this rank's largest coefficient, settles the step for the others."""
        products: dict[int, torch.Tensor] = {}
        pilot = max(self.micro_batches, key=lambda index: self.sizes[index])
        rest = [index for index in self.micro_batches if index != pilot]
        parts = [[pilot], rest] if self.known is None and rest else [list(self.micro_batches)]
        for number, part in enumerate(parts):
            is_first = number == 0 and self.known is None
            least, most = _NEAR[self.dtype]
            near = (least if may_grow else 0.0, most) if is_first else (0.0, max(most, _NEAR_TOO))
            plus, minus, step = self._legs(weights, step, part, near)
            products.update(self.prober.ranks.agree(partial(self._products, plus, minus, step)))
        return self._combine(products, step)

    def _legs(
        self, weights: MovedWeights, step: float, micro_batches: list[int], near: tuple[float, float]
    ) -> tuple[Leg, Leg, float]:
        """The forwards at +step and -step, rescaled where the response is far from the target; and the step taken."""
        plus, minus = self._trial(weights, step, micro_batches)
        response = self._response(plus, minus)
        if response > 0 and not near[0] <= response / self.target <= near[1]:
            step *= min(max(self.target / response, 0.1), 10.0)
            plus, minus = self._trial(weights, step, micro_batches)
        return plus, minus or self._leg(weights, -step, micro_batches), step

    def _trial(self, weights: MovedWeights, step: float, micro_batches: Sequence[int]) -> tuple[Leg, Leg]:
        """What the response is read from: in float32 the leg at +step alone, which nothing but the move changes."""
        plus = self._leg(weights, step, micro_batches)
        return plus, {} if self.dtype == torch.float32 else self._leg(weights, -step, micro_batches)

    def _leg(self, weights: MovedWeights, step: float, micro_batches: Sequence[int]) -> Leg:
        self.prober.ranks.agree(lambda: weights.move(self.direction, step / self.scale))
        return {index: forward_on_routes(self.prober, index) for index in micro_batches}

    def _response(self, plus: Leg, minus: Leg) -> float:
        """How far the log-probs move that the loss depends on; inf where one does not stay finite.

        In float32 the largest move of all. In half precision, where of 1e5 tokens some always stray, half the
        difference of the legs, averaged by what each token carries of the product. The largest over the ranks: the
        micro-batch of the loudest token is some rank's pilot.
        """

        def local() -> float:
            return self._mean_response(plus, minus) if minus else self._largest_response(plus)

        return self.prober.ranks.max([self.prober.ranks.agree(local)])[0]

    def _largest_response(self, plus: Leg) -> float:
        largest = 0.0
        for index, (log_prob, _) in plus.items():
            matters = self.coefficients[index].log_prob != 0
            change = (log_prob - self.prober.step.recorded(index).log_prob).abs()[matters]
            if change.numel():
                largest = max(largest, float(change.nan_to_num(nan=math.inf).max()))
        return largest

    def _mean_response(self, plus: Leg, minus: Leg) -> float:
        product = square = 0.0
        for index, (log_plus, _) in plus.items():
            coefficient = self.coefficients[index].log_prob
            change = ((log_plus.double() - minus[index][0].double()) / 2).abs()
            carried = torch.where(coefficient != 0, coefficient.abs().double() * change, 0.0)
            product += float(carried.sum())
            square += float(torch.where(coefficient != 0, carried * change, 0.0).sum())
        if not math.isfinite(square):
            return math.inf
        return square / product if product > 0 else 0.0

    def _combine(self, products: dict[int, torch.Tensor], step: float) -> ShareMap:
        def local() -> tuple[list[torch.Tensor], float]:
            before = self.nothing if self.known is None else self.known.products
            found = [products.get(index, product) for index, product in enumerate(before)]
            return found, sum(float(product.sum()) for product in found)

        found, carried = self.prober.ranks.agree(local)
        (total,) = self.prober.ranks.sum([carried])
        closure = total / self.square
        low, high = _CLOSURE[self.dtype]
        low = _PARTIAL_CLOSURE if self.is_partial else low
        return ShareMap(found, self.square, closure, low <= closure <= high, step, self.seen)

    def _products(self, plus: Leg, minus: Leg, step: float) -> dict[int, torch.Tensor]:
        """<g_t, R> of these micro-batches' tokens, float64 (B, T) each."""
        products = {}
        for index, (log_plus, h_plus) in plus.items():
            coefficient, (log_minus, h_minus) = self.coefficients[index], minus[index]
            # where(): padding positions hold garbage that must not turn 0 * inf into NaN
            slope = (log_plus.double() - log_minus.double()) / (2 * step)
            product = torch.where(coefficient.log_prob != 0, coefficient.log_prob.double() * slope, 0.0)
            if coefficient.entropy is not None and h_plus is not None and h_minus is not None:
                slope = (h_plus.double() - h_minus.double()) / (2 * step)
                product += torch.where(coefficient.entropy != 0, coefficient.entropy.double() * slope, 0.0)
            products[index] = product
        return products


def _largest(coefficients: Coefficients) -> float:
    return float(coefficients.log_prob.abs().max()) if coefficients.log_prob.numel() else 0.0


def _positive(value: float) -> float:
    return value if value > 0 and math.isfinite(value) else 1e-300
