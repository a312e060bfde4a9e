# SPDX-License-Identifier: Apache-2.0
"""A bundled event made runnable: verl's real actor around a given model, and the event's step on it.

Every micro-batch keeps the weight it had in the run: the run's accumulation factor, and its number of data-parallel
ranks instead of this machine's. FSDP averages over the processes there are, and one process without FSDP adds up, so
the loss is scaled by (processes here) / (ranks of the run).
"""

import contextlib
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl import DataProto
from verl.utils.device import get_device_id, get_device_name
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.actor.dp_actor import DataParallelPPOActor

from ...config import GradLocConfig
from ...core.gradients import GradientSpace
from ...core.step import Details, Outputs
from ...keys import ROW_KEY
from ...replay.bundle import Bundle, Entry
from ...replay.dealt import Replayed
from ...stabilize.config import StabilizeConfig
from ...stabilize.ratio_clip import TokenWeigher
from ..verl_common.loading import actor_config, clips_of, has_flash_attention, load
from ..verl_common.loading import start_processes as start_processes
from .hook import ActorHook
from .loss import own_loss
from .step import ActorStep


class ReplayActor(DataParallelPPOActor):
    """verl's actor with the run's loss weights, whatever it runs on now."""

    def __init__(self, config: Any, clips: StabilizeConfig, module: torch.nn.Module):
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its settings
            super().__init__(config, module)
        self.gradloc = ActorHook(self, GradLocConfig())  # of an actor that makes no step
        if clips.weighs_tokens:
            self.gradloc.weigher = TokenWeigher(clips)


class ReplayStep(Replayed, ActorStep):
    """The event's step, as far as the bundle holds it: this process's micro-batches, see :class:`Replayed`."""

    def __init__(self, actor: ReplayActor, bundle: Bundle, places: list[Entry | None], tick: Callable[[], Any]):
        self.places, self._tick = places, tick
        micro_batches = [_micro_batch(bundle, entry or bundle.layout[0]) for entry in places]
        # dp_size is what the gradient is averaged over here; the run's own is in the factor on each loss
        super().__init__(actor, micro_batches, bundle.meta.temperature, bundle.meta.on_policy, dist.get_world_size())
        self._of_run = dist.get_world_size() / bundle.dp_size

    def train(self, space: GradientSpace) -> None:
        """The training pass: puts the step's gradient into ``.grad`` and records what it leaves behind."""
        for index in range(self.num_micro_batches):
            self.recall(index)
            self.before_forward(index)
            outputs = ActorStep.forward(self, index)
            self.after_forward(index, outputs.log_prob, outputs.entropy)
            inputs = {**self._inputs(index), "old_log_probs": self._old_log_prob(index)}
            loss = own_loss(self.actor, inputs, outputs.log_prob, outputs.entropy, {}) * self._of_run
            loss = loss if self.actor.scaler is None else self.actor.scaler.scale(loss)
            self.trained(index, loss, outputs.log_prob)
        if self.numerics.loss_scale != 1.0:
            space.scale(1.0 / self.numerics.loss_scale)

    def details(self, micro_batch: int) -> Details:
        details = super().details(micro_batch)
        return replace(details, weights=details.weights * self._of_run)

    def coefficients_under(self, *args: Any, **given: Any) -> Outputs:
        found = super().coefficients_under(*args, **given)
        return Outputs(*(None if each is None else each * self._of_run for each in found))


def _micro_batch(bundle: Bundle, entry: Entry) -> DataProto:
    rows = slice(entry.first_row, entry.end_row)
    num_rows = bundle.tensors["responses"].shape[0]
    tensors = {name: value[rows] for name, value in bundle.tensors.items() if not name.startswith("rng.")}
    beside = {} if bundle.inputs is None else {"multi_modal_inputs": np.array([*bundle.inputs[rows], None])[:-1]}
    return DataProto.from_dict({**tensors, ROW_KEY: torch.arange(num_rows)[rows]}, non_tensors=beside)


def build_actor(bundle: Bundle, model_path: str) -> ReplayActor:
    """verl's actor around the model at ``model_path``, on this machine's processes.

    Raises:
        ReplayError: the model cannot be loaded, does not fit the bundle, or would not fit into memory.
    """
    config = _actor_config(bundle)
    dtype = PrecisionType.to_dtype(config.fsdp_config.dtype)
    clips, module = clips_of(bundle), load(model_path, bundle, dtype)
    if config.use_remove_padding or bundle.inputs is not None:
        from verl.models.transformers.monkey_patch import apply_monkey_patch

        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does
            apply_monkey_patch(model=module, use_remove_padding=config.use_remove_padding, ulysses_sp_size=1)
    return ReplayActor(config, clips, _place(module, config, dtype))


def _actor_config(bundle: Bundle) -> Any:
    given = {key: value for key, value in bundle.meta.actor.items() if key != "gradloc"}

    def adapt(actor: dict[str, Any]) -> None:
        # as verl's worker normalises them: the config counts prompts over all ranks, the actor sequences of one
        actor["ppo_mini_batch_size"] = actor["ppo_mini_batch_size"] * actor["rollout_n"] // bundle.dp_size
        if actor["ppo_micro_batch_size"] is not None:
            actor["ppo_micro_batch_size_per_gpu"] = actor["ppo_micro_batch_size"] // bundle.dp_size
        actor["spike_detection"] = False
        actor["use_remove_padding"] = actor["use_remove_padding"] and has_flash_attention()
        if not actor["use_dynamic_bsz"] and not actor["ppo_mini_batch_size"] >= actor["ppo_micro_batch_size_per_gpu"]:
            raise ValueError("ppo_micro_batch_size_per_gpu is larger than a rank's mini-batch")

    return actor_config(given, adapt)


def _place(module: torch.nn.Module, config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """On one process in float32 as it is; else by FSDP2 as in verl's worker, whose mixed precision is part of it."""
    size = dist.get_world_size()
    if size == 1 and dtype == torch.float32:
        return module.to(get_device_id())
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from verl.utils.fsdp_utils import apply_fsdp2

    mesh = init_device_mesh(get_device_name(), (size,), mesh_dim_names=("fsdp",))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=True)
    apply_fsdp2(module, {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": True}, config.fsdp_config)
    return module.to(get_device_id())
