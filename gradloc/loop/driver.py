# SPDX-License-Identifier: Apache-2.0
"""The driver's side of localization: the policy before an update, events, metrics and state after it.

The driver process knows the step, the whole batch, the tokenizer and its own file system, which on a cluster is not
the workers'. It sends each update's policy and takes the ranks' reports. Whatever fails in here is logged and counted;
training goes on.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..mismatch.steps import StepJudge
from ..notify.notifier import Notifier
from ..record import Run
from ..record.store import load_states, save_states
from ..trigger import AdaptiveThreshold, fixed_threshold
from ..trigger.history import ScaleHistory
from .actions import Outcome
from .batch import BatchView, batch_scale
from .messages import Policy, RankReport
from .metrics import metrics_of
from .writer import EventWriter

logger = logging.getLogger(__name__)


class AbortedBySpike(RuntimeError):
    """The run was configured to stop at a gradient spike, and one came."""


def sequence_ids(uids: Sequence[str]) -> list[str]:
    """Return ``<uid>:<rollout index>`` for every row, while the rollouts of a prompt are still side by side."""
    seen: dict[str, int] = {}
    names = []
    for uid in uids:
        seen[uid] = seen.get(uid, -1) + 1
        names.append(f"{uid}:{seen[uid]}")
    return names


class Driver:
    """Decides when to look, learns from every norm, and has the events written and announced.

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
        """The setting by which a user of this trainer chooses the action."""
        self.trigger = settings.trigger
        self.writer = EventWriter(settings, run, tokenizer, trained, model)
        keeps_text = settings.evidence.text == "on"
        self.notifier = Notifier(settings.notify, self.writer.store.root, keeps_text=keeps_text)
        self.mismatch = StepJudge(settings.mismatch.every if model == "actor" else 0, self.writer.store.root)
        self.scale = ScaleHistory()
        """Statistics of the run's own batches."""
        self.num_events = 0
        """Events of the whole run."""
        self._histories: dict[str, AdaptiveThreshold] = {}
        self._stage = ""
        self._quiet_until = self._num_failures = 0
        self._step = self._num_in_step = self._num_updates = 0
        self._policy: Policy

    def print_start(self, whose: str = "") -> None:
        """Print that spikes are looked for, in ``whose`` gradient where there are several, and the events' folder."""
        root = str(self.settings.root).encode("utf-8", "replace").decode("utf-8")
        where = f"{root}{self.writer.store.about()}"
        print(f"gradloc: on{whose} ({self.settings.action.mode}); events go to {where}", flush=True)

    @property
    def adaptive(self) -> AdaptiveThreshold:
        """The threshold of the present update. Lopti's two stages have norms of different size: one history each."""
        return self._history_of(self._stage)

    def before_update(self, num_tokens: Sequence[int], global_step: int, stage: str = "") -> Policy:
        """Make the policy of the update that comes next.

        Args:
            num_tokens: response tokens over all ranks, of each mini-batch.
            global_step: the trainer's.
            stage: which of Lopti's two updates this is; "" for the only one.
        """
        self._stage = stage
        self._num_updates += 1
        tau, adaptive = self.trigger.tau, self.adaptive
        by_step = [*num_tokens] * self.num_epochs  # of each optimizer step
        thresholds: Sequence[float | None]
        if tau is not None:
            taus, history, thresholds = [tau] * len(by_step), [], [fixed_threshold(tau, num) for num in by_step]
        else:
            thresholds = [adaptive.threshold(index) for index in range(len(by_step))]
            history = [adaptive.summary(index) for index in range(len(by_step))]
            pairs = zip(thresholds, by_step, strict=True)  # taus: per token, under the fixed rule's noise model
            taus = [None if threshold is None else threshold * max(num, 1) ** 0.5 for threshold, num in pairs]
        if global_step != self._step:  # an update in stages calls this once for each
            self._step, self._num_in_step = global_step, 0
        allowed = min(self.trigger.max_events_per_step - self._num_in_step, self.trigger.max_events - self.num_events)
        is_quiet = global_step < self._quiet_until and self._num_in_step == 0
        self._policy = Policy(
            global_step=global_step,
            kind="adaptive" if tau is None else "fixed",
            num_tokens=num_tokens,
            thresholds=thresholds,
            tau=taus,
            max_events=0 if is_quiet else max(allowed, 0),
            typical=self.scale.typical(),
            force=self.trigger.force_step == global_step,
            stage=stage or None,
            history=history,
            update=self._num_updates,
            settings=self.settings,
        )
        return self._policy

    def after_update(self, reports: Sequence[RankReport], batch: BatchView) -> dict[str, list[float]]:
        """Learn from the norms that each process reports, write and announce the events of the batch.

        Returns:
            Metrics: ``gradloc/*``, the critic's ``gradloc/critic_*``, and ``<model>/grad_norm_max``.

        Raises:
            AbortedBySpike: when ``action.mode`` is abort and a spike came; the event is on disk.
        """
        policy, first = self._policy, min(reports, key=lambda report: report.process)
        present, typical = self._scale_of(batch, reports), self.scale.typical()
        over_run = {name: value / typical[name][0] for name, value in present.items() if name in typical}
        written = [self.writer.write(raw, batch, over_run) for raw in first.events]
        self.learn(first.norms, len(written))
        self.notifier.announce(written, policy.global_step)
        self._tell_unwritten([spike for spike in first.outcomes if not spike.is_written])
        if any(spike.taken == "abort" for spike in first.outcomes):
            self.notifier.finish()
            verdicts = [event.verdict for event, why in written if not why]
            raise AbortedBySpike(
                f"gradloc stopped the run ({self.action_key}=abort). "
                f"{verdicts[-1] if verdicts else 'No event of it was written, and the step was not taken.'} "
                f"The events are in {self.writer.store.root}."
            )
        self.scale.observe(present)
        metrics = metrics_of(policy, reports, first, self.writer.num_failures + self._num_failures)
        metrics |= self.mismatch(batch.tensors, batch.labels, policy.global_step)
        return {self._metric(name): [value] for name, value in metrics.items()}

    def learn(self, norms: Sequence[float], num_events: int) -> None:
        """Learn from an update's norms before clipping, one for each optimizer step, and from its number of events."""
        self.adaptive.observe(list(norms))
        self._num_in_step += num_events
        self.num_events += num_events
        if num_events:
            self._quiet_until = self._step + 1 + self.trigger.cooldown_steps

    def state(self) -> dict[str, Any]:
        """Return what the trigger has learned, for the checkpoint, ready for JSON."""
        histories = {stage: adaptive.state() for stage, adaptive in self._histories.items()}
        known = {"num_events": self.num_events, "quiet_until": self._quiet_until}
        return {"histories": histories, "scale": self.scale.state(), **known}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` gave."""
        for stage, history in state["histories"].items():
            self._history_of(stage).load_state(history)
        self.num_events, self._quiet_until = int(state["num_events"]), int(state.get("quiet_until", 0))
        self.scale.load_state(state.get("scale", {}))

    # ---- inside

    def _scale_of(self, batch: BatchView, reports: Sequence[RankReport]) -> dict[str, float]:
        """Return this batch's statistics; none where it cannot be read, such as a trainer's column of another shape."""
        try:
            return batch_scale(batch, [report.coefficient for report in reports])
        except Exception:
            self._num_failures += 1
            if self._num_failures == 1:
                logger.exception("gradloc: the batch's scale is not known; training goes on, and so does the search")
            return {}

    def _history_of(self, stage: str) -> AdaptiveThreshold:
        trigger = self.trigger
        fresh = AdaptiveThreshold(trigger.window, trigger.warmup, trigger.floor, trigger.cap)
        return self._histories.setdefault(stage, fresh)

    def _metric(self, name: str) -> str:
        """Return the names of ``gradloc/spikes`` and ``grad_norm_max`` for this model."""
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
                self.num_events,
                trigger.cooldown_steps,
            )


class Stateful:
    """Mixin that saves what a trainer's parts have learned next to its checkpoints."""

    parts: Mapping[str, Any]
    """The parts, by their name in the state file; None for one that is off."""

    def save(self, folder: str) -> bool:
        """Save the parts' states in a checkpoint's folder; return whether any was written."""
        self._remember(folder)
        return save_states(self.parts, folder)

    def load(self, folder: str) -> None:
        """Load the states of the checkpoint that the run resumes from; a part that it does not hold starts anew."""
        self._remember(folder)
        load_states(self.parts, folder)

    def _remember(self, folder: str) -> None:
        for part in self.parts.values():
            if isinstance(part, Driver):
                part.writer.last_checkpoint = os.path.abspath(folder)
