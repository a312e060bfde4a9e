# SPDX-License-Identifier: Apache-2.0
"""Judge each step's metrics in the trainer, just before they are logged. A failure here never stops a run."""

import logging
from typing import Any

from .config import HealthConfig
from .judge import STATES, Judge, Judgement
from .rules import ZERO_VARIANCE

logger = logging.getLogger(__name__)


class Monitor:
    """Adds ``health/*`` to a step's metrics, and prints a line when the state changes or a rule reaches danger.

    Args:
        config: the rules' limits and windows.
        grad_clip: the norm that gradients are clipped to; None: they are not.
        compares_rollouts: whether advantages come from comparing a prompt's rollouts.
    """

    def __init__(self, config: HealthConfig, grad_clip: float | None, compares_rollouts: bool = True):
        self._judge = Judge(config, grad_clip)
        self._compares_rollouts = compares_rollouts
        self._state = STATES[0]
        self._announced: set[str] = set()
        self._num_failures = 0

    def observe(self, batch: Any, metrics: dict[str, Any], global_step: int) -> None:
        """Judge one step.

        Args:
            batch: a :class:`~..loop.batch.BatchView` with ``uid`` and ``token_level_scores``.
            metrics: the step's metrics. ``health/state`` (0 healthy, 1 warning, 2 danger), ``health/reasons``,
                ``health/failures`` and ``rollout/zero_variance_share`` are added.
            global_step: the trainer's number of the step.
        """
        try:
            self._observe(batch, metrics, global_step)
        except Exception:
            self._num_failures += 1
            logger.exception("gradloc: judging step %s failed; training goes on", global_step)
        metrics["health/failures"] = self._num_failures

    def state(self) -> dict[str, Any]:
        """Return what the checkpoint keeps, ready for JSON."""
        return {"judge": self._judge.state(), "state": self._state, "told": sorted(self._announced)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` gave."""
        self._judge.load_state(state["judge"])
        self._state, self._announced = str(state["state"]), set(state["told"])

    def _observe(self, batch: Any, metrics: dict[str, Any], global_step: int) -> None:
        if ZERO_VARIANCE not in metrics and self._compares_rollouts:
            metrics.update(_zero_variance(batch))
        hidden = () if self._compares_rollouts else (ZERO_VARIANCE,)  # which a filter or an analysis may have set
        judged = {name: value for name, value in metrics.items() if name not in hidden}
        verdict = self._judge.observe(global_step, judged)
        if verdict is None:
            return
        metrics["health/state"] = STATES.index(verdict.state)
        metrics["health/reasons"] = len(verdict.reasons)
        # a second rule in danger leaves the state as it is, and is worth a line
        dangers = {reason.name for reason in verdict.reasons if reason.state == STATES[-1]}
        if verdict.state != self._state or not dangers <= self._announced:
            print(_line(verdict, self._state, self._announced), flush=True)
        self._announced = self._announced | dangers if dangers else set()
        self._state = verdict.state


def _zero_variance(batch: Any) -> dict[str, float]:
    """Return the share of prompts whose rollouts all have the same reward; empty where no prompt has two rollouts."""
    from ..rollout_filter.groups import group_rows  # needs numpy, which the rules do without

    facts = batch.facts
    groups = group_rows(batch.labels["uid"], facts.rewards.tolist(), facts.num_tokens.tolist())
    return {ZERO_VARIANCE: groups.zero_variance_share} if len(groups) and groups.sizes.max() > 1 else {}


def _line(verdict: Judgement, before: str, announced: set[str]) -> str:
    """Return the console line: the state, the first rule that was not announced yet, and how many more there are."""
    line = f"health: step {verdict.step}: {verdict.state}" + (f" (was {before})" if verdict.state != before else "")
    if not verdict.reasons:
        return f"{line}."
    news = next((reason for reason in verdict.reasons if reason.name not in announced), verdict.reasons[0])
    more = len(verdict.reasons) - 1
    return f"{line}. {news.name}: {news.sentence}" + (f" And {more} more reason{'s' * (more > 1)}." if more else "")
