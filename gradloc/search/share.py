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
one rescaling covers spread spikes. In half precision the response is half the difference of the two legs, in which
rounding offsets common to both (the dither, a read-out more precise than training's) cancel, averaged over the tokens
with their part of the product as weight: of 1e5 tokens some always stray, and those that carry nothing do not count.
When closure is off, the step shrinks; it never grows past a response that has stopped being linear.

Shapes: B rows of a micro-batch, T response positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.gradients import Gradient
from ..core.probe import Prober
from .routes import forward_on_routes, hold_routes
from .weights import MovedWeights

__all__ = ["MAX_TRIES", "Coefficients", "ShareMap", "measure_shares"]

_TARGET = {torch.float32: 0.03, torch.bfloat16: 0.25, torch.float16: 0.25}
_CLOSURE = {torch.float32: (0.95, 1.05), torch.bfloat16: (0.8, 1.25), torch.float16: (0.8, 1.25)}
_PARTIAL_CLOSURE = 0.5  # from here on, some micro-batches alone are worth looking at: they carry most of the gradient
MAX_TRIES = 3
_SHRINK = 0.25  # of the step, per try

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
        known: the map of other micro-batches along the same direction, to be completed at the step that it took.

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
        self.is_partial = known is None and len(micro_batches) < prober.step.num_micro_batches
        self.direction = direction
        self.scale = scale
        self.dtype = prober.step.compute_dtype
        self.target = _TARGET[self.dtype]
        self.square = prober.space.norm(direction) ** 2 / scale**2

    def run(self, tries: Sequence[int]) -> ShareMap:
        def local() -> tuple[list[float], list[torch.Tensor]]:
            return [_largest(c) for c in self.coefficients], [c.log_prob.double() * 0 for c in self.coefficients]

        self.sizes, nothing = self.prober.ranks.agree(local)
        (largest,) = self.prober.ranks.max([max(self.sizes, default=0.0)])
        best = ShareMap(nothing, self.square, 0.0, False, 0.0)
        if self.square <= 0 or largest <= 0 or not math.isfinite(self.square):
            return best
        hold_routes(self.prober, self.micro_batches)
        step = self.target * largest / self.square * _SHRINK ** tries[0] if self.known is None else self.known.step
        with MovedWeights(self.prober.space, self.dtype) as weights:
            for attempt in range(2) if self.is_partial else tries:
                plus, minus, step = self._legs(weights, step, may_grow=attempt == 0 and self.known is None)
                found = self._combine(plus, minus, step)
                if abs(math.log(_positive(found.closure))) <= abs(math.log(_positive(best.closure))):
                    best = found
                if found.is_trusted or (self.is_partial and found.closure < 1):
                    break  # what is missing from a part is the rest's share, no error of the step
                step *= _SHRINK
        return best

    def _legs(self, weights: MovedWeights, step: float, may_grow: bool) -> tuple[Leg, Leg, float]:
        """The forwards at +step and -step, rescaled where the response is far from the target; and the step taken.

        A pilot, the micro-batch with this rank's largest coefficient, tells that at forwards of its own.
        """
        pilot = max(self.micro_batches, key=lambda index: self.sizes[index])
        others = [index for index in self.micro_batches if index != pilot]
        plus, minus = self._trial(weights, step, [pilot])
        rescaled = self._rescaled(step, plus, minus, may_grow)
        if rescaled != step:
            step = rescaled
            plus, minus = self._trial(weights, step, [pilot])
        if others:
            more_plus, more_minus = self._trial(weights, step, others)
            plus, minus = plus | more_plus, minus | more_minus
            rescaled = self._rescaled(step, plus, minus, may_grow=False)
            if rescaled != step:
                step = rescaled
                plus, minus = self._trial(weights, step, self.micro_batches)
        return plus, minus or self._leg(weights, -step, self.micro_batches), step

    def _trial(self, weights: MovedWeights, step: float, micro_batches: Sequence[int]) -> tuple[Leg, Leg]:
        """What the response is read from: in float32 the leg at +step alone, which nothing but the move changes."""
        plus = self._leg(weights, step, micro_batches)
        return plus, {} if self.dtype == torch.float32 else self._leg(weights, -step, micro_batches)

    def _rescaled(self, step: float, plus: Leg, minus: Leg, may_grow: bool) -> float:
        """The step that would bring the response to the target; the same where it is near enough."""
        response = self._response(plus, minus)
        too_small, too_large = response < self.target / 3, response > 2 * self.target
        if response > 0 and ((too_small and may_grow) or too_large):
            step *= min(max(self.target / response, 0.1), 10.0)
        return step

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

    def _combine(self, plus: Leg, minus: Leg, step: float) -> ShareMap:
        def local() -> tuple[list[torch.Tensor], float]:
            products = self._products(plus, minus, step)
            return products, sum(float(product.sum()) for product in products)

        products, carried = self.prober.ranks.agree(local)
        (total,) = self.prober.ranks.sum([carried])
        closure = total / self.square
        low, high = _CLOSURE[self.dtype]
        low = _PARTIAL_CLOSURE if self.is_partial else low
        return ShareMap(products, self.square, closure, low <= closure <= high, step)

    def _products(self, plus: Leg, minus: Leg, step: float) -> list[torch.Tensor]:
        if self.known is None:
            products = [torch.zeros_like(coefficient.log_prob).double() for coefficient in self.coefficients]
        else:
            products = list(self.known.products)
        for index in self.micro_batches:
            coefficient, (log_plus, h_plus), (log_minus, h_minus) = self.coefficients[index], plus[index], minus[index]
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
