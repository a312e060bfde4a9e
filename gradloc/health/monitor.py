# SPDX-License-Identifier: Apache-2.0
"""The health monitor in the trainer: judges each step's metrics just before they are logged, and never stops a run."""

import logging
from typing import Any, Optional

from .config import HealthConfig
from .judge import STATES, Judge, Verdict
from .rules import ZERO_VARIANCE

logger = logging.getLogger(__name__)

_WITHOUT_GROUPS = ("gae", "reinforce_plus_plus", "remax")
"""verl's advantage estimators that do not compare a prompt's rollouts: equal rewards still teach them something."""


def build_monitor(config: Any) -> Optional["Monitor"]:
    """The trainer's health monitor, or None while ``trainer.health.enable`` is off.

    Args:
        config: the trainer's whole config; one without the block, of another trainer, has it off.

    Raises:
        ValueError: one sentence for a setting that is wrong, also while it is off.
    """
    block = config.trainer.get("health")
    if block is None:
        return None
    from omegaconf import OmegaConf

    settings = HealthConfig(**OmegaConf.to_container(block, resolve=True))
    if not settings.enable:
        return None
    estimator = str(getattr(config.algorithm.adv_estimator, "value", config.algorithm.adv_estimator))
    return Monitor(settings, clip_limit(config), estimator not in _WITHOUT_GROUPS)


def clip_limit(config: Any) -> float | None:
    """The norm that the actor's gradient is clipped to; None where each layer has a limit of its own.

    Args:
        config: the trainer's whole config. verl's FSDP workers clip to ``actor.grad_clip``, its Megatron and engine
            workers to ``actor.optim.clip_grad``.
    """
    actor = config.actor_rollout_ref.actor
    gradloc = actor.get("gradloc") or {}
    stabilize = {} if gradloc.get("enable") is False else gradloc.get("stabilize") or {}
    if (stabilize.get("layer_clip") or {}).get("rule") not in (None, False, "off"):
        return None
    trainer = config.trainer  # verl 0.9 has engine workers only, and is told by its V1 trainers
    is_engine = trainer.get("use_legacy_worker_impl", "auto") == "disable" or "use_v1" in trainer
    if actor.get("strategy") in ("fsdp", "fsdp2") and not is_engine:
        limit = actor.get("grad_clip")
    else:
        limit = (actor.get("optim") or {}).get("clip_grad")
    return float(limit) if limit else None


class Monitor:
    """Adds ``health/*`` to a step's metrics and prints a line when the state changes or a rule comes to danger.

    Args:
        config: limits and memory.
        grad_clip: the norm that gradients are clipped to, None without such a limit.
        compares_rollouts: whether advantages come from comparing a prompt's rollouts.
    """

    def __init__(self, config: HealthConfig, grad_clip: float | None, compares_rollouts: bool = True):
        self._judge = Judge(config, grad_clip)
        self._compares_rollouts = compares_rollouts
        self._state = STATES[0]
        self._told: set[str] = set()
        self._num_failures = 0

    def observe(self, batch: Any, metrics: dict[str, Any], global_step: int) -> None:
        """Judge one step.

        Args:
            batch: see :class:`~..loop.batch.BatchView`, with ``uid`` and ``token_level_scores``.
            metrics: the step's, about to be logged; ``health/state`` (0 healthy, 1 warning, 2 danger),
                ``health/reasons``, ``health/failures`` and ``rollout/zero_variance_share`` are added.
            global_step: the trainer's.
        """
        try:
            self._observe(batch, metrics, global_step)
        except Exception:
            self._num_failures += 1
            logger.exception("gradloc: judging step %s failed; training goes on", global_step)
        metrics["health/failures"] = self._num_failures

    def state(self) -> dict[str, Any]:
        """JSON-ready content, for the checkpoint."""
        return {"judge": self._judge.state(), "state": self._state, "told": sorted(self._told)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` gave."""
        self._judge.load_state(state["judge"])
        self._state, self._told = str(state["state"]), set(state["told"])

    def _observe(self, batch: Any, metrics: dict[str, Any], global_step: int) -> None:
        if ZERO_VARIANCE not in metrics and self._compares_rollouts:
            metrics.update(_zero_variance(batch))
        verdict = self._judge.observe(global_step, metrics)
        if verdict is None:
            return
        metrics["health/state"] = STATES.index(verdict.state)
        metrics["health/reasons"] = len(verdict.reasons)
        # a second danger changes no state, and is still news
        dangers = {reason.name for reason in verdict.reasons if reason.state == STATES[-1]}
        if verdict.state != self._state or not dangers <= self._told:
            print(_line(verdict, self._state, self._told), flush=True)
        self._told = self._told | dangers if dangers else set()
        self._state = verdict.state


def _zero_variance(batch: Any) -> dict[str, float]:
    """The share of prompts whose rollouts have equal rewards; nothing where every prompt has one rollout."""
    from ..rollout_filter.groups import groups_of  # needs numpy, which the rules do without

    groups = groups_of(batch.labels["uid"], batch.tensors["token_level_scores"], batch.tensors["response_mask"])
    return {ZERO_VARIANCE: groups.zero_variance_share} if len(groups) and groups.sizes.max() > 1 else {}


def _line(verdict: Verdict, before: str, told: set[str]) -> str:
    line = f"health: step {verdict.step}: {verdict.state}" + (f" (was {before})" if verdict.state != before else "")
    if not verdict.reasons:
        return f"{line}."
    news = next((reason for reason in verdict.reasons if reason.name not in told), verdict.reasons[0])
    more = len(verdict.reasons) - 1
    return f"{line}. {news.name}: {news.sentence}" + (f" And {more} more reason{'s' * (more > 1)}." if more else "")
