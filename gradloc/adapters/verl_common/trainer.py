# SPDX-License-Identifier: Apache-2.0
"""The driver's side of GradLoc in a verl trainer, for every version of verl."""

import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf

from ...config import GradLocConfig, settings_in
from ...core.step import Groups
from ...health.monitor import Monitor
from ...loop.batch import BatchView
from ...loop.driver import Driver, Stateful
from ...loop.messages import Policy, RankReport
from ...record import Run
from ...record.origin import with_origin
from ...reweighting import LoptiConfig
from ...reweighting.advantages import kept_share, reweight
from ...reweighting.stages import STAGE_MASK_KEY, Stage, update_in_stages
from ...stabilize.memory import StabilizerMemory, build_memory
from .losses import advantage_groups, estimator_of
from .requirements import RequestedFeatures, health_in, refused_cures
from .watch import answers_of

logger = logging.getLogger(__name__)

_WITHOUT_GROUPS = ("gae", "reinforce_plus_plus", "remax")
"""verl's advantage estimators that do not compare a prompt's rollouts, and so also learn from equal rewards."""


def build_monitor(config: Any, grad_clip: Any) -> Monitor | None:
    """Return the trainer's health monitor, given verl's limit on the norm of the actor's gradient; None while
    ``trainer.health.enable`` is off."""
    settings = health_in(config)
    if settings is None:
        return None
    return Monitor(settings, limit_of_all(config, grad_clip), estimator_of(config.algorithm) not in _WITHOUT_GROUPS)


def limit_of_all(config: Any, grad_clip: Any) -> float | None:
    """Return verl's limit on the norm of all layers; None without one, and where each layer has its own."""
    clips_layers = settings_in(config).stabilize.layer_clip.rule != "off"
    return None if clips_layers or not grad_clip else float(grad_clip)


def build_driver(config: Any, settings: Any, tokenizer: Any, model: str = "actor") -> "VerlDriver":
    """Return the driver of the updates of the ``actor`` or the ``critic``; ``config`` is the trainer's whole config."""
    shared, num_rollouts = config.actor_rollout_ref, config.actor_rollout_ref.rollout.n
    trained, path, action_key = shared.actor, shared.model.path, "action.mode"
    if model == "critic":
        trained, path, action_key = config.critic, config.critic.model.path, "critic"
        settings = _critic_settings(settings)
    plain: Any = OmegaConf.to_container(trained, resolve=True)
    run_config: Any = OmegaConf.to_container(config)
    if model == "actor" and OmegaConf.select(config, "distillation.enabled"):
        plain["distillation_loss"] = OmegaConf.to_container(config.distillation.distillation_loss, resolve=True)
    names = config.trainer.project_name, config.trainer.experiment_name
    run = Run(*names, model=path, estimator=_estimator(config.algorithm), rollouts=num_rollouts)
    run = with_origin(run, run_config)
    epochs = trained.ppo_epochs
    driver = VerlDriver(settings, tokenizer=tokenizer, run=run, trained=plain, num_epochs=epochs, model=model)
    driver.sequences_per_mini_batch = trained.ppo_mini_batch_size * num_rollouts
    driver.action_key = f"actor_rollout_ref.actor.gradloc.{action_key}"
    return driver


