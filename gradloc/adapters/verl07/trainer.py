# SPDX-License-Identifier: Apache-2.0
"""What verl's trainer calls: one object, one method per moment of a step; each goes on to the parts that are on."""

from typing import Any

import numpy as np
import torch

from ...keys import POLICY_KEY, ROW_KEY, SEQUENCE_KEY
from ...loop.batch import BatchView
from ...loop.driver import sequence_ids
from ...loop.wire import Policy
from ...names import refuse_unknown_names
from ...reweighting.stages import STAGE_MASK_KEY
from ...stabilize.memory import build_memory
from ..verl_common.needs import LOPTI, features_on
from ..verl_common.trainer import TrainerParts, Update, Workers, build_monitor, reweighting_of
from .analysis_trainer import build_analysis
from .refusals import SPIKES, check_critic, check_run, settings_of, settle
from .worker import report_of_actor, report_of_critic, watch_critic

_ACTOR = Workers("actor_rollout_wg", "actor", report_of_actor)
_CRITIC = Workers("critic_wg", "critic", report_of_critic)


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
    settle(config, settings)
    clip = clip_limit(config)
    hook = TrainerHook(
        settings,
        alpha=alpha,
        lopti=lopti,
        stabilizers=build_memory(settings.stabilize, "actor_rollout_ref.actor.grad_clip", clip),
        monitor=build_monitor(config, clip),
        analysis=build_analysis(trainer, settings.root),
    )
    hook.build_drivers(config, trainer.tokenizer)
    hook.trainer = trainer
    return hook


def clip_limit(config: Any) -> Any:
    """verl's bound on the norm of the actor's gradient: its FSDP workers', or its Megatron and engine workers'."""
    actor = config.actor_rollout_ref.actor
    is_engine = config.trainer.get("use_legacy_worker_impl", "auto") == "disable"
    if actor.get("strategy") in ("fsdp", "fsdp2") and not is_engine:
        return actor.get("grad_clip")
    return (actor.get("optim") or {}).get("clip_grad")


class BatchUpdate(Update):
    """An update on verl's DataProto."""

    output: Any = None
    """verl's DataProto, with ``metrics``."""
    dp_size = property(lambda self: self.trainer._get_dp_size(self.group, self.workers.mesh))

    def get(self, *names: str) -> list[torch.Tensor]:
        return [self.batch.batch[name] for name in names]

    def put(self, **tensors: torch.Tensor) -> None:
        for name, values in tensors.items():
            self.batch.batch[name] = values

    def view(self) -> BatchView:
        return BatchView(self.batch.batch, self.batch.non_tensor_batch, is_critics=self.workers is _CRITIC)

    def run(self, policy: Policy) -> dict[str, Any]:
        self.batch.meta_info[POLICY_KEY] = policy
        self.batch.batch[ROW_KEY] = torch.arange(len(self.batch))
        try:
            self.output = self.of_verl(self.batch)
        finally:
            self.batch.meta_info.pop(POLICY_KEY)
            self.batch.batch.pop(ROW_KEY)
        return self.output.meta_info["metrics"]


class TrainerHook(TrainerParts):
    """The parts that are on, behind the calls that verl's trainer makes."""

    trainer: Any = None

    def begin_fit(self, tracking: Any) -> None:
        super().begin_fit(tracking)
        if self.critic is not None:
            self.trainer.critic_wg.execute_with_func_generator(watch_critic)
            of_verl = self.trainer.critic_wg.update_critic

            def update_critic(batch: Any) -> Any:
                update = BatchUpdate(self.trainer, _CRITIC, batch, of_verl)
                self.update_critic(update)
                return update.output

            self.trainer.critic_wg.update_critic = update_critic

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
        """Right after the estimator."""
        self.reweight(BatchUpdate(self.trainer, _ACTOR, batch), metrics)

    def analyze(self, trainer: Any, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float]) -> bool:
        """Just before the actor's update: the gradient analyses; returns whether the run is to end here."""
        return self.analysis is not None and self.analysis.run(trainer, batch, metrics, timing_raw)

    def update(self, trainer: Any, batch: Any) -> Any:
        """The actor's update on verl's DataProto; returns verl's, with ``metrics``."""
        of_verl = trainer.actor_rollout_wg.update_actor
        if not self.is_in_update:
            return of_verl(batch)
        update = BatchUpdate(trainer, _ACTOR, batch, of_verl)
        try:
            metrics = self.update_actor(update)
        finally:
            batch.batch.pop(STAGE_MASK_KEY, None)
        update.output.meta_info["metrics"] = metrics
        return update.output

    def after_step(self, batch: Any, metrics: dict[str, Any], global_step: int) -> None:
        """Just before the step's metrics are logged."""
        self.judge(BatchView(batch.batch, batch.non_tensor_batch), metrics, global_step)
