# SPDX-License-Identifier: Apache-2.0
"""Run series through a rule and count what it got right."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.trigger import series
from benchmarks.trigger.rules import Rule
from benchmarks.trigger.series import Kind

FIRST = 64  # steps before the first planted spike, as many as the slowest rule's warm-up
RATE = 0.02  # of steps that get a spike
SIZES = (3, 10, 100)
CAP = 10.0  # what counts as a spike on a real series, and as a collapse, in multiples of the level
BACK = 1.5  # a threshold is back when it is within this factor of what it was


def thresholds(rule: Rule, norms: np.ndarray) -> np.ndarray:
    """The threshold that stood before each norm; NaN where there was none. Both (steps, mini-batches)."""
    found = np.full(norms.shape, np.nan)
    for step, row in enumerate(norms.tolist()):
        for position, norm in enumerate(row):
            threshold = rule.threshold(position)
            if threshold is not None:
                found[step, position] = threshold
            rule.observe(norm)
        rule.end_step()
    return found


def score_kind(kind: Kind, number: int, make: Callable[[], Rule], seeds: Sequence[int]) -> dict[str, Any]:
    """False flags on the healthy series, misses on the same with spikes planted; medians and means over seeds.

    A false flag is a flagged mini-batch; they are counted per 1,000 trainer steps.
    """
    flags, misses = [], {size: [] for size in SIZES}
    for seed in seeds:
        healthy = kind.make(np.random.default_rng([number, seed]))
        is_flagged = healthy.norms > thresholds(make(), healthy.norms)
        flags.append(1000 * is_flagged.sum() / len(is_flagged))
        planted, factors = series.plant(healthy, np.random.default_rng([number, seed, 1]), RATE, FIRST)
        is_flagged = planted > thresholds(make(), planted)
        for size in SIZES:
            is_size = factors == size
            if is_size.any():
                misses[size].append(100 * (~is_flagged[is_size]).mean())
    return {"false_flags": _summary(flags), **{f"missed_x{size}": _summary(values) for size, values in misses.items()}}


def score_collapse(growth: float, size: int, number: int, make: Callable[[], Rule], seeds: Sequence[int]) -> dict:
    """How a rule lives through a collapse.

    ``unseen`` is the percentage of the collapse's norms over CAP times the healthy level that it does not flag,
    ``blind`` of those without any threshold, ``back`` the steps after which every position's threshold is what it was
    before (its median of 64 steps, within BACK); NUM_AFTER + 1 when it never is.
    """
    first, last = series.NUM_HEALTHY, series.NUM_HEALTHY + series.GROWING
    unseen, blind, back = [], [], []
    for seed in seeds:
        norms = series.collapse(np.random.default_rng([1000 + number, seed]), growth, size)
        found = thresholds(make(), norms)
        during, limit = norms[first:last], found[first:last]
        is_high = during > CAP
        unseen.append(100 * (~(during > limit))[is_high].mean())
        blind.append(100 * np.isnan(limit)[is_high].mean())
        usual = np.nanmedian(found[first - 64 : first], axis=0)
        is_back = (np.abs(np.log(found[last + 1 :] / usual)) < np.log(BACK)).all(axis=1)
        back.append(1 + int(is_back.argmax()) if is_back.any() else series.NUM_AFTER + 1)
    return {"unseen": _summary(unseen), "blind": _summary(blind), "back": _summary(back)}


def score_real(norms: Sequence[float], make: Callable[[], Rule]) -> dict[str, int]:
    """Of one real series: norms over CAP times the median of the 64 before them, how many of those were not flagged,
    all other steps, how many of those were."""
    found = thresholds(make(), np.array(norms)[:, None])[:, 0]
    counted = {"over": 0, "missed": 0, "others": 0, "flagged": 0}
    for step, (norm, threshold) in enumerate(zip(norms, found, strict=True)):
        is_flagged = bool(norm > threshold)
        if step >= 16 and norm > CAP * median(norms[max(0, step - 64) : step]):
            counted["over"] += 1
            counted["missed"] += not is_flagged
        else:
            counted["others"] += 1
            counted["flagged"] += is_flagged
    return counted


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": float(np.median(values)), "mean": float(np.mean(values)), "worst": float(np.max(values))}
