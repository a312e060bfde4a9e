# SPDX-License-Identifier: Apache-2.0
"""Hook that verl's trainer calls: one method for each moment of a step, which calls the parts that are on."""

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from verl.protocol import pad_dataproto_to_divisor

from ...config import PUBLISHED, GradLocConfig
from ...keys import POLICY_KEY, ROW_KEY, SEQUENCE_KEY
from ...loop.batch import BatchView
from ...loop.driver import sequence_ids
from ...loop.messages import Policy
from ...private_api import extended
from ...reweighting.stages import STAGE_MASK_KEY
from ..verl_common.analyses import FILLER, VerlAnalyses, drawn_prompts, hand_over, prepared_by, twin_of
from ..verl_common.requirements import asked_of
from ..verl_common.trainer import Checkpointed, TrainerFeatures, Workers, WorkersUpdate
from .hook import ASKED_KEY, RECORD_KEY, watch_actor, watch_critic

_ACTOR = Workers("actor_rollout_wg", "actor", "actor.gradloc.report", watch_actor)
_CRITIC = Workers("critic_wg", "critic", "critic._watch.report", watch_critic)


def build_trainer_hook(trainer: Any) -> "TrainerHook":
    """Return the hook of verl's ``RayPPOTrainer``, once its data is loaded, and put :class:`Watched` before its class.

    Raises:
        ValueError: one sentence, for a setting that is wrong or that these workers do not have.
    """
    config, hook = trainer.config, TrainerHook()
    asked = asked_of(config, ["0.7"])
    settle(config, asked.settings)
    hook.switch_on(config, asked, "actor_rollout_ref.actor.grad_clip", clip_limit(config))
    if asked.analyses is not None:
        hook.analysis = RayTrainerAnalyses(config, asked.settings.root, asked.analyses)
        hook.analysis.check_data(len(trainer.train_dataset))
    hook.build_drivers(config, trainer.tokenizer, ["0.7"])
    trainer.__class__ = extended(type(trainer), WatchedRayTrainer)
    return hook


def settle(config: Any, settings: GradLocConfig) -> None:
    """Write the effective settings into the trainer's config, before any worker gets it.

    Each of the four published settings is written under both of its names; the block's ``_target_`` makes verl's worker
    build its dataclass.
    """
    actor = config.actor_rollout_ref.actor
    settled = {"_target_": "verl.utils.gradloc_seam.settings", **asdict(settings)}
    values = (bool(settings.enable), settings.trigger.tau, settings.budget, settings.dump_dir, settled)
    for name, value in zip((*PUBLISHED, "gradloc"), values, strict=True):
        OmegaConf.update(actor, name, value, merge=False, force_add=True)


def clip_limit(config: Any) -> Any:
    """Return verl's bound on the norm of the actor's gradient, of FSDP, Megatron or engine workers."""
    actor = config.actor_rollout_ref.actor
    is_engine = config.trainer.get("use_legacy_worker_impl", "auto") == "disable"
    if actor.get("strategy") in ("fsdp", "fsdp2") and not is_engine:
        return actor.get("grad_clip")
    return (actor.get("optim") or {}).get("clip_grad")


class BatchUpdate(WorkersUpdate):
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
        self.watch()
        self.batch.meta_info[POLICY_KEY] = policy
        self.batch.batch[ROW_KEY] = torch.arange(len(self.batch))
        try:
            self.output = self.original(self.batch)
        finally:
            self.batch.meta_info.pop(POLICY_KEY)
            self.batch.batch.pop(ROW_KEY)
        return self.output.meta_info["metrics"]


class TrainerHook(TrainerFeatures):
    """Hook that the patched trainer calls at each step, in the order of the methods."""

    def begin_step(self, batch: Any, tracking: Any) -> None:
        """Name every sequence of verl's DataProto, before the rollouts of a prompt are reordered."""
        self.begin_fit(tracking)
        if self.spikes is None and self.critic is None:
            return
        batch.non_tensor_batch[SEQUENCE_KEY] = np.array(sequence_ids(batch.non_tensor_batch["uid"]), dtype=object)

    def filter(self, trainer: Any, batch: Any, rewards: torch.Tensor, extras: dict[str, Any], metrics: dict) -> tuple:
        """Keep the groups of rollouts that the filter chooses, once rewards are known.

        Args:
            trainer: balances the smaller batch and knows the ranks.
            batch: with uid, response_mask and attention_mask.
            rewards: (R, T) token-level scores.
            extras: per-row lists that the reward function returned.
            metrics: of the step; ``rollout/*`` is added.

        Returns:
            batch, rewards and extras of the rows kept.
        """
        is_kept = None
        if self.analysis is not None:
            uids, mask = batch.non_tensor_batch["uid"], batch.batch["response_mask"]
            is_kept = self.analysis.kept_rows(uids, rewards, mask, _row_divisor(trainer), metrics)
        if is_kept is None:
            return batch, rewards, extras
        batch.batch["token_level_scores"] = rewards  # selected with the other tensors; fit() sets the same later
        batch.non_tensor_batch.update({key: np.array(value) for key, value in extras.items()})
        batch = batch.select_idxs(np.flatnonzero(is_kept))
        if trainer.config.trainer.balance_batch:
            trainer._balance_batch(batch, metrics=metrics)
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        rewards = batch.batch.pop("token_level_scores")
        return batch, rewards, {key: batch.non_tensor_batch[key].tolist() for key in extras}

    def after_advantages(self, batch: Any, metrics: dict[str, Any]) -> None:
        """Reweight advantages, right after the estimator."""
        self.reweight(BatchUpdate(None, _ACTOR, batch), metrics)

    def analyze(self, trainer: Any, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float]) -> bool:
        """Run the gradient analyses, just before the actor's update; returns whether the run is to end here."""
        if self.analysis is None:
            return False
        update = BatchUpdate(trainer, _ACTOR, batch)
        update.watch()
        return self.analysis.run(update, metrics, timing_raw)

    def after_step(self, batch: Any, metrics: dict[str, Any], global_step: int) -> None:
        """Add metrics, just before the step's are logged."""
        self.judge(BatchView(batch.batch, batch.non_tensor_batch), metrics, global_step)


