# SPDX-License-Identifier: Apache-2.0
"""The driver's side of localization: the trigger's policy before an update, the writing of events after it.

The driver process knows the step, the whole batch, the tokenizer and its own file system, which on a cluster is not
the workers'. It sends each step's policy with the batch and writes what comes back. Whatever fails in here is logged
and counted; training goes on.
"""

import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.actions import Outcome
from ..core.adaptive import AdaptiveThreshold
from ..core.scale import ScaleHistory
from ..core.trigger import StepPolicy, fixed_threshold, spike_kind
from ..record import BundleMeta, Event, Run
from ..record.origin import now, origin
from ..record.store import EventStore
from ..tell.background import said_of
from ..tell.teller import Teller
from .batch import BatchView
from .build import of_critic
from .complete import batch_scale, bundle_tensors, complete_event, complete_sequences
from .gather import RawEvent
from .metrics import size
from .pictures import Album

__all__ = ["AbortedBySpike", "Driver", "build_driver", "sequence_ids"]

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

_TAKEN = ("mask", "skip", "abort")


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


def build_driver(config: Any, settings: Any, tokenizer: Any, model: str = "actor") -> "Driver":
    """The driver of a run.

    Args:
        config: the trainer's whole config, of any verl.
        settings: those that hold.
        tokenizer: the actor's.
        model: whose updates it is about: ``actor`` or ``critic``.
    """
    from omegaconf import OmegaConf

    trained, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if model == "critic":
        trained, settings = config.critic, of_critic(settings)
    plain: Any = OmegaConf.to_container(trained, resolve=True)
    whole: Any = OmegaConf.to_container(config)
    return Driver(
        settings,
        sequences_per_mini_batch=trained.ppo_mini_batch_size * rollout.n,
        tokenizer=tokenizer,
        run=origin(
            config.trainer.project_name,
            config.trainer.experiment_name,
            settings=whole,
            model=(config.critic if model == "critic" else config.actor_rollout_ref).model.path,
        ),
        actor=plain,
        model=model,
    )


