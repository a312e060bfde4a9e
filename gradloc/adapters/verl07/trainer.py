# SPDX-License-Identifier: Apache-2.0
"""What verl's trainer calls: one object, one method per moment of a step; each goes on to the parts that are on.

The parts: localization (:mod:`~..loop.driver`), Advantage Reweighting and Lopti (:mod:`~..reweighting`), the
stabilizers' memory (:mod:`~..stabilize`, which works in the actor), the health monitor (:mod:`~..health`), the gradient
analyses and the rollout filter. Their states lie in one file beside each checkpoint.
"""

import os
from typing import Any

import numpy as np
import torch

from verl.utils.config import omega_conf_to_dataclass

from ...config import GradLocConfig, fix_dump_dir
from ...health.monitor import Monitor, build_monitor
from ...keys import POLICY_KEY, ROW_KEY, SEQUENCE_KEY
from ...loop.batch import BatchView
from ...loop.driver import sequence_ids
from ...names import refuse_unknown_names
from ...record.state import load_states, save_states
from ...reweighting import (
    ADVANTAGES_BEFORE_KEY,
    KEEPS_LR_SCHEDULE_KEY,
    STAGE_MASK_KEY,
    STAGE_NAME_KEY,
    Lopti,
    Stage,
    reweight,
)
from ...stabilize import STABILIZER_KEY
from ...stabilize.config import StabilizeConfig
from ...stabilize.memory import StabilizerMemory, build_memory
from ..verl_common.driver import VerlDriver, build_driver
from ..verl_common.reports import reports_of
from .analysis_trainer import Analysis, build_analysis
from .critic.trainer import CriticSide
from .refusals import check_critic, check_run, settings_of
from .worker import report_of_actor


def build_trainer_hook(trainer: Any) -> "TrainerHook":
    """The hook of verl's ``RayPPOTrainer``, its data loaded; it does nothing while all is off.

    Raises:
        ValueError: one sentence, for a setting that is wrong or that these workers do not have.
    """
    config = trainer.config
    refuse_unknown_names(config)
    settings = settings_of(config)
    alpha, lopti = _reweighting(config)
    return TrainerHook(
        spikes=_driver(config, settings, trainer.tokenizer),
        critic=_critic(trainer, settings),
        alpha=alpha,
        lopti=lopti,
        stabilizers=_stabilizers(config, settings.stabilize),
        monitor=build_monitor(config),
        analysis=build_analysis(trainer),
    )


def _driver(config: Any, settings: GradLocConfig, tokenizer: Any) -> VerlDriver | None:
    fix_dump_dir(config, settings.root)
    if not settings.enable:
        return None
    check_run("spike_detection", config)
    return build_driver(config, settings, tokenizer)


def _critic(trainer: Any, settings: GradLocConfig) -> "CriticSide | None":
    if settings.critic == "off":
        return None
    check_critic(trainer.config)
    return CriticSide(trainer, build_driver(trainer.config, settings, trainer.tokenizer, "critic"))


def _reweighting(config: Any) -> tuple[float, Lopti | None]:
    """Advantage Reweighting's alpha and Lopti; a config without the blocks, of another trainer, has them off."""
    algorithm = config.algorithm
    if algorithm.get("lopti") is None or algorithm.get("advantage_reweighting") is None:
        return 0.0, None
    lopti = omega_conf_to_dataclass(algorithm.lopti)
    if lopti.enable:
        check_run("algorithm.lopti.enable", config)
    return omega_conf_to_dataclass(algorithm.advantage_reweighting).alpha, Lopti(lopti) if lopti.enable else None


def _stabilizers(config: Any, settings: StabilizeConfig) -> StabilizerMemory | None:
    if settings.is_on:
        check_run("gradloc.stabilize", config)
    if settings.weighs_tokens:
        check_run("gradloc.stabilize.token_clip or seq_clip", config)
    return build_memory(settings, "actor_rollout_ref.actor.grad_clip", config.actor_rollout_ref.actor.get("grad_clip"))


