# SPDX-License-Identifier: Apache-2.0
"""The gradient analyses and the rollout filter in verl's trainer."""

import copy
import math
from typing import Any, Optional

import numpy as np
import torch

from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor

from ...analysis.config import check_geometry
from ...analysis.reporter import Batch
from ...rollout_filter.choose import kept_groups
from ...rollout_filter.groups import groups_of
from ..verl_common.analyses import (
    FILLER,
    VerlAnalyses,
    analyses_in,
    checked,
    drawn_prompts,
    hand_over,
    prepared_by,
    refuse_pictures,
    twin_of,
)
from ..verl_common.needs import BUCKETS, QUARTILES
from .analysis_actor import RECORD_KEY
from .refusals import check_run

_ACTOR_KEYS = ("responses", "response_mask", "input_ids", "attention_mask", "position_ids", "old_log_probs")
_ACTOR_KEYS += ("advantages", "ref_log_prob", "rollout_is_weights", "rollout_log_probs")
"""What the actor's loss may read."""


def build_analysis(trainer: Any, root: str) -> Optional["Analysis"]:
    """The analyses and rollout filter of verl's ``RayPPOTrainer``, its data loaded; None while all are off. What is
    found is written under ``root``.

    Raises:
        ValueError: one sentence that names a key with a bad value, also while the features are off.
    """
    config = trainer.config
    settings = analyses_in(config)
    if settings is None:
        return None
    buckets, quartiles, _ = settings
    if buckets is not None:
        check_run(BUCKETS, config)
        check_geometry(buckets, config, len(trainer.train_dataset))
    if quartiles is not None:
        check_run(QUARTILES, config)
    return Analysis(config, root, settings)


class Analysis(VerlAnalyses):
    """See there."""

    def filter(self, trainer: Any, batch: Any, rewards: torch.Tensor, extras: dict[str, Any], metrics: dict) -> tuple:
        """Keep the groups of rollouts that the filter chooses.

        Args:
            trainer: balances the smaller batch and knows the ranks.
            batch: with uid, response_mask and attention_mask.
            rewards: (R, T) token-level scores.
            extras: per-row lists that the reward function returned.
            metrics: of the step; ``rollout/*`` is added.

        Returns:
            batch, rewards and extras of the rows kept.
        """
        groups = groups_of(batch.non_tensor_batch["uid"], rewards, batch.batch["response_mask"])
        choice = kept_groups(groups, self.chosen, _num_ranks(trainer), metrics)
        if choice is None:
            return batch, rewards, extras
        kept, self.counts = choice
        if len(kept) == len(groups):
            return batch, rewards, extras
        rows = np.flatnonzero(np.isin(groups.of_row, kept))
        batch.batch["token_level_scores"] = rewards  # travels with the rows; fit() sets it to the same later
        batch.non_tensor_batch.update({key: np.array(value) for key, value in extras.items()})
        batch = batch.select_idxs(rows)
        if trainer.config.trainer.balance_batch:
            trainer._balance_batch(batch, metrics=metrics)
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        rewards = batch.batch.pop("token_level_scores")
        return batch, rewards, {key: batch.non_tensor_batch[key].tolist() for key in extras}

    def run(self, trainer: Any, batch: DataProto, metrics: dict[str, Any], timing_raw: dict[str, float]) -> bool:
        """Just before the actor's update: scale the filtered batch's advantages, and analyse where the step is due.
        Adds to the step's metrics and timings; returns whether the run is to end here."""
        self.trainer = trainer
        self.scale_advantages(batch)
        return self.analyse(lambda feature: self.seen(batch, feature), trainer.global_steps, metrics, timing_raw)

    def scale_advantages(self, batch: DataProto) -> None:
        if self.scale != 1.0:
            batch.batch["advantages"] = batch.batch["advantages"] * self.scale

    def seen(self, batch: DataProto, feature: str) -> Batch:
        def ask(tensors: dict[str, torch.Tensor], meta_info: dict[str, Any]) -> list[dict[str, Any]]:
            refuse_pictures(feature, batch.non_tensor_batch.get("multi_modal_inputs", ()))
            return _ask_workers(self.trainer, batch, tensors, meta_info)

        return Batch(batch.batch, batch.non_tensor_batch["uid"], self.counts, ask)

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
        # fit() counts from what the checkpoint says to the step that comes after it
        twin._load_checkpoint = lambda: setattr(twin, "global_steps", trainer.global_steps - 1)
        twin.gradloc = copy.copy(trainer.gradloc)
        twin.gradloc.begin_fit = lambda tracking: None  # the twin's has no trackers, and the trainer's is begun
        twin.gradloc.analyze = lambda trainer, batch, *_: hand_over(batch)
        twin._update_critic = hand_over
        return prepared_by(twin.fit)


def _num_ranks(trainer: Any) -> int:
    """What the number of rows must be a multiple of."""
    sizes = [trainer._get_dp_size(trainer.actor_rollout_wg, "actor")]
    if trainer.use_critic:
        sizes.append(trainer._get_dp_size(trainer.critic_wg, "critic"))
    return math.lcm(*sizes)


def _ask_workers(
    trainer: Any, batch: DataProto, tensors: dict[str, torch.Tensor], meta_info: dict[str, Any]
) -> list[dict[str, Any]]:
    """Deal the rows that the actor needs out to the ranks evenly, and have its workers analyse them."""
    data = batch.select([key for key in _ACTOR_KEYS if key in batch.batch.keys()], [], [])
    for key, values in tensors.items():
        data.batch[key] = values
    data, num_filling = pad_dataproto_to_divisor(data, trainer._get_dp_size(trainer.actor_rollout_wg, "actor"))
    if num_filling:
        for key in tensors:
            data.batch[key][-num_filling:] = FILLER
    data.meta_info = {"temperature": trainer.config.actor_rollout_ref.rollout.temperature, **meta_info}
    return checked(trainer.actor_rollout_wg.analyze_gradients(data).meta_info["metrics"][RECORD_KEY])