class Driver:
    """Decides when to look, learns from every norm, and writes the events.

    Args:
        settings: those that hold, see :func:`~..config.resolve`.
        sequences_per_mini_batch: rollouts, over all ranks.
        tokenizer: decodes culprits; not used with ``evidence.text=off``.
        run: which run this is.
        actor: the trained model's whole config as plain data, for the bundle.
        model: ``actor`` or ``critic``.
    """

    def __init__(
        self,
        settings: Any,
        *,
        sequences_per_mini_batch: int,
        tokenizer: Any,
        run: Run,
        actor: dict[str, Any],
        model: str = "actor",
    ):
        self.model = model
        self.settings, self.tau = settings, settings.trigger.tau
        self.tokenizer = tokenizer if settings.evidence.text == "on" else None
        self.run, self.actor_config = run, actor
        self.sequences_per_mini_batch = sequences_per_mini_batch
        self.store = EventStore(settings.root)
        self.teller = Teller(settings.notify, self.store.root, keeps_text=self.tokenizer is not None)
        self._adaptive: dict[str, AdaptiveThreshold] = {}
        self._stage = ""
        self._num_events = 0
        self._num_failures = 0
        self._quiet_until = 0
        self._step = self._num_in_step = 0
        self._policy: StepPolicy | None = None
        self.scale = ScaleHistory()
        """What is typical of the run's own batches."""
        self._present: dict[str, float] = {}
        self.last_checkpoint: str | None = None
        """The newest that the trainer has written or resumed from."""

    @property
    def adaptive(self) -> AdaptiveThreshold:
        """What the present update is judged by. Lopti's two stages have norms of different size: one history each."""
        return self._adaptive_of(self._stage)

    def before_update(self, response_mask: torch.Tensor, global_step: int, dp_size: int, stage: str = "") -> StepPolicy:
        """The policy of the update that comes next.

        Args:
            response_mask: (R, T), in the order in which the rows are dealt out to the ranks.
            global_step: the trainer's.
            dp_size: data-parallel ranks.
            stage: which of Lopti's two updates this is; "" for the only one.
        """
        self._stage = stage
        num_tokens = self._tokens_per_mini_batch(response_mask, dp_size)
        of_step = num_tokens * self.actor_config.get("ppo_epochs", 1)  # of each optimizer step
        thresholds = [self._threshold(position, n) for position, n in enumerate(of_step)]
        trigger = self.settings.trigger
        if global_step != self._step:  # an update in stages calls this once for each
            self._step, self._num_in_step = global_step, 0
        allowed = min(trigger.max_events_per_step - self._num_in_step, trigger.max_events - self._num_events)
        is_quiet = global_step < self._quiet_until and self._num_in_step == 0
        self._policy = StepPolicy(
            global_step=global_step,
            kind="adaptive" if self.tau is None else "fixed",
            num_tokens=num_tokens,
            thresholds=thresholds,
            tau=[self._tau(threshold, n) for threshold, n in zip(thresholds, of_step, strict=True)],
            max_events=0 if is_quiet else max(allowed, 0),
            typical=self.scale.typical(),
            force=trigger.force_step == global_step,
            stage=stage or None,
            history=[] if self.tau is not None else [self.adaptive.summary(i) for i in range(len(of_step))],
        )
        return self._policy

    def after_update(
        self,
        norms: list[float],
        raw_events: list[RawEvent],
        batch: BatchView,
        outcomes: Sequence[Outcome] = (),
        coefficients: Sequence[float] = (),
        head_squares: Iterable[Iterable[float]] = (),
    ) -> dict[str, list[float]]:
        """Learn from the norms, write and announce the events.

        Args:
            norms: of the update's optimizer steps, epochs x mini-batches, in order.
            raw_events: what the ranks gathered.
            batch: the whole batch.
            outcomes: all spikes, also those that no event is written of.
            coefficients: median |d loss / d log_prob| of each rank's first mini-batch.
            head_squares: of each optimizer step the ranks' parts of the squared gradient norm of the output head; empty
                where not all of them are known.

        Returns:
            ``gradloc/*`` metrics, the critic's ``gradloc/critic_*``.

        Raises:
            AbortedBySpike: when ``action.mode`` is abort and a spike came; the event is on disk.
        """
        policy = self._policy
        assert policy is not None  # before_update came first
        measured = list(norms)
        for spike in outcomes:  # a masked or skipped step reports the norm that it took
            measured[spike.number] = spike.grad_norm
        self._present = batch_scale(batch, coefficients)
        self.adaptive.observe(measured)
        events = [self._write(raw, batch) for raw in raw_events]
        self.teller.tell([event for event, _ in events], policy.global_step, [why for _, why in events])
        self._num_in_step += len(raw_events)
        if raw_events:
            self._quiet_until = policy.global_step + 1 + self.settings.trigger.cooldown_steps
        self._tell_unwritten(policy, [spike for spike in outcomes if not spike.is_written])
        if any(spike.taken == "abort" for spike in outcomes):
            self.teller.finish()
            written = [event for event, why in events if not why]
            said = written[-1].verdict if written else "No event of it was written."
            raise AbortedBySpike(
                f"gradloc stopped the run (actor_rollout_ref.actor.gradloc.{self._action_key}=abort). {said} "
                f"The step was not taken; the events are in {self.store.root}."
            )
        self.scale.observe(self._present)
        head_norms = [math.fsum(of_step) ** 0.5 for of_step in head_squares]
        found = {
            **({"gradloc/head_grad_norm": [max(head_norms, key=size)]} if head_norms else {}),
            **self._trigger_metrics(policy, measured),
            **self._action_metrics(outcomes),
            **self._event_metrics([raw.event for raw in raw_events]),
        }
        return {self.metric(name): values for name, values in found.items()}

    def metric(self, name: str) -> str:
        """A metric's name: ``gradloc/spikes`` is the actor's, ``gradloc/critic_spikes`` the critic's."""
        return name if self.model == "actor" else name.replace("gradloc/", f"gradloc/{self.model}_")

    def state(self) -> dict[str, Any]:
        """JSON-ready content, for the checkpoint: what the trigger has learned."""
        histories = {stage: adaptive.state() for stage, adaptive in self._adaptive.items()}
        return {"histories": histories, "num_events": self._num_events, "scale": self.scale.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` gave."""
        for stage, history in state["histories"].items():
            self._adaptive_of(stage).load_state(history)
        self._num_events = int(state["num_events"])
        self.scale.load_state(state.get("scale", {}))

    # ---- inside

    @property
    def _action_key(self) -> str:
        return "action.mode" if self.model == "actor" else self.model

    def _adaptive_of(self, stage: str) -> AdaptiveThreshold:
        trigger = self.settings.trigger
        fresh = AdaptiveThreshold(trigger.window, trigger.warmup, trigger.floor, trigger.cap)
        return self._adaptive.setdefault(stage, fresh)

    def _tokens_per_mini_batch(self, response_mask: torch.Tensor, dp_size: int) -> list[int]:
        """Response tokens of each mini-batch over all ranks: rows are dealt out to ranks in equal runs, and each rank
        cuts its run into mini-batches in order."""
        per_row = response_mask.sum(-1)
        rows_per_rank = len(per_row) // dp_size
        rows_each = max(self.sequences_per_mini_batch // dp_size, 1)
        by_rank = per_row[: rows_per_rank * dp_size].view(dp_size, rows_per_rank)
        return [int(chunk.sum()) for chunk in by_rank.split(rows_each, dim=1)]

    def _threshold(self, position: int, num_tokens: int) -> float | None:
        return self.adaptive.threshold(position) if self.tau is None else fixed_threshold(self.tau, num_tokens)

    def _tau(self, threshold: float | None, num_tokens: int) -> float | None:
        """Per-token threshold: as configured, or what the adaptive threshold says under the same noise model."""
        if self.tau is not None or threshold is None:
            return self.tau
        return threshold * max(num_tokens, 1) ** 0.5

    def _tell_unwritten(self, policy: StepPolicy, spikes: list[Outcome]) -> None:
        if spikes:
            trigger, taken = self.settings.trigger, sorted({spike.taken for spike in spikes})
            logger.warning(
                "gradloc: step %s has %d spikes that no event is written of; the action applied to them all the same "
                "(%s). What is written is limited by gradloc.trigger: max_events_per_step=%d, max_events=%d (%d so "
                "far), cooldown_steps=%d",
                policy.global_step,
                len(spikes),
                ", ".join(taken),
                trigger.max_events_per_step,
                trigger.max_events,
                self._num_events,
                trigger.cooldown_steps,
            )

    def _write(self, raw: RawEvent, batch: BatchView) -> tuple[Event, str]:
        """Write one event; returns its record, as far as it could be completed, and why writing failed, if so."""
        self._num_events += 1
        event = raw.event
        try:
            event = self._complete(raw, batch)
            return self._keep(event, raw, batch), ""
        except Exception as error:
            self._num_failures += 1
            logger.error(
                "gradloc: writing an event of step %s to %s failed (%s); training goes on",
                raw.event.step.global_step,
                self.store.root,
                said_of(error),
                exc_info=not isinstance(error, OSError),  # a full disk is known for what it is
            )
            return event, said_of(error)

    def _complete(self, raw: RawEvent, batch: BatchView) -> Event:
        step, typical = raw.event.step, self.scale.typical()
        over_run = {name: value / typical[name][0] for name, value in self._present.items() if name in typical}
        completed = complete_event(
            raw,
            self.store.new_id(step.global_step, step.epoch, step.mini_batch, self.model),
            self.run,
            batch,
            self.tokenizer,
            self.settings.evidence.context_tokens,
            over_run,
            self.last_checkpoint,
        )
        return replace(completed, time=now())

    def _keep(self, event: Event, raw: RawEvent, batch: BatchView) -> Event:
        event_id, evidence = event.event_id, self.settings.evidence
        album = Album()
        documents: dict[str, Any] = {"sequences": complete_sequences(raw, event_id, batch, self.tokenizer, album)}
        tensors: dict[str, torch.Tensor] = {}
        if evidence.bundle != "off" and raw.layout:
            if self.store.size_gb() < evidence.max_gb:
                tensors, layout, note = bundle_tensors(raw, batch)
                documents["meta"] = BundleMeta(
                    actor=self.actor_config,
                    temperature=raw.temperature,
                    on_policy=raw.on_policy,
                    checkpoint=raw.checkpoint,
                    fingerprint=raw.fingerprint,
                    layout=layout,
                    event=event,
                    multi_modal_note=note,
                )
            else:
                logger.warning(
                    "gradloc: %s holds gradloc.evidence.max_gb=%s or more, so this event gets no replay bundle",
                    self.store.root,
                    evidence.max_gb,
                )
        event = replace(event, folder=self.store.write_folder(event_id, tensors, documents, album.files))
        self.store.append(event)
        return event

    # scalars for the trackers, in lists as reduce_metrics expects; mind names that contain "min" or "max"

    def _trigger_metrics(self, policy: StepPolicy, norms: list[float]) -> dict[str, list[float]]:
        """Spikes, and of the optimizer step that came nearest to its threshold: the threshold and the ratio to it."""
        pairs = [(norm, policy.threshold(number)) for number, norm in enumerate(norms)]
        judged = [(norm, threshold) for norm, threshold in pairs if threshold]
        found: dict[str, list[float]] = {}
        if judged:
            norm, threshold = max(judged, key=lambda pair: size(pair[0]) / pair[1])
            found = {"gradloc/threshold": [threshold], "gradloc/norm_over_threshold": [norm / threshold]}
        num_spikes = sum(spike_kind(*pair, policy.kind) is not None for pair in pairs)
        return {"gradloc/spikes": [num_spikes], **found}

    def _action_metrics(self, outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
        return {
            "gradloc/unwritten": [sum(not spike.is_written for spike in outcomes)],
            **{f"gradloc/{taken}": [sum(spike.taken == taken for spike in outcomes)] for taken in _TAKEN},
        }

    def _event_metrics(self, events: list[Event]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        after = [event.certificate.norm_after for event in events if event.certificate.norm_after is not None]
        if after:
            found["gradloc/norm_after"] = [max(after)]
        steps = [event.consequence for event in events if event.consequence is not None]
        clipped = [step for step in steps if step.clip_scale is not None]
        if clipped:
            hardest = min(clipped, key=lambda step: step.clip_scale or 0.0)
            for name in ("clip_scale", "culprit_share", "healthy_norm"):
                value = getattr(hardest, name)
                found |= {} if value is None else {f"gradloc/{name}": [value]}
        masked = [event for event in events if event.action.taken == "mask"]
        if masked:
            culprits = [culprit for event in masked for culprit in event.culprits]
            found["gradloc/masked_tokens"] = [sum(len(culprit.positions) for culprit in culprits)]
        return {
            **found,
            "gradloc/events": [len(events)],
            "gradloc/culprits": [sum(len(event.culprits) for event in events)],
            "gradloc/explained": [sum(event.certificate.verdict == "explained" for event in events)],
            "gradloc/probes": [sum(event.search.backwards or 0 for event in events)],
            "gradloc/seconds": [sum(event.search.seconds or 0.0 for event in events)],
            "gradloc/write_failures": [self._num_failures],
        }
