# SPDX-License-Identifier: Apache-2.0
"""What an event says about its cause beyond the cause's name: what a rule about the next step asks. Pure."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..record import Culprit, Event
from .causes import APART
from .leader import leader
from .meanings import again, group
from .numbers import bounded, number
from .story import beside, cause_of, first_place, it, odd_number
from .text import listed, one_line, spoken

ODD = 3.0
"""Times what is typical, or what its siblings differ by: from there on a number is odd."""


@dataclass(frozen=True)
class Evidence:
    """What an event says, as the rules ask for it."""

    event: Event
    actor: Mapping[str, Any] = field(default_factory=dict)
    """The run's ``actor_rollout_ref.actor``, where its bundle has it."""

    @property
    def label(self) -> str:
        """The cause's."""
        return cause_of(self.event)

    @property
    def first(self) -> Culprit:
        """The largest culprit; an empty one where there is none."""
        return leader(self.event.culprits) or Culprit()

    def numbers(self, name: str) -> float | None:
        """A number of the cause."""
        other = beside(self.event)
        return (other or self.first.cause).numbers.get(name)

    @property
    def rewards(self) -> list[float]:
        """Of its siblings, the other rollouts of the prompt."""
        return [found.reward for found in self.first.siblings or () if found.reward is not None]

    @property
    def is_reward_odd(self) -> bool:
        """Whether the reward is far from its siblings', beside what these differ by."""
        reward, others = self.first.reward, self.rewards
        if reward is None or not others or not math.isfinite(reward):
            return reward is not None and not math.isfinite(reward)
        finite = [other for other in others if math.isfinite(other)] or [0.0]
        apart = max(max(finite) - min(finite), 1.0)
        return abs(reward - statistics.median(finite)) > ODD * apart

    @property
    def is_advantage_odd(self) -> bool:
        """Whether the advantage is what makes the token large."""
        advantage = self.first.advantage
        if advantage is not None and not math.isfinite(advantage):
            return True
        return self.label == "extreme_advantage"

    @property
    def bound(self) -> float | None:
        """The largest advantage that GRPO with the standard deviation can give: (n - 1) / sqrt(n) of n rollouts."""
        n = len(self.first.siblings or ()) + 1
        return (n - 1) / n**0.5 if n > 1 else None

    @property
    def engine_gap(self) -> float | None:
        """How much likelier the engine that wrote the token finds it than the trainer did before the update."""
        return _minus(self.first.rollout_log_prob, self.first.old_log_prob_stored)

    @property
    def drift(self) -> float | None:
        """How far the trainer's log-prob has moved since."""
        return _minus(self.first.log_prob, self.first.old_log_prob_stored)

    @property
    def has_moved(self) -> bool:
        """Whether the trainer's log-prob is another one than before the update."""
        return abs(self.drift or 0.0) > APART

    @property
    def do_engines_differ(self) -> bool:
        """Whether they disagree more than the policy has moved."""
        gap = abs(self.engine_gap or 0.0)
        return gap > APART and gap >= abs(self.drift or 0.0)

    @property
    def is_ratio(self) -> bool:
        """Whether the ratio to the old policy is what makes it large."""
        return self.label in ("token_mismatch", "sequence_mismatch")

    @property
    def is_first_update(self) -> bool:
        """Whether nothing had been updated yet in this step."""
        return self.event.step.mini_batch == 0 and self.event.step.epoch == 0

    def said(self) -> dict[str, str]:
        """The evidence as text, for the rules' sentences."""
        event, first, other = self.event, self.first, beside(self.event)
        found = event.certificate
        names = other.names if other else ()
        rewards = [number(reward, 3) for reward in self.rewards]
        probability = None if first.log_prob is None else math.exp(min(first.log_prob, 0.0))
        return {
            "names": ", ".join(one_line(name, 60) for name in names[:3]) or "the batch's tensors",
            "reward": number(first.reward, 3),
            "rewards": listed(rewards[:6]) + (" and others" if len(rewards) > 6 else ""),
            "advantage": number(first.advantage, 3),
            "odd": odd_number(first) or "far from typical",
            "bound": number(self.bound, 3),
            "n": str(len(first.siblings or ()) + 1),
            "ratio": number(first.ratios.current_over_old, 3),
            "now": number(first.log_prob, 3),
            "old": number(first.old_log_prob_stored, 3),
            "written": number(first.rollout_log_prob, 3),
            "again": again(first),
            "group": group(event),
            "first": first_place(event),
            "neighbour": "next" if (self.numbers("shift") or 0.0) > 0 else "previous",
            "weight": number(first.is_weight, 3),
            "probability": number(probability, 2),
            "kl": number(first.coefficients.kl, 3),
            "entropy": number(self.numbers("entropy_over_log_prob") or self.numbers("entropy_term_over_policy"), 3),
            "scale": number(self.numbers("coefficient_over_typical"), 3),
            "over_run": number(self.numbers("advantage_over_run"), 3),
            "value": number(first.value, 3),
            "target": number(first.value_target, 3),
            "after": bounded(found.norm_after, found.error_bound, 3)[0],
            "threshold": number(found.threshold, 3),
            "more": number(event.search.num_more),
            "reason": found.reason or "the bound on the norm is too wide",
            "status": spoken(event.search.status),
            "it": it(event),
            "loss": str(self.loss_mode),
        }

    @property
    def loss_mode(self) -> str | None:
        """The run's policy loss."""
        loss = self.actor.get("policy_loss")
        return loss.get("loss_mode") if isinstance(loss, Mapping) else None

    def has(self, verdict: str) -> bool:
        """Whether the certificate says so of a finite norm with culprits."""
        norm = self.event.trigger.grad_norm
        is_finite = norm is None or math.isfinite(norm)
        return bool(self.event.culprits) and is_finite and self.event.certificate.verdict == verdict


def _minus(one: float | None, other: float | None) -> float | None:
    if one is None or other is None or not math.isfinite(one - other):
        return None
    return one - other
