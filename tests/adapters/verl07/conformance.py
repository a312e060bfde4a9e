# SPDX-License-Identifier: Apache-2.0
"""verl 0.7's real actor in the conformance suite, and the driver's part of one trainer step, without Ray.

Everything below the worker class is the real thing: DataParallelPPOActor, FSDP, the config composed from verl's own
yaml, the batch dealt out to ranks as verl's dispatch does.
"""

import contextlib
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.adapters.verl07.features import Features
from tests.adapters.verl07.harness import make_actor, make_config
from tests.world import DEVICE
from tests.world.harness import Decoder, HeldTrainer, LetOut, answer_of, asked, for_verl, model_of, part
from tests.world.models.ulysses import attention_of_verl, plain_padding
from tests.world.models.vision import pictures_of

STEP = "adapters.verl07.step.ActorStep"


@dataclass
class Trainer(Features, HeldTrainer):
    """One rank's actor, and what its hook asks of verl's trainer."""

    actor: Any
    config: Any
    gradloc: Any = None
    sequence_mesh: Any = None
    global_steps: int = 0
    train_dataset: Any = range(100)
    schedule: Any = None
    """Schedule of the learning rate; None where a test does not ask for one."""

    tokenizer = Decoder()
    has_driver = is_sharded = trains_padding = True
    hook = property(lambda self: self.gradloc)
    module = property(lambda self: self.actor.actor_module)
    scaler = property(lambda self: self.actor.scaler)
    optimizer = property(lambda self: self.actor.actor_optimizer)
    driver = property(lambda self: None if self.hook is None else self.hook.spikes)
    sp_size = property(lambda self: self.actor.ulysses_sequence_parallel_size)
    dp_size = property(lambda self: dist.get_world_size() // self.sp_size)
    rows_each = property(lambda self: self.actor.config.ppo_micro_batch_size_per_gpu)
    rows_per_step = property(lambda self: self.actor.config.ppo_mini_batch_size)
    has_entropy = property(lambda self: self.actor.config.calculate_entropy or self.actor.config.entropy_coeff != 0)
    clips_in = property(lambda self: (self.actor, "_clip_grad_norm"))
    pictures = staticmethod(pictures_of)

    def _get_dp_size(self, worker_group: Any, role: str) -> int:
        return self.dp_size

    def run(self, batch: Any) -> dict[str, Any]:
        batch.meta_info["temperature"] = 1.0
        if self.hook is not None:
            self.hook.begin_step(batch, SimpleNamespace(logger=self.trackers))
            self.hook.after_advantages(batch, {})
            self.worker = SimpleNamespace(actor=self.actor, actor_lr_scheduler=self.schedule)
            self.actor_rollout_wg = SimpleNamespace(execute_with_func_generator=partial(asked, self.worker))
        return self._update_actor(batch).meta_info["metrics"]

    def _update_actor(self, batch: Any) -> Any:  # the trainer's, which the hook surrounds
        return self.update_actor(batch)

    def update_actor(self, batch: Any) -> Any:
        """Deal the rows out, update, and bring the metrics together, as verl's worker group does."""
        from verl.workers.sharding_manager.fsdp_ulysses import FSDPUlyssesShardingManager

        local = batch.chunk(self.dp_size)[dist.get_rank() // self.sp_size]
        attention = contextlib.nullcontext()
        if self.actor.use_remove_padding:  # in place of flash attention
            attention = plain_padding() if self.sequence_mesh is None else attention_of_verl()
        with attention, FSDPUlyssesShardingManager(self.sequence_mesh):
            metrics = self.actor.update_policy(local)
        if self.schedule is not None:
            self.worker.actor_lr_scheduler.step()
        return answer_of(batch, metrics)

    def loss(self, batch: Any, rows: slice, log_prob: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
        config, part_of = self.actor.config, batch[rows]
        inputs = {**part_of.batch, **part_of.non_tensor_batch}
        if len(batch) == self.dp_size * config.ppo_mini_batch_size and config.ppo_epochs == 1:  # on policy
            inputs["old_log_probs"] = log_prob.detach()
        return part("adapters.verl07.step").own_loss(self.actor, inputs, log_prob, entropy, {})

    def letting_out(self, let_out: LetOut) -> contextlib.AbstractContextManager[Any]:
        original = self.actor._forward_micro_batch

        def forward(inputs: Any, **given: Any) -> Any:
            entropy, log_prob = original(inputs, **given)
            return entropy, let_out(inputs["responses"], log_prob)

        return mock.patch.object(self.actor, "_forward_micro_batch", forward)


def make_trainer(overrides: list[str], dump_dir: str, dropout: float = 0.0, model: Any = None) -> Trainer:
    """Make an actor on this world's ranks, and the matching driver (None when spike_detection is off)."""
    if dist.get_rank() != 0:  # in verl one process, the trainer's, writes
        dump_dir = f"{dump_dir}-rank{dist.get_rank()}"
    config = make_config([override for override in for_verl(overrides) if override != "lora"], dump_dir)
    trainer = Trainer(None, config)
    try:
        from verl.utils.gradloc_seam import Off, build_trainer_hook
    except ImportError:  # unpatched verl, the baseline of the bit-identity tests
        pass
    else:
        hook = build_trainer_hook(trainer)
        trainer.gradloc = None if isinstance(hook, Off) else hook
    trainer.actor = make_actor(config.actor_rollout_ref, model_of(overrides, dropout) if model is None else model)
    if trainer.sp_size > 1:
        sizes = trainer.dp_size, trainer.sp_size
        trainer.sequence_mesh = init_device_mesh(DEVICE, sizes, mesh_dim_names=("dp", "sp"))
    return trainer