class VerlDriver(Driver):
    """A driver that knows how verl deals rows out."""

    sequences_per_mini_batch: int
    """Rollouts in a mini-batch, over all ranks."""
    step_metrics: tuple[dict[str, float], ...] = ()
    """The metrics of each update of the trainer's present step."""
    _global_step = -1

    def before_batch(self, per_row: torch.Tensor, global_step: int, dp_size: int, stage: str = "") -> Policy:
        """Return the policy of the next update; see :meth:`~...loop.driver.Driver.before_update`.

        ``per_row``, int (R,), are the rows' response tokens, in the order in which rows are dealt out: to the
        ``dp_size`` ranks in equal runs, each cut into mini-batches in order.
        """
        if global_step != self._global_step:
            self._global_step, self.step_metrics = global_step, ()
        rows_per_rank = len(per_row) // dp_size
        by_rank = per_row[: rows_per_rank * dp_size].view(dp_size, rows_per_rank)
        rows_each = max(self.sequences_per_mini_batch // dp_size, 1)
        num_tokens = [int(chunk.sum()) for chunk in by_rank.split(rows_each, dim=1)]
        return self.before_update(num_tokens, global_step, stage)


def _estimator(algorithm: Any) -> str | None:
    """Run's advantages, by the record's names; None where rewards hold a KL penalty and are not the scores."""
    name = estimator_of(algorithm).removesuffix("_vectorized")
    if algorithm.use_kl_in_reward:
        return None
    return "grpo_mean" if name == "grpo" and not algorithm.norm_adv_by_std_in_grpo else name


def _critic_settings(settings: Any) -> Any:
    """Return the critic's settings: the actor's with its own action, and no weights saved at events."""
    return replace(
        settings,
        enable=True,
        stabilize=type(settings.stabilize)(),
        action=replace(settings.action, mode=settings.critic),
        evidence=replace(settings.evidence, checkpoint="off"),
    )


class Workers(NamedTuple):
    """Workers of a model: the trainer's attribute, and their mesh."""

    group: str
    mesh: str
    report: str
    """Path in each worker of the method that reports on the last update."""
    watch: Callable[[Any], Any]
    """Runs in each worker before the first update."""


class WorkersUpdate:
    """An update of a model that verl is about to make by its ``original`` method.

    An adapter reads and writes verl's batch of R rows, which are in the order in which they are dealt out.
    """

    dp_size: int
    """Data-parallel ranks of the model."""

    def __init__(self, trainer: Any, workers: Workers, batch: Any, original: Any = None):
        self.trainer, self.workers, self.batch, self.original = trainer, workers, batch, original

    @property
    def group(self) -> Any:
        """verl's worker group of the model."""
        return getattr(self.trainer, self.workers.group)

    def watch(self) -> None:
        """Put our mixins into the model's workers, the first time."""
        if not hasattr(self.group, "gradloc_is_there"):
            self.group.execute_with_func_generator(self.workers.watch)
            self.group.gradloc_is_there = True

    def get(self, *names: str) -> list[torch.Tensor]:
        """Return tensors of the batch, (R, T) each."""
        raise NotImplementedError

    def put(self, **tensors: torch.Tensor) -> None:
        """Write tensors into the batch, (R, T) each."""
        raise NotImplementedError

    def view(self) -> BatchView:
        """Return the batch as events show it."""
        raise NotImplementedError

    def run(self, policy: Policy) -> dict[str, Any]:
        """Update through verl's own method, the policy sent along; returns the update's metrics."""
        raise NotImplementedError


_PEAKS = ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb")


def _restore_peak(metrics: dict[str, Any], reports: Sequence[RankReport]) -> None:
    """Put back the process' own peaks of memory, which we reset before each step, under any role."""
    for peak, values in zip(_PEAKS, zip(*(report.peak_bytes for report in reports), strict=True), strict=True):
        most = max(values) / 2**30
        for name in [name for name in metrics if name.endswith(peak)]:
            found = metrics[name]
            metrics[name] = [max(each, most) for each in found] if isinstance(found, list) else max(found, most)


class Checkpointed:
    """Mixin before a verl trainer: saves the states of its ``gradloc`` with each checkpoint."""

    def _load_checkpoint(self) -> Any:
        answer = super()._load_checkpoint()
        if getattr(self, "global_steps", 0) > 0:  # a fit() of the user's own may count otherwise
            folder = self.config.trainer.default_local_dir
            if self.config.trainer.resume_mode == "resume_path":
                folder = os.path.dirname(os.path.normpath(self.config.trainer.resume_from_path))
            self.gradloc.load(os.path.join(folder, f"global_step_{self.global_steps}"))
        return answer

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        self.gradloc.save(os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}"))


class TrainerFeatures(Stateful):
    """The features that are on; their states are in one file in each checkpoint's folder."""

    spikes: VerlDriver | None = None
    """Driver of the actor's spikes."""
    critic: VerlDriver | None = None
    """Driver of the critic's spikes."""
    settings: GradLocConfig | None = None
    alpha = 0.0
    lopti: LoptiConfig | None = None
    stabilizers: StabilizerMemory | None = None
    monitor: Monitor | None = None
    analysis: Any = None
    _num_silent = 0
    _checkpoint: str | None = None

    def switch_on(self, config: Any, asked: RequestedFeatures, clip_key: str, grad_clip: Any) -> None:
        """Switch on what a run asks for, but its drivers and analyses.

        ``grad_clip`` is verl's limit on the norm of the actor's gradient, as the setting ``clip_key`` has it.
        """
        self.settings, self.alpha, self.lopti = asked.settings, asked.alpha, asked.lopti
        self.stabilizers = build_memory(asked.settings.stabilize, clip_key, grad_clip)
        self.monitor = build_monitor(config, grad_clip)

    def build_drivers(self, config: Any, tokenizer: Any, on: Collection[str]) -> None:
        """Build the parts that the config switches on; see :func:`build_driver` and :func:`.check_needs`."""
        self._algorithm, self._refused_cures = config.algorithm, refused_cures(on, config)
        if self.settings.enable:
            self.spikes = build_driver(config, self.settings, tokenizer)
        if self.settings.critic != "off":
            self.critic = build_driver(config, self.settings, tokenizer, "critic")
        for driver in self.drivers:
            driver.print_start(f" for the {driver.model}")

    @property
    def drivers(self) -> list[VerlDriver]:
        """Drivers of the models whose spikes are looked for."""
        return [driver for driver in (self.spikes, self.critic) if driver is not None]

    @property
    def is_in_update(self) -> bool:
        """Whether the actor's update is not verl's own."""
        return self.spikes is not None or self.stabilizers is not None or self.lopti is not None

    def reweight(self, update: WorkersUpdate, metrics: dict[str, Any]) -> None:
        """Reweight the update's advantages, right after the estimator."""
        if self.alpha != 0:
            before, old_log_probs, mask = update.get("advantages", "old_log_probs", "response_mask")
            after = reweight(before, old_log_probs, self.alpha)
            update.put(advantages=after)
            metrics["advantage_reweighting/kept_share"] = kept_share(before, after, mask.bool())

    def update_actor(self, update: WorkersUpdate) -> dict[str, Any]:
        """Update the actor, once or in Lopti's two stages; returns the metrics, ours as lists."""
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

    def update_critic(self, update: WorkersUpdate) -> dict[str, Any]:
        """Update the critic; returns the metrics."""
        return self._update(update, self.critic)

    def _update(
        self,
        update: WorkersUpdate,
        driver: VerlDriver | None,
        memory: StabilizerMemory | None = None,
        stage: str = "",
        keeps_lr_schedule: bool = False,
    ) -> dict[str, Any]:
        """Run one update, watched by its driver if there is one; returns the metrics."""
        view, step = update.view(), update.trainer.global_steps
        if driver is None:
            policy = self._silent_policy(update)
        else:
            policy = driver.before_batch(view.num_tokens, step, update.dp_size, stage)
            if driver.settings.search.max_cures > 0 and not stage:  # which has a part of the advantages
                policy = replace(policy, groups=self._groups_of(view))
        learned = None if memory is None else memory.to_send
        policy = replace(policy, stage=stage or None, learned=learned, keeps_lr_schedule=keeps_lr_schedule)
        metrics = update.run(policy)
        reports: list[RankReport] = answers_of(update.group, update.workers.report)
        if memory is not None:
            memory.after_update(reports[0].learned)
            for name in reports[0].metrics:
                metrics[name] = [value for report in reports for value in report.metrics[name]]
        if driver is not None:
            ours = driver.after_update(reports, view)
            driver.step_metrics += ({name: value for name, (value,) in ours.items()},)
            metrics.update(ours)
            _restore_peak(metrics, reports)
        return metrics

    def _groups_of(self, view: BatchView) -> Groups | None:
        """Return how the advantages were made; None, and training goes on, where the batch cannot be read."""
        try:
            return advantage_groups(view, self._algorithm, self.alpha != 0, self._refused_cures)
        except Exception:
            logger.exception("gradloc: how this batch's advantages were made is not known; fewer settings are measured")
            return None

    def _silent_policy(self, update: WorkersUpdate) -> Policy:
        """Return the policy of an update in which no spike is looked for."""
        config = update.trainer.config.actor_rollout_ref
        num_mini_batches = max(len(update.batch) // (config.actor.ppo_mini_batch_size * config.rollout.n), 1)
        nothing = (None,) * (num_mini_batches * config.actor.ppo_epochs)
        self._num_silent += 1
        step, number = update.trainer.global_steps, self._num_silent
        return Policy(step, thresholds=nothing, tau=nothing, update=number, settings=self.settings)

    def begin_fit(self, tracking: Any) -> None:
        """Take verl's open ``Tracking``, before the first step, to announce events and show tables."""
        for driver in self.drivers:
            driver.notifier.trackers = tracking.logger
        if self.analysis is not None:
            self.analysis.trackers.update(tracking.logger)

    def judge(self, batch: BatchView, metrics: dict[str, Any], global_step: int) -> None:
        """Judge the step's health just before its metrics are logged."""
        if self.monitor is not None:
            self.monitor.observe(batch, metrics, global_step)
            if self._checkpoint is not None:  # written before the step had its metrics
                self.save(self._checkpoint)
        self._checkpoint = None

    def save(self, folder: str) -> bool:
        is_saved = super().save(folder)
        self._checkpoint = folder if is_saved else self._checkpoint
        return is_saved

    @property
    def parts(self) -> dict[str, Any]:  # type: ignore[override]
        return {"spikes": self.spikes, "critic": self.critic, "stabilizers": self.stabilizers, "health": self.monitor}
