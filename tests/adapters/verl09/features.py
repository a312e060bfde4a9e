# SPDX-License-Identifier: Apache-2.0
"""What scenarios of features ask of verl 0.9's worker: log-probs of its own, analyses, stages, weights of clips."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.adapters.verl09 import harness
from tests.world.harness import everyones


class Features:
    """Methods for a rank's :class:`.conformance.Trainer`."""

    worker: Any
    trainer: Any
    grad_clip = property(lambda self: self.engine.optimizer_config.clip_grad)
    settings = property(lambda self: self.hook.settings)

    def analyze(self, batch: Any) -> dict[str, Any]:
        """Return the worker's answer to a request for an analysis."""
        from gradloc.adapters.verl09.engine import ASKED_KEY, AnalysisRequest, watch_actor
        from gradloc.config import GradLocConfig
        from verl.utils import tensordict_utils as tu

        watch_actor(self.worker)
        store = harness.Store()
        data = store.get(store.add(self.as_sampled(batch)).chunk(self.dp_size)[dist.get_rank()].keys)
        request = {name: value for name, value in batch.meta_info.items() if name.startswith("gradloc_num")}
        asked = {ASKED_KEY: AnalysisRequest(request, GradLocConfig())}
        tu.assign_non_tensor(data, temperature=1.0, compute_loss=True, calculate_entropy=False, **asked)
        self.worker.compute_log_prob(data)
        return self.worker.actor.engine.analysis_record

    def broken_loss(self, broken: Callable) -> AbstractContextManager[Any]:
        """While this is the loss."""
        loss = partial(broken, **self.worker.actor.loss_fn.keywords)
        return mock.patch.object(self.worker.actor, "loss_fn", loss)

    def update_by_hand(self, batch: Any, stage: torch.Tensor, name: str) -> None:
        """One update on these tokens, (R, T), of the batch, whose advantages elsewhere are 0."""
        from gradloc.adapters.verl09.trainer import _ACTOR, QueueUpdate, TrainerSide

        batch.batch["lopti_mask"] = stage
        if self.hook is None:
            self.trainer.gradloc = TrainerSide(self.trainer.config)
        with self.store:
            meta = self.store.add(batch)
            own = type(self.trainer).__bases__[-1]._update_actor
            update = QueueUpdate(self.trainer, _ACTOR, meta, partial(own, self.trainer, meta))
            self.hook._update(update, self.hook.spikes, self.hook.stabilizers, name)

    def as_sampled(self, batch: Any) -> Any:
        """With the actor's own log-probs for the old ones where verl 0.7 would take them for these."""
        if self.is_on_policy(batch):
            batch = copy.deepcopy(batch)
            batch.batch["old_log_probs"] = self.log_probs(batch)
        return batch

    def is_on_policy(self, batch: Any) -> bool:
        """Whether verl 0.7 would take the log-probs of the forward itself for the old ones: ratios are 1."""
        is_whole = len(batch) == self.config.ppo_mini_batch_size and self.config.ppo_epochs == 1
        return is_whole and getattr(getattr(self.trainer, "gradloc", None), "lopti", None) is None

    def log_probs(self, batch: Any) -> torch.Tensor:
        """The actor's (R, T), as verl 0.9's trainer has the workers compute them before every update."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import no_padding_2_padding

        store = harness.Store()
        meta = store.add(batch)
        rank = self.engine.get_data_parallel_rank()
        data = store.get(meta.chunk(self.dp_size)[rank].keys)
        half = max(1, len(data) // 2)  # an interleaved pipeline needs two micro-batches
        tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False, temperature=1.0)
        tu.assign_non_tensor(data, micro_batch_size_per_gpu=half)
        output = self.worker.compute_log_prob(data)  # a pipeline's last stage has it
        local = None if output is None else no_padding_2_padding(output["log_probs"], data)
        by_rank = {of: computed for of, computed in everyones((rank, local)) if computed is not None}
        found = batch.batch["old_log_probs"].clone()
        for row, values in zip(found, (values for of in sorted(by_rank) for values in by_rank[of]), strict=True):
            row[: len(values)] = values
        return found

    @property
    def loss_function(self) -> Any:
        """Training's: with the clips' weights."""
        from gradloc.adapters.verl09.step import with_token_weights
        from gradloc.stabilize.ratio_clip import TokenWeigher

        own = self.worker.actor.loss_fn
        if self.hook is None or not self.settings.stabilize.weighs_tokens:
            return own
        return with_token_weights(own, TokenWeigher(self.settings.stabilize), dict)