class WatchedRayTrainer(Checkpointed):
    """Hooks around the updates of verl's trainer; the class is mixed in before it."""

    def _update_actor(self, batch: Any) -> Any:
        update = BatchUpdate(self, _ACTOR, batch, super()._update_actor)
        if not self.gradloc.is_in_update:
            return update.original(batch)
        try:
            metrics = self.gradloc.update_actor(update)
        finally:
            batch.batch.pop(STAGE_MASK_KEY, None)
        update.output.meta_info["metrics"] = metrics
        return update.output

    def _update_critic(self, batch: Any) -> Any:
        update = BatchUpdate(self, _CRITIC, batch, super()._update_critic)
        if self.gradloc.critic is None:
            return update.original(batch)
        self.gradloc.update_critic(update)
        return update.output


_ACTOR_KEYS = ("responses", "response_mask", "input_ids", "attention_mask", "position_ids", "old_log_probs")
_ACTOR_KEYS += ("advantages", "ref_log_prob", "rollout_is_weights", "rollout_log_probs")
"""Tensors that the actor's loss may read."""


class RayTrainerAnalyses(VerlAnalyses):
    """Analyses and rollout filter of verl's ``RayPPOTrainer``."""

    def ask(
        self, update: WorkersUpdate, tensors: Mapping[str, torch.Tensor], request: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Ask by verl's own call for an update. Rows that fill up the ranks are marked as such."""
        batch, trainer = update.batch, update.trainer
        data = batch.select([key for key in _ACTOR_KEYS if key in batch.batch.keys()], [], [])
        tensors = {**tensors, ROW_KEY: torch.arange(len(data))}
        for key, values in tensors.items():
            data.batch[key] = values
        data, num_filling = pad_dataproto_to_divisor(data, update.dp_size)
        if num_filling:
            for key in tensors:
                data.batch[key][-num_filling:] = FILLER
        data.meta_info = {
            "temperature": trainer.config.actor_rollout_ref.rollout.temperature,
            "global_token_num": data.batch["attention_mask"].sum(-1).tolist(),  # verl's worker counts flops
            ASKED_KEY: request,
        }
        return update.group.update_actor(data).meta_info["metrics"][RECORD_KEY]

    @staticmethod
    def prepare(trainer: Any, num_groups: int, group_size: int, seed: int) -> Any:
        prompts = drawn_prompts(trainer, num_groups, seed)
        changes = {
            "actor_rollout_ref.rollout.n": group_size,
            "actor_rollout_ref.rollout.skip_rollout": False,
            "trainer.logger": [],
            "trainer.critic_warmup": 0,
            "trainer.val_before_train": False,
            "trainer.total_epochs": trainer.global_steps + 1,
            "global_profiler.steps": None,
        }
        twin = twin_of(trainer, changes)
        twin.train_dataloader = [prompts]
        twin.val_reward_fn = None
        # fit() begins at the step after the checkpoint's
        twin._load_checkpoint = lambda: setattr(twin, "global_steps", trainer.global_steps - 1)
        twin.gradloc = copy.copy(trainer.gradloc)
        twin.gradloc.begin_fit = lambda tracking: None  # the trainer's own has begun, with its trackers
        twin.gradloc.analyze = lambda trainer, batch, *_: hand_over(batch)
        twin._update_critic = hand_over
        return prepared_by(twin.fit)


def _row_divisor(trainer: Any) -> int:
    """Return the number that a batch's rows must be a multiple of, so that each rank gets as many."""
    sizes = [trainer._get_dp_size(trainer.actor_rollout_wg, "actor")]
    if trainer.use_critic:
        sizes.append(trainer._get_dp_size(trainer.critic_wg, "critic"))
    return math.lcm(*sizes)
