# SPDX-License-Identifier: Apache-2.0
"""What scenarios of features ask of verl 0.7's actor: log-probs of its own, analyses, stages."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.world.harness import part


class Features:
    """Methods for a rank's :class:`.conformance.Trainer`."""

    actor: Any
    grad_clip = property(lambda self: self.actor.config.grad_clip)
    settings = property(lambda self: self.actor.config.gradloc)
    steps_in = property(lambda self: (self.actor, "_optimizer_step"))
    """Owner and name of the method that takes the whole gradient, not clipped yet."""
    rows_each: Any
    update_actor: Any

    def local(self, batch: Any) -> Any:
        """This rank's rows, with the temperature that verl sends along."""
        batch.meta_info["temperature"] = 1.0
        local = batch.chunk(dist.get_world_size())[dist.get_rank()]
        local.batch.lock_()  # as it comes out of Ray
        return local

    def analyze(self, batch: Any) -> dict[str, Any]:
        """Return the worker's answer to a request for an analysis."""
        hook, local = part("adapters.verl07.hook"), self.local(batch)
        hook.watch_actor(SimpleNamespace(actor=self.actor, actor_lr_scheduler=None))
        request = {name: value for name, value in batch.meta_info.items() if name.startswith("gradloc_num")}
        local.meta_info = {"temperature": 1.0, hook.ASKED_KEY: request}
        return type(self.actor).update_policy(self.actor, local)[hook.ASKED_KEY]  # a test may have broken this one's

    def broken_loss(self, broken: Callable) -> AbstractContextManager[Any]:
        """While this is the loss."""
        return mock.patch.object(self.actor, "update_policy", broken)

    def update_by_hand(self, batch: Any, stage: torch.Tensor, name: str) -> None:
        """One update on these tokens, (R, T), of the batch, whose advantages elsewhere are 0."""
        hook, settings = part("adapters.verl07.hook"), part("config").GradLocConfig()
        self.actor.gradloc = hook.ActorHook(self.actor, settings)  # of a run in which something is on
        batch.meta_info["temperature"] = 1.0
        batch.batch["lopti_mask"] = stage
        self.update_actor(batch)

    def log_probs(self, batch: Any) -> torch.Tensor:
        """Return the actor's log-prob of each response token, (B, T)."""
        data = batch.select(["responses", "input_ids", "attention_mask", "position_ids"], [], [])
        data.meta_info = {"micro_batch_size": self.rows_each, "temperature": 1.0, "use_dynamic_bsz": False}
        return self.actor.compute_log_prob(data)[0]
