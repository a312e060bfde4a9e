# SPDX-License-Identifier: Apache-2.0
"""What a trainer of verl's holds of GradLoc on the driver, whatever its version calls when."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...config import GradLocConfig, settings_from
from ...health.config import HealthConfig
from ...health.monitor import Monitor
from ...loop.batch import BatchView
from ...loop.wire import Policy, RankReport
from ...record.state import load_states, save_states
from ...reweighting import AdvantageReweightingConfig, LoptiConfig
from ...reweighting.advantages import kept_share, reweight
from ...reweighting.stages import STAGE_MASK_KEY, Stage, update_in_stages
from ...stabilize.memory import StabilizerMemory
from .driver import VerlDriver, build_driver
from .reports import reports_of

_WITHOUT_GROUPS = ("gae", "reinforce_plus_plus", "remax")
"""verl's advantage estimators that do not compare a prompt's rollouts: equal rewards still teach them something."""


def reweighting_of(config: Any) -> tuple[float, LoptiConfig | None]:
    """Advantage Reweighting's alpha, and Lopti; a config without the blocks has them off."""
    blocks = {"advantage_reweighting": AdvantageReweightingConfig, "lopti": LoptiConfig}
    alpha, lopti = (settings_from(config.algorithm.get(name) or {}, kind) for name, kind in blocks.items())
    return alpha.alpha, (lopti if lopti.enable else None)


def build_monitor(config: Any, grad_clip: Any) -> Monitor | None:
    """The trainer's health monitor, or None while ``trainer.health.enable`` is off.

    Args:
        config: the trainer's whole config; one without the block has it off.
        grad_clip: verl's limit on the norm of the actor's gradient.

    Raises:
        ValueError: one sentence for a setting that is wrong, also while it is off.
    """
    block = config.trainer.get("health")
    if block is None:
        return None
    from omegaconf import OmegaConf

    settings: Any = HealthConfig(**OmegaConf.to_container(block, resolve=True))
    if not settings.enable:
        return None
    estimator = str(getattr(config.algorithm.adv_estimator, "value", config.algorithm.adv_estimator))
    return Monitor(settings, limit_of_all(config, grad_clip), estimator not in _WITHOUT_GROUPS)


def limit_of_all(config: Any, grad_clip: Any) -> float | None:
    """verl's limit on the norm of all layers; None without one, and where each layer has a limit of its own."""
    gradloc = config.actor_rollout_ref.actor.get("gradloc") or {}
    stabilize = {} if gradloc.get("enable") is False else gradloc.get("stabilize") or {}
    clips_layers = (stabilize.get("layer_clip") or {}).get("rule") not in (None, False, "off")
    return None if clips_layers or not grad_clip else float(grad_clip)


class Workers(NamedTuple):
    """Of a model: where the trainer keeps its workers, their mesh, and what is run in each of them."""

    group: str
    mesh: str
    report: Callable[[Any], Any]
    """After an update."""
    watch: Callable[[Any], Any] | None = None
    """Before the first one."""


class Update:
    """An update of a model that verl is about to make; an adapter says what its batch of R rows is kept in.

    Args:
        trainer: verl's.
        workers: the model's.
        batch: verl's, in the order in which its rows are dealt out.
        of_verl: verl's own method, where it is to be made.
    """

    dp_size: int
    """Data-parallel ranks of the model."""

    def __init__(self, trainer: Any, workers: Workers, batch: Any, of_verl: Any = None):
        self.trainer, self.workers, self.batch, self.of_verl = trainer, workers, batch, of_verl

    @property
    def group(self) -> Any:
        """The model's worker group."""
        return getattr(self.trainer, self.workers.group)

    def get(self, *names: str) -> list[torch.Tensor]:
        """Tensors of the batch, (R, T) each."""
        raise NotImplementedError

    def put(self, **tensors: torch.Tensor) -> None:
        """Have the batch hold these, (R, T) each."""
        raise NotImplementedError

    def view(self) -> BatchView:
        """The batch as events see it."""
        raise NotImplementedError

    def run(self, policy: Policy) -> dict[str, Any]:
        """Update through verl's own method, the policy sent along; returns the update's metrics."""
        raise NotImplementedError


