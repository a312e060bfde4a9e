# SPDX-License-Identifier: Apache-2.0
"""The gradient analyses and the rollout filter in verl's V1 trainers.

A batch is filled up with padding rows to whole mini-batches, by verl itself. An analysis does not see them; they go
last to the workers, which run them for the sake of their peers and count them for nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import transfer_queue as tq

from ....analysis.config import check_geometry, check_separate
from ....analysis.reporter import Batch
from ....rollout_filter.choose import kept_groups
from ....rollout_filter.groups import groups_of
from ...verl_common.analyses import (
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
from ...verl_common.reports import reports_of
from ..batch import fetch, put, view_of
from .engine import ASKED_KEY, Asked, record_of_actor

_PARTITION = "train"
"""Of verl's queue: where its agent loop puts whatever is no validation's."""


def build_analysis(config: Any, settings: Any) -> "Analysis | None":
    """The trainer's analyses and rollout filter, or None while all are off.

    Args:
        config: the trainer's whole config.
        settings: those that hold under ``gradloc``.

    Raises:
        ValueError: one sentence that names a key with a bad value, also while the features are off.
    """
    of_analyses = analyses_in(config)
    if of_analyses is None:
        return None
    mode, buckets = config.trainer.v1.trainer_mode, of_analyses[0]
    if buckets is not None and mode != "sync":
        check_separate(buckets, f"trainer.v1.trainer_mode={mode} rolls out further training batches meanwhile")
    return Analysis(config, settings, of_analyses)


class Analysis(VerlAnalyses):
    """See there."""

    def __init__(self, config: Any, settings: Any, of_analyses: tuple):
        super().__init__(config, settings.root, of_analyses)
        self.settings = settings
        self._temperature = config.actor_rollout_ref.rollout.temperature
        self._last_step = 0
        self._afterwards = ExitStack()

    def check_data(self, config: Any, num_prompts: int) -> None:
        """Refuse an analysis batch that could not be drawn: see :func:`~....analysis.config.check_geometry`."""
        if self.buckets is not None:
            check_geometry(self.buckets.settings, config, num_prompts)

    def filter(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Once rewards are known: verl's ``KVBatchMeta`` with the rows to train on; the others are dropped from the
        queue. Adds ``rollout/*`` to the step's metrics."""
        data = fetch(batch, ["rm_scores", "response_mask", "uid"])
        scores, mask = (data[name].to_padded_tensor(0) for name in ("rm_scores", "response_mask"))
        groups = groups_of(list(data["uid"]), scores, mask)
        choice = kept_groups(groups, self.chosen, num_ranks=1, metrics=metrics)  # verl fills up to whole mini-batches
        if choice is None:
            return batch
        kept, self.counts = choice
        keys, dropped = _parted(batch.keys, np.isin(groups.of_row, kept))
        if dropped:
            tq.kv_clear(keys=dropped, partition_id=batch.partition_id)
            batch = batch.select_keys(keys)
        return batch

    def run(self, trainer: Any, batch: Any, metrics: dict[str, Any]) -> bool:
        """Just before the actor's update: scale the filtered batch's advantages, and analyse where the step is due, of
        several updates before the first. Adds to the step's metrics; returns whether the run is to end here."""
        self.scale_advantages(batch)
        step = trainer.global_steps
        if step == self._last_step:
            return False
        self.trainer, self._last_step = trainer, step
        with ExitStack() as self._afterwards:
            timing = getattr(trainer, "timing_raw", {})
            return self.analyse(lambda feature: self.seen(batch, feature), step, metrics, timing)

    def _separate(self, seed: int) -> Batch:
        self._afterwards.callback(_clear_all_but, _keys_in_queue())
        return super()._separate(seed)

    def scale_advantages(self, batch: Any) -> None:
        if self.scale != 1.0:
            put(batch, {"advantages": fetch(batch, ["advantages"])["advantages"] * self.scale})

    def seen(self, batch: Any, feature: str) -> Batch:
        fillers, real = _parted(batch.keys, [tag.get("is_padding", False) for tag in batch.tags])
        view, whole = view_of(batch.select_keys(real)), batch.select_keys([*real, *fillers])

        def ask(tensors: Mapping[str, torch.Tensor], request: Mapping[str, Any]) -> list[dict[str, Any]]:
            refuse_pictures(feature, view.labels["multi_modal_inputs"])
            put(whole, {key: _filled_up(values, len(fillers)) for key, values in tensors.items()})
            whole.extra_info |= {"compute_loss": True, "calculate_entropy": False, "temperature": self._temperature}
            whole.extra_info[ASKED_KEY] = Asked(dict(request), self.settings)
            self.trainer.actor_rollout_wg.compute_log_prob(whole)
            return checked(reports_of(self.trainer.actor_rollout_wg, record_of_actor))

        return Batch(view.tensors, view.labels["uid"], self.counts, ask)

    @staticmethod
    def prepare(trainer: Any, num_groups: int, group_size: int, seed: int) -> Any:
        """The rollouts are asleep before; the batch's rows stay in verl's queue until they are cleared from it."""
        prompts = drawn_prompts(trainer, num_groups, seed)
        prompts["__rollout_n__"] = torch.full((num_groups,), group_size)  # verl's agent loop keeps a config of its own
        changes = {
            "actor_rollout_ref.rollout.n": group_size,
            "data.train_batch_size": num_groups,
            "data.gen_batch_size": None,
            "algorithm.filter_groups": None,  # which would have further training prompts rolled out
            "trainer.v1.sampler.sync_refill_failed_groups": False,
        }
        twin = twin_of(trainer, changes)
        twin.train_dataloader_it = iter([prompts])
        twin.replay_buffer = twin._build_replay_buffer()
        twin.curr_step_profile = False
        twin._update_critic = twin._update_actor = hand_over
        # verl has dropped the engine's weights after the training batch; the policy is still that of the last step
        trainer.checkpoint_manager.update_weights(trainer.global_steps - 1)
        return prepared_by(lambda: twin.step({}, {}))


def _parted(keys: Sequence[str], is_it: Iterable[bool]) -> tuple[list[str], list[str]]:
    """Those of which it is true, and the others."""
    pairs = list(zip(keys, is_it, strict=True))
    return [key for key, holds in pairs if holds], [key for key, holds in pairs if not holds]


def _keys_in_queue() -> set[str]:
    return set(tq.kv_list(_PARTITION).get(_PARTITION, ()))


def _clear_all_but(keys: set[str]) -> None:
    """What an analysis has left, also one that failed: the trainer would take it for training rollouts."""
    if others := _keys_in_queue() - keys:
        tq.kv_clear(keys=list(others), partition_id=_PARTITION)


def _filled_up(values: torch.Tensor, num_rows: int) -> torch.Tensor:
    """With further rows of fillers; a queue wants two dimensions."""
    values = values.view(len(values), -1)
    return torch.cat([values, values.new_full((num_rows, values.shape[1]), FILLER)])
