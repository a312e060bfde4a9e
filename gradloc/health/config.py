# SPDX-License-Identifier: Apache-2.0
"""Validate the settings under ``trainer.health`` when the run starts.

Each rule has one setting of its name: a pair (warning, danger) in the rule's own unit. A null in place of one of them
leaves that state out, a null in place of the pair switches the rule off.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

from ..checks import POSITIVE, SWITCH, checked, integer, is_number, require, setting

Limits = tuple[float | None, float | None] | None
"""Warning and danger."""

FALLING = frozenset({"entropy_fall", "length_fall", "mismatch_sample_size"})
"""Rules in which small numbers are bad: danger is below warning."""
_KEY = "trainer.health"


@checked(_KEY)
@dataclass(frozen=True)
class HealthConfig:
    """When the health monitor says ``warning`` and ``danger``."""

    enable: bool = setting(False, SWITCH)
    """Judge every step in the trainer."""
    warmup: int = setting(10, integer(2))
    """Values of a metric that a rule about the run's own history needs before it may warn."""
    window: int = setting(100, integer(8))
    """Values of a metric that such a rule remembers; at least ``warmup``."""
    recent: int = setting(5, integer(1))
    """Steps that rules about lasting changes average over."""
    clip_window: int = setting(20, integer(1))
    """Steps over which ``clip_share`` counts."""
    deviations: float = setting(5.0, POSITIVE)
    """Robust standard deviations (median, MAD of the log) that a jump must exceed in addition to its limit."""
    gradient_jump: Limits = (10.0, 100.0)
    """Gradient norm, as a multiple of its own median."""
    spikes: Limits = (1.0, None)
    """Spikes that GradLoc's trigger saw in the step."""
    head_norm: Limits = (10.0, None)
    """Gradient norm of the output head, as a multiple of its own median; nothing but a warning unless you say so."""
    clip_share: Limits = (0.9, None)
    """Share of the steps whose norm before clipping is over the clip limit."""
    non_finite: Limits = (1.0, 3.0)
    """Steps in a row with a NaN or an infinity in gradient, loss or reward."""
    no_gradient: Limits = (1.0, 3.0)
    """Steps in a row in which both gradient and policy loss are zero."""
    reward_fall: Limits = (0.3, 0.7)
    """How far the reward has fallen, as a share of its best or of its range, whichever is larger."""
    entropy_fall: Limits = (0.25, 0.1)
    """Entropy, as a multiple of what it was at the start."""
    entropy_rise: Limits = (2.0, 4.0)
    """Entropy, as a multiple of what it was at the start."""
    zero_variance: Limits = (0.75, 1.0)
    """Share of the prompts whose rollouts all have the same reward."""
    policy_kl: Limits = (0.1, 1.0)
    """KL between the policy and the one that the step started from, either sign."""
    reference_kl_jump: Limits = (10.0, 100.0)
    """KL to the reference policy, as a multiple of its own median."""
    clip_fraction: Limits = (0.3, 0.6)
    """Share of the tokens that PPO's clip cuts off."""
    mismatch_kl: Limits = (0.1, None)
    """KL between the rollout engine and the policy in the update, either sign."""
    mismatch_rise: Limits = (10.0, None)
    """The k3 estimate of that KL, as a multiple of its level at the start; values below 0.001 do not count."""
    mismatch_chi2: Limits = (1.0, 100.0)
    """Chi-squared divergence per token between the rollout engine and the policy in the update."""
    mismatch_weight: Limits = (2.0, None)
    """Mean importance weight of the rollout correction, or one over it when it is below 1."""
    mismatch_spread: Limits = (1.0, None)
    """Standard deviation of those weights."""
    mismatch_sample_size: Limits = (0.3, None)
    """Effective sample size under those weights, as a share of the batch."""
    mismatch_veto: Limits = (0.1, None)
    """Share of the sequences that the rollout correction vetoes."""
    mismatch_probs: Limits = (0.01, None)
    """Mean difference of the tokens' probabilities between rollout engine and trainer."""
    mismatch_log_probs: Limits = (0.1, 0.5)
    """Mean absolute difference of the tokens' log-probs between rollout engine and trainer, nats."""
    truncation: Limits = (0.25, 0.5)
    """Share of the responses that end at the length limit."""
    length_rise: Limits = (2.0, 4.0)
    """Mean response length, as a multiple of its own recent median."""
    length_fall: Limits = (0.5, 0.25)
    """Mean response length, as a multiple of its own recent median."""
    aborted: Limits = (0.05, None)
    """Share of the responses that are empty."""

    def check(self) -> None:
        """Check settings against each other, and turn the rules' limits into pairs of numbers."""
        at_most = f"at most {_KEY}.window={self.window}, which is all that is remembered"
        require(self.warmup <= self.window, f"{_KEY}.warmup", at_most, self.warmup)
        for name in self.rule_names():
            object.__setattr__(self, name, _limits(name, getattr(self, name)))

    @classmethod
    def rule_names(cls) -> tuple[str, ...]:
        """Return the settings that are rules, in order: their fields have no bound, for :meth:`check` checks them."""
        return tuple(each.name for each in fields(cls) if "allowed" not in each.metadata)


def _limits(name: str, value: Any) -> Limits:
    """Return a rule's limits as numbers; None where the rule is off."""
    if value is None:
        return None
    expected = "null (off) or [warning, danger], each null or a number from 0 on"
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    are_limits = is_pair and all(limit is None or is_number(limit) and 0 <= limit < math.inf for limit in value)
    require(are_limits, f"{_KEY}.{name}", expected, value)
    warning, danger = (None if limit is None else float(limit) for limit in value)
    if warning is None or danger is None:
        return None if warning is danger else (warning, danger)
    is_ordered = danger <= warning if name in FALLING else warning <= danger
    order = "[warning, danger] with danger not above warning" if name in FALLING else "[warning, danger] in order"
    require(is_ordered, f"{_KEY}.{name}", order, value)
    return warning, danger
