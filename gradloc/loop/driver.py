# SPDX-License-Identifier: Apache-2.0
"""The driver's side of localization: the policy before an update, events, metrics and state after it.

The driver process knows the step, the whole batch, the tokenizer and its own file system, which on a cluster is not
the workers'. It sends each update's policy and takes the ranks' reports. Whatever fails in here is logged and counted;
training goes on.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.actions import Outcome
from ..core.scale import ScaleHistory
from ..record import Run
from ..record.origin import origin
from ..tell.teller import Teller
from .batch import BatchView
from .complete import batch_scale
from .metrics import metrics_of
from .policy import PolicyMaker, tokens_per_mini_batch
from .wire import Policy, RankReport
from .writer import EventWriter

__all__ = ["AbortedBySpike", "Driver", "build_driver", "sequence_ids"]

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


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
        trained, settings = config.critic, _of_critic(settings)
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
        trained=plain,
        model=model,
    )


def _of_critic(settings: Any) -> Any:
    """The actor's settings as they hold for the critic: its own action, and nothing that only a replay uses."""
    return replace(
        settings,
        enable=True,
        stabilize=type(settings.stabilize)(),
        action=replace(settings.action, mode=settings.critic),
        evidence=replace(settings.evidence, bundle="off", checkpoint="off"),
    )


class Driver:
    """Decides when to look, learns from every norm, and has the events written and told.

    Args:
        settings: those that hold, see :func:`~..config.resolve`.
        sequences_per_mini_batch: rollouts, over all ranks.
        tokenizer: decodes culprits; not used with ``evidence.text=off``.
        run: which run this is.
        trained: the trained model's whole config as plain data, for the bundle.
        model: ``actor`` or ``critic``.
    """

    def __init__(
        self,
        settings: Any,
        *,
        sequences_per_mini_batch: int,
        tokenizer: Any,
        run: Run,
        trained: dict[str, Any],
        model: str = "actor",
    ):
        self.model, self.settings = model, settings
        self.sequences_per_mini_batch = sequences_per_mini_batch
        self.num_epochs = trained.get("ppo_epochs", 1)
        self.policies = PolicyMaker(settings)
        self.writer = EventWriter(settings, run, tokenizer, trained, model)
        keeps_text = settings.evidence.text == "on"
        self.teller = Teller(settings.notify, self.writer.store.root, keeps_text=keeps_text)
        self.scale = ScaleHistory()
        """What is typical of the run's own batches."""
        self._policy: Policy

    def before_update(self, response_mask: torch.Tensor, global_step: int, dp_size: int, stage: str = "") -> Policy:
        """The policy of the update that comes next.

        Args:
            response_mask: (R, T), in the order in which the rows are dealt out to the ranks.
            global_step: the trainer's.
            dp_size: data-parallel ranks.
            stage: which of Lopti's two updates this is; "" for the only one.
        """
        num_tokens = tokens_per_mini_batch(response_mask, dp_size, self.sequences_per_mini_batch)
        typical = self.scale.typical()
        self._policy = self.policies.policy(global_step, num_tokens, self.num_epochs, stage, typical)
        return self._policy

    def after_update(self, reports: Sequence[RankReport], batch: BatchView) -> dict[str, list[float]]:
        """Learn from the norms, write and announce the events.

        Args:
            reports: one of each process.
            batch: the whole batch.

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
        self.teller.tell([event for event, _ in written], policy.global_step, [why for _, why in written])
        self._tell_unwritten([spike for spike in first.outcomes if not spike.is_written])
        if any(spike.taken == "abort" for spike in first.outcomes):
            self.teller.finish()
            said = [event.verdict for event, why in written if not why]
            raise AbortedBySpike(
                f"gradloc stopped the run (actor_rollout_ref.actor.gradloc.{self._action_key}=abort). "
                f"{said[-1] if said else 'No event of it was written.'} "
                f"The step was not taken; the events are in {self.writer.store.root}."
            )
        self.scale.observe(present)
        found = metrics_of(policy, reports, first, self.writer.num_failures)
        named = {self._metric(name): value for name, value in found.items()}
        return {name: [value] for name, value in named.items()}

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

    @property
    def _action_key(self) -> str:
        return "action.mode" if self.model == "actor" else self.model

    def _tell_unwritten(self, spikes: list[Outcome]) -> None:
        if spikes:
            trigger = self.settings.trigger
            logger.warning(
                "gradloc: step %s has %d spikes that no event is written of; the action applied to them all the same "
                "(%s). What is written is limited by gradloc.trigger: max_events_per_step=%d, max_events=%d (%d so "
                "far), cooldown_steps=%d",
                self._policy.global_step,
                len(spikes),
                ", ".join(sorted({spike.taken for spike in spikes})),
                trigger.max_events_per_step,
                trigger.max_events,
                self.policies.num_events,
                trigger.cooldown_steps,
            )
