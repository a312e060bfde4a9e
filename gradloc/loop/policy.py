# SPDX-License-Identifier: Apache-2.0
"""When to look: the driver's policy of each update, from the norms of those before it. Numbers only."""

from collections.abc import Sequence
from typing import Any

from ..core.trigger import AdaptiveThreshold, fixed_threshold
from .wire import Policy


class PolicyMaker:
    """Learns from every norm what a spike is, and keeps count of the events that may still be written."""

    def __init__(self, settings: Any):
        self.settings, self.trigger = settings, settings.trigger
        self.num_events = 0
        """Of the whole run."""
        self._histories: dict[str, AdaptiveThreshold] = {}
        self._stage = ""
        self._quiet_until = 0
        self._step = self._num_in_step = self._num_updates = 0

    @property
    def adaptive(self) -> AdaptiveThreshold:
        """What the present update is judged by. Lopti's two stages have norms of different size: one history each."""
        return self._history_of(self._stage)

    def policy(
        self,
        global_step: int,
        num_tokens: Sequence[int],
        num_epochs: int,
        stage: str = "",
        typical: dict[str, tuple[float, float]] | None = None,
    ) -> Policy:
        """The policy of the update that comes next.

        Args:
            global_step: the trainer's.
            num_tokens: response tokens over all ranks, of each mini-batch.
            num_epochs: how often the update goes over them.
            stage: which of Lopti's two updates this is; "" for the only one.
            typical: what is typical of the run's own batches.
        """
        self._stage = stage
        self._num_updates += 1
        tau, adaptive = self.trigger.tau, self.adaptive
        of_step = [*num_tokens] * num_epochs  # of each optimizer step
        thresholds: Sequence[float | None]
        if tau is not None:
            taus, history, thresholds = [tau] * len(of_step), [], [fixed_threshold(tau, num) for num in of_step]
        else:
            thresholds = [adaptive.threshold(index) for index in range(len(of_step))]
            history = [adaptive.summary(index) for index in range(len(of_step))]
            pairs = zip(thresholds, of_step, strict=True)  # taus: per token, under the fixed rule's noise model
            taus = [None if threshold is None else threshold * max(num, 1) ** 0.5 for threshold, num in pairs]
        if global_step != self._step:  # an update in stages calls this once for each
            self._step, self._num_in_step = global_step, 0
        allowed = min(self.trigger.max_events_per_step - self._num_in_step, self.trigger.max_events - self.num_events)
        is_quiet = global_step < self._quiet_until and self._num_in_step == 0
        return Policy(
            global_step=global_step,
            kind="adaptive" if tau is None else "fixed",
            num_tokens=num_tokens,
            thresholds=thresholds,
            tau=taus,
            max_events=0 if is_quiet else max(allowed, 0),
            typical=typical,
            force=self.trigger.force_step == global_step,
            stage=stage or None,
            history=history,
            update=self._num_updates,
            settings=self.settings,
        )

    def learn(self, norms: Sequence[float], num_events: int) -> None:
        """After the update: its norms before clipping, one for each optimizer step, and how many events it had."""
        self.adaptive.observe(list(norms))
        self._num_in_step += num_events
        self.num_events += num_events
        if num_events:
            self._quiet_until = self._step + 1 + self.trigger.cooldown_steps

    def state(self) -> dict[str, Any]:
        """JSON-ready content, for the checkpoint."""
        histories = {stage: adaptive.state() for stage, adaptive in self._histories.items()}
        return {"histories": histories, "num_events": self.num_events}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` gave."""
        for stage, history in state["histories"].items():
            self._history_of(stage).load_state(history)
        self.num_events = int(state["num_events"])

    def _history_of(self, stage: str) -> AdaptiveThreshold:
        trigger = self.trigger
        fresh = AdaptiveThreshold(trigger.window, trigger.warmup, trigger.floor, trigger.cap)
        return self._histories.setdefault(stage, fresh)