class TrainerHook:
    """The parts that are on, behind the calls that verl's trainer makes.

    Args:
        spikes: localization.
        critic: the critic's.
        alpha: of Advantage Reweighting; 0 is off.
        lopti: the update in two stages.
        stabilizers: memory of the actor's stabilizers.
        monitor: the health monitor.
        analysis: the gradient analyses and the rollout filter.
    """

    def __init__(
        self,
        spikes: VerlDriver | None = None,
        critic: CriticSide | None = None,
        alpha: float = 0.0,
        lopti: Lopti | None = None,
        stabilizers: StabilizerMemory | None = None,
        monitor: Monitor | None = None,
        analysis: Analysis | None = None,
    ):
        self.spikes, self.critic, self.alpha, self.lopti = spikes, critic, alpha, lopti
        self.stabilizers, self.monitor, self.analysis = stabilizers, monitor, analysis
        self._checkpoint: str | None = None

    @property
    def _stateful(self) -> dict[str, Any]:
        """The parts that remember something, by their name in the state file."""
        critic = None if self.critic is None else self.critic.driver
        parts = {"spikes": self.spikes, "critic": critic, "stabilizers": self.stabilizers, "health": self.monitor}
        return {name: part for name, part in parts.items() if part is not None}

    def begin_fit(self, tracking: Any) -> None:
        """Once verl's ``Tracking`` is open, before the first step: whom to tell events, and to show tables."""
        if self.spikes is not None:
            self.spikes.teller.trackers = tracking.logger
        if self.critic is not None:
            self.critic.driver.teller.trackers = tracking.logger
            self.critic.begin_fit()
        if self.analysis is not None:
            self.analysis.trackers.update(tracking.logger)

    # ---- the moments of a step, in order

    def stamp(self, batch: Any) -> None:
        """While the rollouts of a prompt still stand side by side: name every sequence of verl's DataProto."""
        if self.spikes is None and self.critic is None:
            return
        batch.non_tensor_batch[SEQUENCE_KEY] = np.array(sequence_ids(batch.non_tensor_batch["uid"]), dtype=object)

    def filter(self, trainer: Any, batch: Any, rewards: torch.Tensor, extras: dict[str, Any], metrics: dict) -> tuple:
        """Once rewards are known: the rows to train on, see :class:`~.rollout_filter.RolloutFilter`."""
        if self.analysis is None:
            return batch, rewards, extras
        return self.analysis.filter(trainer, batch, rewards, extras, metrics)

    def after_advantages(self, batch: Any, metrics: dict[str, Any]) -> None:
        """Right after the estimator: reweight the advantages; the batch keeps the old ones, too."""
        if self.alpha == 0:
            return
        before, mask = batch.batch["advantages"], batch.batch["response_mask"].bool()
        after = reweight(before, batch.batch["old_log_probs"], self.alpha)
        batch.batch[ADVANTAGES_BEFORE_KEY] = before
        batch.batch["advantages"] = after
        total = before[mask].abs().sum()
        metrics["advantage_reweighting/kept_share"] = float(after[mask].abs().sum() / total) if total > 0 else 1.0

    def analyze(self, trainer: Any, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float]) -> bool:
        """Just before the actor's update: the gradient analyses; returns whether the run is to end here."""
        return self.analysis is not None and self.analysis.run(trainer, batch, metrics, timing_raw)

    def update(self, trainer: Any, batch: Any) -> Any:
        """The actor's update: once, or in Lopti's two stages.

        Args:
            trainer: verl's trainer.
            batch: verl's DataProto, in the order in which it is dispatched.

        Returns:
            The update's output, verl's DataProto with ``metrics``.
        """
        if self.lopti is None:
            return self._update_once(trainer, batch)
        advantages, outputs = batch.batch["advantages"], []

        def update_stage(stage: Stage, keeps_lr_schedule: bool) -> dict[str, Any]:
            mask = stage.mask.to(advantages.dtype)
            batch.batch["advantages"] = advantages * mask
            batch.batch[STAGE_MASK_KEY] = mask
            batch.meta_info |= {STAGE_NAME_KEY: stage.name, KEEPS_LR_SCHEDULE_KEY: keeps_lr_schedule}
            outputs.append(self._update_once(trainer, batch))
            return outputs[-1].meta_info["metrics"]

        try:
            metrics = self.lopti.update(batch.batch["old_log_probs"], batch.batch["response_mask"], update_stage)
        finally:
            batch.batch["advantages"] = advantages
            batch.batch.pop(STAGE_MASK_KEY, None)
            for key in (STAGE_NAME_KEY, KEEPS_LR_SCHEDULE_KEY):
                batch.meta_info.pop(key, None)
        outputs[-1].meta_info["metrics"] = metrics
        return outputs[-1]

    def after_step(self, batch: Any, metrics: dict[str, Any], global_step: int) -> None:
        """Just before the step's metrics are logged."""
        if self.monitor is not None:
            self.monitor.observe(BatchView(batch.batch, batch.non_tensor_batch), metrics, global_step)
            if self._checkpoint is not None:  # written before the step had its metrics
                self.save(self._checkpoint)
        self._checkpoint = None

    def save(self, global_step_folder: str) -> None:
        """Put the parts' states beside a checkpoint."""
        if save_states(self._stateful, global_step_folder):
            self._checkpoint = global_step_folder
            self._remember_checkpoint(global_step_folder)

    def load(self, global_step_folder: str) -> None:
        """Take the states back from a checkpoint; a part that it does not hold, or not as ours, starts anew."""
        self._remember_checkpoint(global_step_folder)
        load_states(self._stateful, global_step_folder)

    # ---- inside

    def _remember_checkpoint(self, folder: str) -> None:
        if self.spikes is not None:
            self.spikes.writer.last_checkpoint = os.path.abspath(folder)
        if self.critic is not None:
            self.critic.driver.writer.last_checkpoint = os.path.abspath(folder)

    def _update_once(self, trainer: Any, batch: Any) -> Any:
        group = trainer.actor_rollout_wg
        if self.spikes is None and self.stabilizers is None:
            return group.update_actor(batch)
        if self.spikes is not None:
            dp_size, stage = trainer._get_dp_size(group, "actor"), batch.meta_info.get(STAGE_NAME_KEY, "")
            mask = batch.batch["response_mask"]
            batch.meta_info[POLICY_KEY] = self.spikes.before_batch(mask, trainer.global_steps, dp_size, stage)
            batch.batch[ROW_KEY] = torch.arange(len(batch))
        if self.stabilizers is not None and self.stabilizers.to_send is not None:
            batch.meta_info[STABILIZER_KEY] = self.stabilizers.to_send
        output = group.update_actor(batch)
        reports = reports_of(group, report_of_actor)
        if self.stabilizers is not None:
            batch.meta_info.pop(STABILIZER_KEY, None)
            self.stabilizers.after_update(reports[0].learned)
        if self.spikes is not None:
            del batch.meta_info[POLICY_KEY]
            batch.batch.pop(ROW_KEY)
            view = BatchView(batch.batch, batch.non_tensor_batch)
            output.meta_info["metrics"].update(self.spikes.after_update(reports, view))
        return output
