# SPDX-License-Identifier: Apache-2.0
"""The driver's side of localization: the policy before an update, events, metrics and state after it.

The driver process knows the step, the whole batch, the tokenizer and its own file system, which on a cluster is not
the workers'. It sends each update's policy and takes the ranks' reports. Whatever fails in here is logged and counted;
training goes on.
"""

import logging
from collections.abc import Sequence
from typing import Any

from ..core.actions import Outcome
from ..core.history import ScaleHistory
from ..record import Run
from ..tell.teller import Teller
from .batch import BatchView, batch_scale
from .metrics import metrics_of
from .policy import PolicyMaker
from .wire import Policy, RankReport
from .writer import EventWriter

logger = logging.getLogger(__name__)


class AbortedBySpike(RuntimeError):
    """The run was configured to stop at a gradient spike, and one came."""


def sequence_ids(uids: Sequence[str]) -> list[str]:
    """``<uid>:<rollout index>`` for every row, while the rollouts of a prompt still stand side by side."""
    seen: dict[str, int] = {}
    names = []
    for uid in uids:
        seen[uid] = seen.get(uid, -1) + 1
        names.append(f"{uid}:{seen[uid]}")
    return names


class Driver:
    """Decides when to look, learns from every norm, and has the events written and told.

    Args:
        settings: the effective ones, see :func:`~..config.resolve`.
        tokenizer: decodes culprits; not used with ``evidence.text=off``.
        run: as its events say it.
        trained: the trained model's whole config as plain data, for the bundle.
        num_epochs: how often an update goes over its mini-batches.
        model: ``actor`` or ``critic``.
    """

    def __init__(
        self,
        settings: Any,
        *,
        tokenizer: Any,
        run: Run,
        trained: dict[str, Any],
        num_epochs: int = 1,
        model: str = "actor",
    ):
        self.model, self.settings = model, settings
        self.num_epochs = num_epochs
        self.action_key = "gradloc.action.mode"
        """By which a user of this trainer has chosen the action."""
        self.policies = PolicyMaker(settings)
        self.writer = EventWriter(settings, run, tokenizer, trained, model)
        keeps_text = settings.evidence.text == "on"
        self.teller = Teller(settings.notify, self.writer.store.root, keeps_text=keeps_text)
        self.scale = ScaleHistory()
        """What is typical of the run's own batches."""
        self._policy: Policy

    def before_update(self, num_tokens: Sequence[int], global_step: int, stage: str = "") -> Policy:
        """The policy of the update that comes next; arguments as of :meth:`PolicyMaker.policy`."""
        self._policy = self.policies.policy(global_step, num_tokens, self.num_epochs, stage, self.scale.typical())
        return self._policy

    def after_update(self, reports: Sequence[RankReport], batch: BatchView) -> dict[str, list[float]]:
        """Learn from the norms that each process reports, write and announce the events of the batch.

        Returns:
            Metrics: ``gradloc/*``, the critic's ``gradloc/critic_*``, and ``<model>/grad_norm_max``.

        Raises:
            AbortedBySpike: when ``action.mode`` is abort and a spike came; the event is on disk.
        """
        policy, first = self._policy, min(reports, key=lambda report: report.process)
        present = batch_scale(batch, [report.coefficient for report in reports])
        typical = self.scale.typical()
        over_run = {name: value / typical[name][0] for name, value in present.items() if name in typical}
        written = [self.writer.write(raw, batch, over_run) for raw in first.events]
        self.policies.learn(first.norms, len(written))
        self.teller.tell(written, policy.global_step)
        self._tell_unwritten([spike for spike in first.outcomes if not spike.is_written])
        if any(spike.taken == "abort" for spike in first.outcomes):
            self.teller.finish()
            verdicts = [event.verdict for event, why in written if not why]
            raise AbortedBySpike(
                f"gradloc stopped the run ({self.action_key}=abort). "
                f"{verdicts[-1] if verdicts else 'No event of it was written.'} "
                f"The step was not taken; the events are in {self.writer.store.root}."
            )
        self.scale.observe(present)
        metrics = metrics_of(policy, reports, first, self.writer.num_failures)
        return {self._metric(name): [value] for name, value in metrics.items()}

    def state(self) -> dict[str, Any]:
        """JSON-ready content, for the checkpoint: what the trigger has learned."""
        return {**self.policies.state(), "scale": self.scale.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` gave."""
        self.policies.load_state(state)
        self.scale.load_state(state.get("scale", {}))

    # ---- inside

    def _metric(self, name: str) -> str:
        """``gradloc/spikes`` and ``grad_norm_max`` as they are called for this model."""
        if "/" not in name:
            return f"{self.model}/{name}"
        return name if self.model == "actor" else name.replace("gradloc/", f"gradloc/{self.model}_")

    def _tell_unwritten(self, spikes: list[Outcome]) -> None:
        if spikes:
            trigger = self.settings.trigger
            logger.warning(
                "gradloc: step %s has %d spikes without an event; the action applied to them, too (%s). gradloc.trigger"
                " limits events: max_events_per_step=%d, max_events=%d (%d so far), cooldown_steps=%d",
                self._policy.global_step,
                len(spikes),
                ", ".join(sorted({spike.taken for spike in spikes})),
                trigger.max_events_per_step,
                trigger.max_events,
                self.policies.num_events,
                trigger.cooldown_steps,
            )
