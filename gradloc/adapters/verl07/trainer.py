# SPDX-License-Identifier: Apache-2.0
"""What verl's trainer calls: one object, one method per moment of a step; each goes on to the parts that are on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ...config import fix_dump_dir
from ...keys import POLICY_KEY, ROW_KEY, SEQUENCE_KEY
from ...loop.batch import BatchView
from ...loop.driver import sequence_ids
from ...loop.wire import RankReport
from ...names import refuse_unknown_names
from ...reweighting import (
    ADVANTAGES_BEFORE_KEY,
    KEEPS_LR_SCHEDULE_KEY,
    STAGE_MASK_KEY,
    STAGE_NAME_KEY,
    Stage,
    kept_share,
    reweight,
)
from ...stabilize import STABILIZER_KEY
from ...stabilize.memory import build_memory
from ..verl_common.driver import VerlDriver
from ..verl_common.needs import LOPTI, features_on
from ..verl_common.reports import reports_of
from ..verl_common.trainer import TrainerParts, build_monitor, reweighting_of
from .analysis_trainer import build_analysis
from .refusals import SPIKES, check_critic, check_run, settings_of
from .worker import report_of_actor, report_of_critic


class _Workers(NamedTuple):
    """Of a model: where the trainer keeps its workers, their mesh, and what each is asked for a report."""

    group: str
    mesh: str
    ask: Callable[[Any], Any]


_ACTOR = _Workers("actor_rollout_wg", "actor", report_of_actor)
_CRITIC = _Workers("critic_wg", "critic", report_of_critic)


def build_trainer_hook(trainer: Any) -> "TrainerHook":
    """The hook of verl's ``RayPPOTrainer``, its data loaded; it does nothing while all is off.

    Raises:
        ValueError: one sentence, for a setting that is wrong or that these workers do not have.
    """
    config = trainer.config
    refuse_unknown_names(config)
    settings = settings_of(config)
    alpha, lopti = reweighting_of(config)
    features = features_on(settings, config.actor_rollout_ref.actor.get("strategy"), SPIKES)
    for feature in features if lopti is None else [*features, LOPTI]:
        check_run(feature, config)
    if settings.critic != "off":
        check_critic(config)
    fix_dump_dir(config, settings.root)
    clip = clip_limit(config)
    hook = TrainerHook(
        alpha=alpha,
        lopti=lopti,
        stabilizers=build_memory(settings.stabilize, "actor_rollout_ref.actor.grad_clip", clip),
        monitor=build_monitor(config, clip),
        analysis=build_analysis(trainer),
    )
    hook.build_drivers(config, settings, trainer.tokenizer)
    hook.trainer = trainer
    return hook


def clip_limit(config: Any) -> Any:
    """verl's bound on the norm of the actor's gradient: its FSDP workers', or its Megatron and engine workers'."""
    actor = config.actor_rollout_ref.actor
    is_engine = config.trainer.get("use_legacy_worker_impl", "auto") == "disable"
    if actor.get("strategy") in ("fsdp", "fsdp2") and not is_engine:
        return actor.get("grad_clip")
    return (actor.get("optim") or {}).get("clip_grad")


class TrainerHook(TrainerParts):
    """The parts that are on, behind the calls that verl's trainer makes."""

    trainer: Any = None

    def begin_fit(self, tracking: Any) -> None:
        super().begin_fit(tracking)
        if self.critic is not None:
            group, driver = self.trainer.critic_wg, self.critic
            of_verl = group.update_critic
            group.update_critic = lambda batch: self._watched(self.trainer, driver, _CRITIC, of_verl, batch)[0]

    # ---- the moments of a step, in order

    def stamp(self, batch: Any) -> None:
        """While the rollouts of a prompt still stand side by side: name every sequence of verl's DataProto."""
        if self.spikes is None and self.critic is None:
            return
        batch.non_tensor_batch[SEQUENCE_KEY] = np.array(sequence_ids(batch.non_tensor_batch["uid"]), dtype=object)

    def filter(self, trainer: Any, batch: Any, rewards: torch.Tensor, extras: dict[str, Any], metrics: dict) -> tuple:
        """Once rewards are known: the rows to train on, see :meth:`~.analysis_trainer.Analysis.filter`."""
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
        metrics["advantage_reweighting/kept_share"] = kept_share(before, after, mask)

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
        self.judge(BatchView(batch.batch, batch.non_tensor_batch), metrics, global_step)

    # ---- inside

    def _update_once(self, trainer: Any, batch: Any) -> Any:
        group, memory = trainer.actor_rollout_wg, self.stabilizers
        if self.spikes is None and memory is None:
            return group.update_actor(batch)
        if memory is not None and memory.to_send is not None:
            batch.meta_info[STABILIZER_KEY] = memory.to_send
        if self.spikes is not None:
            output, reports = self._watched(trainer, self.spikes, _ACTOR, group.update_actor, batch)
        else:
            output, reports = group.update_actor(batch), reports_of(group, report_of_actor)
        if memory is not None:
            batch.meta_info.pop(STABILIZER_KEY, None)
            memory.after_update(reports[0].learned)
        return output

    def _watched(
        self, trainer: Any, driver: VerlDriver, workers: _Workers, update: Callable[[Any], Any], batch: Any
    ) -> tuple[Any, list[RankReport]]:
        """An update of a model that is looked into, with the events written; its output, and the ranks' reports."""
        group, stage = getattr(trainer, workers.group), batch.meta_info.get(STAGE_NAME_KEY, "")
        dp_size, mask = trainer._get_dp_size(group, workers.mesh), batch.batch["response_mask"]
        batch.meta_info[POLICY_KEY] = driver.before_batch(mask, trainer.global_steps, dp_size, stage)
        batch.batch[ROW_KEY] = torch.arange(len(batch))
        try:
            output = update(batch)
        finally:
            batch.meta_info.pop(POLICY_KEY)
            batch.batch.pop(ROW_KEY)
        reports = reports_of(group, workers.ask)
        view = BatchView(batch.batch, batch.non_tensor_batch, is_critics=driver.model == "critic")
        output.meta_info["metrics"].update(driver.after_update(reports, view))
        return output, reports