class TrainerParts:
    """The parts that are on; their states lie in one file beside each checkpoint."""

    spikes: VerlDriver | None = None
    """Of the actor's spikes."""
    critic: VerlDriver | None = None
    """Of the critic's."""

    def __init__(
        self,
        settings: GradLocConfig | None = None,
        alpha: float = 0.0,
        lopti: LoptiConfig | None = None,
        stabilizers: StabilizerMemory | None = None,
        monitor: Monitor | None = None,
        analysis: Any = None,
    ):
        self.settings, self.alpha, self.lopti = settings, alpha, lopti
        self.stabilizers, self.monitor, self.analysis = stabilizers, monitor, analysis
        self._num_silent = 0
        self._checkpoint: str | None = None

    def build_drivers(self, config: Any, tokenizer: Any) -> None:
        """Of the models whose spikes are looked for; see :func:`~.driver.build_driver`."""
        if self.settings.enable:
            self.spikes = build_driver(config, self.settings, tokenizer)
        if self.settings.critic != "off":
            self.critic = build_driver(config, self.settings, tokenizer, "critic")

    @property
    def drivers(self) -> list[VerlDriver]:
        """Of the models whose spikes are looked for."""
        return [driver for driver in (self.spikes, self.critic) if driver is not None]

    @property
    def is_in_update(self) -> bool:
        """Whether the actor's update is anything but verl's own."""
        return self.spikes is not None or self.stabilizers is not None or self.lopti is not None

    def reweight(self, update: Update, metrics: dict[str, Any]) -> None:
        """Right after the estimator: Advantage Reweighting of what the update is to be made with."""
        if self.alpha != 0:
            before, old_log_probs, mask = update.get("advantages", "old_log_probs", "response_mask")
            after = reweight(before, old_log_probs, self.alpha)
            update.put(advantages=after)
            metrics["advantage_reweighting/kept_share"] = kept_share(before, after, mask.bool())

    def update_actor(self, update: Update) -> dict[str, Any]:
        """The actor's update, once or in Lopti's two stages; its metrics, of which ours are lists."""
        if self.lopti is None:
            return self._update(update, self.spikes, self.stabilizers)
        advantages, old_log_probs, response_mask = update.get("advantages", "old_log_probs", "response_mask")

        def update_stage(stage: Stage, keeps_lr_schedule: bool) -> dict[str, Any]:
            mask = stage.mask.to(advantages.dtype)
            update.put(**{"advantages": advantages * mask, STAGE_MASK_KEY: mask})
            metrics = self._update(update, self.spikes, self.stabilizers, stage.name, keeps_lr_schedule)
            return {name: value if isinstance(value, list) else [value] for name, value in metrics.items()}

        try:
            return update_in_stages(self.lopti, old_log_probs, response_mask, update_stage)
        finally:
            update.put(advantages=advantages)

    def update_critic(self, update: Update) -> dict[str, Any]:
        """The critic's update; its metrics."""
        return self._update(update, self.critic)

    def _update(
        self,
        update: Update,
        driver: VerlDriver | None,
        memory: StabilizerMemory | None = None,
        stage: str = "",
        keeps_lr_schedule: bool = False,
    ) -> dict[str, Any]:
        """One update; its driver, where there is one, looks into it."""
        view, step = update.view(), update.trainer.global_steps
        if driver is None:
            policy = self._silent_policy(update)
        else:
            policy = driver.before_batch(view.tensors["response_mask"], step, update.dp_size, stage)
        learned = None if memory is None else memory.to_send
        policy = replace(policy, stage=stage or None, learned=learned, keeps_lr_schedule=keeps_lr_schedule)
        metrics = update.run(policy)
        reports: list[RankReport] = reports_of(update.group, update.workers.report)
        if memory is not None:
            memory.after_update(reports[0].learned)
            for name in reports[0].metrics:
                metrics[name] = [value for report in reports for value in report.metrics[name]]
        if driver is not None:
            ours = driver.after_update(reports, view)
            driver.of_step += ({name: value for name, (value,) in ours.items()},)
            metrics.update(ours)
        return metrics

    def _silent_policy(self, update: Update) -> Policy:
        """Of an update in which no spike is looked for."""
        config = update.trainer.config.actor_rollout_ref
        num_mini_batches = max(len(update.batch) // (config.actor.ppo_mini_batch_size * config.rollout.n), 1)
        nothing = (None,) * (num_mini_batches * config.actor.ppo_epochs)
        self._num_silent += 1
        return Policy(
            update.trainer.global_steps,
            kind="off",
            num_tokens=(),
            thresholds=nothing,
            tau=nothing,
            max_events=0,
            update=self._num_silent,
            settings=self.settings,
        )

    def begin_fit(self, tracking: Any) -> None:
        """Once verl's ``Tracking`` is open, before the first step: whom to tell events, and to show tables."""
        for driver in self.drivers:
            driver.teller.trackers = tracking.logger
        if self.analysis is not None:
            self.analysis.trackers.update(tracking.logger)

    def judge(self, batch: BatchView, metrics: dict[str, Any], global_step: int) -> None:
        """Judge the step's health just before its metrics are logged."""
        if self.monitor is not None:
            self.monitor.observe(batch, metrics, global_step)
            if self._checkpoint is not None:  # written before the step had its metrics
                self.save(self._checkpoint)
        self._checkpoint = None

    def save(self, folder: str) -> None:
        """Put the parts' states beside a checkpoint."""
        if save_states(self._stateful, folder):
            self._checkpoint = folder
            self._remember(folder)

    def load(self, folder: str) -> None:
        """Take the states back from a checkpoint; a part that it does not hold starts anew."""
        self._remember(folder)
        load_states(self._stateful, folder)

    @property
    def _stateful(self) -> dict[str, Any]:
        """The parts that remember something, by their name in the state file."""
        parts = {"spikes": self.spikes, "critic": self.critic, "stabilizers": self.stabilizers, "health": self.monitor}
        return {name: part for name, part in parts.items() if part is not None}

    def _remember(self, folder: str) -> None:
        for driver in self.drivers:
            driver.writer.last_checkpoint = os.path.abspath(folder)
