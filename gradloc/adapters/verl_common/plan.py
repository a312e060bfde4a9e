# SPDX-License-Identifier: Apache-2.0
"""Read the trained model's layout and load from verl's config before a run, without torch or verl."""

import math
from typing import Any

from omegaconf import OmegaConf

from ...core.memory_plans import logit_bytes
from ...forecast import Layout, Load, Plan

_PROCESS = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


def is_engine(config: Any) -> bool:
    """Return whether a config is verl 0.9's, whose V1 trainers have a block of their own."""
    return OmegaConf.select(config, "trainer.v1") is not None


class _Settings:
    """The trainer's whole config, in which a setting has one name or, over verl's versions, several."""

    def __init__(self, config: Any):
        self.config = config
        self.is_megatron = self.actor("strategy") == "megatron"

    def get(self, *keys: str, default: Any = None) -> Any:
        """Return the first of these settings that has a value."""
        values = (OmegaConf.select(self.config, key, throw_on_missing=False) for key in keys)
        return next((value for value in values if value is not None), default)

    def actor(self, *keys: str, default: Any = None) -> Any:
        """Return the first of these settings of the actor that has a value."""
        return self.get(*(f"{_PROCESS}.{key}" for key in keys), default=default)

    @property
    def gpus(self) -> int:
        each, nodes = int(self.get("trainer.n_gpus_per_node", default=8)), int(self.get("trainer.nnodes", default=1))
        if min(each, nodes) < 1:
            raise ValueError(f"trainer.nnodes and n_gpus_per_node must be at least 1, found {nodes} and {each}.")
        return each * nodes

    def parallel_sizes(self) -> tuple[int, int, int]:
        """Return the processes that hold a tensor, the stages, and the processes that hold a sequence."""
        if self.is_megatron:
            names = ("tensor_model", "pipeline_model", "context")
            tensor, pipeline, sequence = (self.actor(f"megatron.{name}_parallel_size", default=1) for name in names)
            return int(tensor), int(pipeline), int(sequence)
        name = "ulysses_sequence_parallel_size"
        return 1, 1, int(self.actor(f"fsdp_config.{name}", name, default=1))


def plan_of(config: Any) -> Plan:
    """Return the actor's layout and load; ``config`` is the trainer's whole one.

    Raises:
        ValueError: one sentence, where a size that has no default is missing.
    """
    settings = _Settings(config)
    tensor, pipeline, sequence = settings.parallel_sizes()
    ranks = max(settings.gpus // (tensor * pipeline * sequence), 1)
    fsdp_size = int(settings.actor("fsdp_config.fsdp_size", default=-1))
    is_whole = settings.is_megatron or not 0 < fsdp_size < settings.gpus
    mini_batch = int(settings.actor("ppo_mini_batch_size", default=256))
    num_mini_batches = math.ceil(int(settings.get("data.train_batch_size", default=mini_batch)) / mini_batch)
    return Plan(
        model=str(settings.get("actor_rollout_ref.model.path", default="")),
        layout=Layout(
            gpus=settings.gpus,
            shards=ranks * sequence if is_whole else fsdp_size,
            gpus_per_node=int(settings.get("trainer.n_gpus_per_node", default=8)),
            tensor=tensor,
            pipeline=pipeline,
            whole_bytes=6 if settings.is_megatron else 0,  # weights in half precision, their gradient in float32
            gathers_by_layer=not settings.is_megatron,
            is_offloaded=bool(settings.actor("fsdp_config.offload_policy")),
        ),
        load=_load(settings, max(mini_batch * int(settings.get(f"{_ROLLOUT}.n", default=1)) // ranks, 1), sequence),
        adapters=int(settings.get("actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.rank", default=0)),
        optimizer_steps=num_mini_batches * int(settings.actor("ppo_epochs", default=1)),
    )


def _load(settings: _Settings, rows: int, sequence: int) -> Load:
    """Return the work of a micro-batch, of a mini-batch of ``rows`` on each rank."""
    get, actor = settings.get, settings.actor
    longest = int(get("data.max_prompt_length", default=512)) + int(get("data.max_response_length", default=512))
    if actor("use_dynamic_bsz"):
        tokens = int(actor("ppo_max_token_len_per_gpu", default=16384))
        micro_batches = math.ceil(rows * longest / (tokens * sequence))
    else:
        size = actor("ppo_micro_batch_size_per_gpu")
        if size is None:
            key = f"{_PROCESS}.ppo_micro_batch_size_per_gpu"
            raise ValueError(f"{key} must be set while use_dynamic_bsz is off, found None.")
        tokens, micro_batches = int(size) * longest // sequence, math.ceil(rows / int(size))
    has_temperature = float(get(f"{_ROLLOUT}.temperature", default=1.0)) != 1
    has_entropy = bool(actor("calculate_entropy")) or float(actor("entropy_coeff", default=0)) != 0
    in_chunks = bool(actor("fsdp_config.entropy_from_logits_with_chunking", "entropy_from_logits_with_chunking"))
    is_fused = settings.is_megatron or bool(get("actor_rollout_ref.model.use_fused_kernels"))
    recomputes = get("actor_rollout_ref.model.enable_gradient_checkpointing", default=True)
    if settings.is_megatron:
        recomputes = actor("megatron.override_transformer_config.recompute_granularity")
    each_logit = logit_bytes(is_engine(settings.config) and has_temperature, has_entropy and not in_chunks)
    return Load(
        tokens=tokens,
        micro_batches=micro_batches,
        number_bytes=4 if str(actor("fsdp_config.dtype", default="bfloat16")) in ("float32", "fp32") else 2,
        is_checkpointed=bool(recomputes),
        logit_bytes=0.0 if is_fused else each_logit,
    )
