# SPDX-License-Identifier: Apache-2.0
"""verl 0.7's own config and FSDP around the tiny model; runs inside a rank of :mod:`tests.world`."""

from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from tests.world import DEVICE, SHARDING
from tests.world.configs import config_of
from tests.world.harness import own_scaler
from tests.world.models.fused import use_kernels


def make_config(overrides: list[str], dump_dir: str) -> Any:
    """verl's ppo_trainer config, for the tiny model."""
    base = [
        f"actor_rollout_ref.actor.strategy={SHARDING}",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",  # a third of an update; who means it says so
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=1",
        "trainer.project_name=tests",
        "trainer.experiment_name=harness",
    ]
    if find_spec("verl.utils.gradloc_seam") is not None:  # absent from unpatched verl, the baseline
        base.append(f"actor_rollout_ref.actor.bisect_dump_dir={dump_dir}")
    return config_of(base + overrides)


def shard(module: torch.nn.Module, actor_config: Any, model_config: Any) -> torch.nn.Module:
    """Wrap as verl's FSDP worker does: ``strategy`` fsdp or fsdp2, or not at all on ``none``."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy

    from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy, get_shard_placement_fn
    from verl.utils.torch_dtypes import PrecisionType
    from verl.workers.fsdp_workers import create_device_mesh, get_sharding_strategy

    fsdp = actor_config.fsdp_config
    dtype = PrecisionType.to_dtype(fsdp.dtype)
    reduced_in = PrecisionType.to_dtype((fsdp.get("mixed_precision") or {}).get("reduce_dtype", "fp32"))
    if model_config.enable_gradient_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mesh = create_device_mesh(world_size=dist.get_world_size(), fsdp_size=fsdp.fsdp_size)
    if actor_config.strategy == "fsdp":
        return FullyShardedDataParallel(
            module,
            auto_wrap_policy=get_fsdp_wrap_policy(module=module, config=None, is_lora=False),
            device_id=torch.device(DEVICE),
            sharding_strategy=get_sharding_strategy(mesh, fsdp.reshard_after_forward),
            mixed_precision=MixedPrecision(dtype, reduced_in, torch.float32),
            device_mesh=mesh,
            use_orig_params=fsdp.use_orig_params,
        )
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced_in, cast_forward_inputs=True)
    kwargs = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": fsdp.reshard_after_forward,
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if fsdp.offload_policy else None,  # pinned for a GPU alone
        "shard_placement_fn": get_shard_placement_fn(fsdp_size=mesh.shape[-1]),
    }
    apply_fsdp2(module, kwargs, fsdp)
    return module


def make_actor(config: Any, model: torch.nn.Module) -> Any:
    """Make an actor of this model, on this world's ranks.

    Args:
        config: verl's ``actor_rollout_ref``.
        model: not sharded yet.
    """
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.actor.dp_actor import DataParallelPPOActor

    settings = omega_conf_to_dataclass(config.actor)
    settings.ppo_mini_batch_size //= dist.get_world_size() // settings.ulysses_sequence_parallel_size
    use_kernels(model, config.model)
    module = shard(model.to(DEVICE), settings, config.model)
    trainable = [param for param in module.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=settings.optim.lr)
    actor = DataParallelPPOActor(settings, module, optimizer)
    if actor.scaler is not None:
        actor.scaler = own_scaler()
    return actor
