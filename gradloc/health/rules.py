# SPDX-License-Identifier: Apache-2.0
"""The rules, of the table ``explain/health.ini``: which metric of verl's each one reads, how it measures it, what it
says, and what people do about it. ``docs/health.md`` names where each rule comes from.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..explain.advice import read_table
from .config import HealthConfig
from .measures import AgainstStart, AgainstWindow, Fall, Jump, Mean, Measure, Share, Streak, Value

_TABLE = read_table("health.ini")


def _metrics_of(rule: str) -> tuple[str, ...]:
    return tuple(_TABLE[rule].get("reads", "").split())


GRAD_NORMS, SCORES = _metrics_of("gradient_jump"), _metrics_of("reward_fall")
ENTROPY, REFERENCE_KL = _metrics_of("entropy_fall"), _metrics_of("reference_kl_jump")
(LENGTH,) = _metrics_of("length_rise")
PG_LOSS, VALUE_LOSS = "actor/pg_loss", "critic/vf_loss"
ZERO_VARIANCE = "rollout/zero_variance_share"
_ENDS = ("critic/score/max", "critic/score/min")
_FINITE = (*GRAD_NORMS, PG_LOSS, VALUE_LOSS, *REFERENCE_KL, *ENTROPY, *SCORES)
READ = (*dict.fromkeys([*_FINITE, ZERO_VARIANCE, *_ENDS, *(name for rule in _TABLE for name in _metrics_of(rule))]),)
"""The metrics that rules read."""

_ZERO = 1e-8
_MISMATCH_FLOOR = 1e-3  # NeMo-RL's guide: an estimate of the KL below this is normal

Read = Callable[[Mapping[str, float]], tuple[str, float] | None]
"""Metrics of a step -> (a metric's name, a value); None where the step does not have it."""


@dataclass(frozen=True)
class Rule:
    """One rule; its setting in :class:`~.config.HealthConfig` has its name."""

    name: str
    reads: tuple[str, ...]
    """Metrics, of which the first that a step has is judged where it is finite."""
    computes: Read | None
    """Makes the value of several metrics, in the place of :attr:`reads`."""
    measured: str
    """How: one of ``MEASURES``."""
    sentence: str
    """With ``{metric}``, ``{found}`` and ``{limit}`` (or both in percent), ``{value}``, ``{typical}``, ``{recent}``,
    ``{a_state}``."""
    do: tuple[str, ...]
    """Names of actions in :mod:`~..explain.advice`, which has their sentences and config lines."""
    is_strict: bool
    """Whether a number at the limit is still within it, as in verl's alert rules."""

    def read(self, metrics: Mapping[str, float]) -> tuple[str, float] | None:
        """Return the metric that it judges in a step, and the value; None where the step does not have it."""
        return _first(metrics, *self.reads) if self.computes is None else self.computes(metrics)


def _first(metrics: Mapping[str, float], *names: str) -> tuple[str, float] | None:
    """Return the first of these metrics that the step has, where it is finite."""
    for name in names:
        if name in metrics:
            return (name, metrics[name]) if math.isfinite(metrics[name]) else None
    return None


def _non_finite(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """1 and the first metric that is not finite; 0 when all are."""
    known = {name: metrics[name] for name in _FINITE if name in metrics}
    if all(map(math.isfinite, known.values())):
        return (next(iter(known)), 0.0) if known else None
    return next(name for name, value in known.items() if not math.isfinite(value)), 1.0


def _no_gradient(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """1 when gradient and policy loss are both zero. The loss alone is near zero in any on-policy GRPO step."""
    norm, loss = _first(metrics, *GRAD_NORMS), _first(metrics, PG_LOSS)
    if norm is None:
        return None
    return norm[0], float(all(abs(found[1]) <= _ZERO for found in (norm, loss) if found is not None))


def _zero_variance(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the share of prompts whose rollouts have equal rewards, or 1 where verl's metrics show one reward."""
    if ZERO_VARIANCE in metrics:
        return _first(metrics, ZERO_VARIANCE)
    highest, lowest = map(metrics.get, _ENDS)
    if highest is None or lowest is None or not math.isfinite(highest) or not math.isfinite(lowest):
        return None
    return "critic/score/{max,min}", float(highest == lowest)


MEASURES: dict[str, Callable[[HealthConfig, float | None], Measure | None]] = {
    "value": lambda config, clip: Value(),
    "size": lambda config, clip: Value(abs),
    "times away from 1": lambda config, clip: Value(lambda weight: max(weight, 1 / weight) if weight > 0 else math.inf),
    "mean": lambda config, clip: Mean(config.recent),
    "streak": lambda config, clip: Streak(),
    "jump": lambda config, clip: Jump(config.warmup, config.window, config.deviations),
    "share over the clip": lambda config, clip: None if clip is None else Share(clip, config.clip_window),
    "fall": lambda config, clip: Fall(config.warmup, config.recent, config.window),
    "against the start": lambda config, clip: AgainstStart(config.warmup, config.recent),
    "against the start, if notable": lambda config, clip: AgainstStart(config.warmup, config.recent, _MISMATCH_FLOOR),
    "against the window": lambda config, clip: AgainstWindow(config.warmup, config.recent, config.window),
}
"""Makes a rule's measure from the settings, its limits and the clip limit; None where the rule cannot be judged."""

_COMPUTES = {"non_finite": _non_finite, "no_gradient": _no_gradient, "zero_variance": _zero_variance}

RULES = tuple(
    Rule(
        name=name,
        reads=_metrics_of(name),
        computes=_COMPUTES.get(name),
        measured=row["measured"],
        sentence=row["says"],
        do=tuple(row["do"].split()),
        is_strict="strict" in row,
    )
    for name, row in _TABLE.items()
)
ADVICE = {rule.name: rule.do for rule in RULES}

FROM_TRL = {
    "grad_norm": "actor/grad_norm",
    "loss": "actor/pg_loss",
    "entropy": "actor/entropy",
    "kl": "actor/kl_loss",
    "clip_ratio/region_mean": "actor/pg_clipfrac",
    "reward": "critic/score/mean",
    "frac_reward_zero_std": "rollout/zero_variance_share",
    "completions/mean_length": "response_length/mean",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "sampling/importance_sampling_ratio/mean": "rollout_corr/rollout_is_mean",
}
"""TRL's metrics, and the names by which the rules read them."""
