# SPDX-License-Identifier: Apache-2.0
"""Generate series of gradient norms: kinds of healthy run, and collapses.

A series is an array (trainer steps, mini-batches of a step) of healthy norms around 1. Noise is lognormal with
``SIGMA`` unless said otherwise. A kind with steps without advantages marks the steps that have some: spikes are
planted on those only, since ten times almost nothing is no spike.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

STEPS = 400
SIGMA = 0.2
NUM_HEALTHY = 150  # healthy steps before a collapse
NUM_AFTER = 64  # and after it
GROWING = 40  # steps that a collapse grows for


@dataclass(frozen=True)
class Series:
    """Healthy norms, and the steps on which a spike can be planted."""

    norms: np.ndarray
    """(steps, mini-batches), positive."""
    is_spikable: np.ndarray
    """(steps,)"""


Maker = Callable[[np.random.Generator], Series]
"""A function that generates one kind of series."""
_STEP = np.arange(STEPS)[:, None]


def _noise(rng: np.random.Generator, sigma: float = SIGMA, size: int = 1) -> np.ndarray:
    return np.exp(sigma * rng.standard_normal((STEPS, size)))


def _plain(factors: Callable[[np.random.Generator], np.ndarray]) -> Maker:
    return lambda rng: Series(factors(rng), np.ones(STEPS, dtype=bool))


def _shaped(shape: np.ndarray) -> Maker:
    """Return a maker of noise around norms (steps or 1, mini-batches)."""
    return _plain(lambda rng: _noise(rng, size=shape.shape[1]) * shape)


def _autoregressive(rng: np.random.Generator, innovation: float, memory: float = 0.95) -> np.ndarray:
    shocks = innovation * rng.standard_normal(STEPS)
    level = np.empty(STEPS)
    level[0] = shocks[0] / math.sqrt(1 - memory**2)
    for step in range(1, STEPS):
        level[step] = memory * level[step - 1] + shocks[step]
    return np.exp(level)[:, None]


def _student(rng: np.random.Generator, scale: float) -> np.ndarray:
    return np.exp(scale * rng.standard_t(3, (STEPS, 1)))


def _hard(rng: np.random.Generator, factor: float) -> np.ndarray:
    return _noise(rng) * np.where(rng.random((STEPS, 1)) < 0.1, factor, 1.0)


def _two_kinds(share: float, factor: float) -> Maker:
    def make(rng: np.random.Generator) -> Series:
        is_low = rng.random(STEPS) < share
        return Series(_noise(rng) * np.where(is_low, factor, 1.0)[:, None], ~is_low)

    return make


HEALTHY: dict[str, Maker] = {
    **{f"lognormal {sigma}": _plain(partial(_noise, sigma=sigma)) for sigma in (0.1, 0.2, 0.3)},
    **{f"AR(0.95), innovations {size}": _plain(partial(_autoregressive, innovation=size)) for size in (0.05, 0.1, 0.2)},
    **{f"Student t3 x {scale}": _plain(partial(_student, scale=scale)) for scale in (0.1, 0.2, 0.3)},
    "decay of 1 % a step": _shaped(0.99**_STEP),
    "growth of 1 % a step": _shaped(1.01**_STEP),
    **{f"level x {factor} half-way": _shaped(np.where(_STEP < STEPS // 2, 1.0, factor)) for factor in (2, 0.1)},
    **{f"{size} mini-batches, ramp 1 to 3": _shaped(np.linspace([1.0], [3.0], size).T) for size in (2, 4, 8, 16)},
    **{f"second of 2 mini-batches x {factor}": _shaped(np.array([[1.0, factor]])) for factor in (2, 4)},
    **{f"last of 4 mini-batches x {factor}": _shaped(np.array([[1.0, 1.0, 1.0, factor]])) for factor in (2, 4)},
    **{f"10 % hard batches x {factor}": _plain(partial(_hard, factor=factor)) for factor in (3, 4)},
    "60% of steps x 0.01": _two_kinds(0.6, 0.01),
    "60% of steps x 0.1": _two_kinds(0.6, 0.1),
    "80% of steps x 0.01": _two_kinds(0.8, 0.01),
}
"""Kind -> its maker."""


def collapse(rng: np.random.Generator, growth: float, size: int) -> np.ndarray:
    """Generate a healthy level, growth by a factor per step, and the healthy level again.

    Returns:
        Norms (NUM_HEALTHY + GROWING + NUM_AFTER, size).
    """
    level = np.concatenate([np.ones(NUM_HEALTHY), growth ** np.arange(1.0, GROWING + 1), np.ones(NUM_AFTER)])
    return level[:, None] * np.exp(SIGMA * rng.standard_normal((len(level), size)))


def plant(series: Series, rng: np.random.Generator, rate: float, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Multiply single norms by 3, 10 and 100.

    Args:
        series: the healthy series, which is not changed.
        rng: draws the places.
        rate: share of the steps with a spike, each at one mini-batch.
        first: no spike before this step.

    Returns:
        The norms, and the factor of each (1 without a plant), both (steps, mini-batches).
    """
    num_steps, size = series.norms.shape
    factors = np.ones((num_steps, size))
    chosen = np.flatnonzero((rng.random(num_steps) < rate) & series.is_spikable & (np.arange(num_steps) >= first))
    sizes = np.resize([10.0, 3.0, 100.0], len(chosen))
    factors[chosen, rng.integers(size, size=len(chosen))] = rng.permutation(sizes)
    return series.norms * factors, factors
