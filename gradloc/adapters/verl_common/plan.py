# SPDX-License-Identifier: Apache-2.0
"""Reads the trained model's layout and load from verl's config before a run, without torch or verl."""

from typing import Any

from omegaconf import OmegaConf

from ...core.memory_plans import logit_bytes
from ...forecast import Layout, Load, Plan

_PROCESS = "actor_rollout_ref.actor"


def is_engine(config: Any) -> bool:
    """Return whether a config is verl 0.9's, whose V1 trainers have a block of their own."""
    return OmegaConf.select(config, "trainer.v1") is not None


def plan_of(config: Any) -> Plan:
    """The actor's layout and load; ``config`` is the trainer's whole one.

    Raises:
        ValueError: one sentence, where a size that has no default is missing.
    """

    def get(*keys: str, default: Any = None) -> Any:
        found = (OmegaConf.select(config, key, throw_on_missing=False) for key in keys)
        return next((value for value in found if value is not None), default)

    def actor(*keys: str, default: Any = None) -> Any:
        return get(*(f"{_PROCESS}.{key}" for key in keys), default=default)

    on_host = int(get("trainer.n_gpus_per_node", default=8))
    gpus = on_host * int(get("trainer.nnodes", default=1))
    is_megatron = actor("strategy") == "megatron"
    if is_megatron:
        names = ("tensor_model", "pipeline_model", "context")
        tensor, pipeline, sequence = (int(actor(f"megatron.{name}_parallel_size", default=1)) for name in names)
    else:
        ulysses = actor("fsdp_config.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size", default=1)
        tensor, pipeline, sequence = 1, 1, int(ulysses)
    ranks = max(gpus // (tensor * pipeline * sequence), 1)
    fsdp_size = int(actor("fsdp_config.fsdp_size", default=-1))
    shards = ranks * sequence if is_megatron or not 0 < fsdp_size < gpus else fsdp_size

    longest = int(get("data.max_prompt_length", default=512)) + int(get("data.max_response_length", default=512))
    mini_batch = int(actor("ppo_mini_batch_size", default=256))
    rows = max(mini_batch * int(get("actor_rollout_ref.rollout.n", default=1)) // ranks, 1)
    if actor("use_dynamic_bsz"):
        tokens = int(actor("ppo_max_token_len_per_gpu", default=16384))
        micro_batches = -(-rows * longest // (tokens * sequence))
    else:
        each = actor("ppo_micro_batch_size_per_gpu")
        if each is None:
            key = f"{_PROCESS}.ppo_micro_batch_size_per_gpu"
            raise ValueError(f"{key} must be set while use_dynamic_bsz is off, found None.")
        tokens, micro_batches = int(each) * longest // sequence, -(-rows // int(each))
    temperature = float(get("actor_rollout_ref.rollout.temperature", default=1.0))
    has_entropy = bool(actor("calculate_entropy")) or float(actor("entropy_coeff", default=0)) != 0
    chunks = bool(actor("fsdp_config.entropy_from_logits_with_chunking", "entropy_from_logits_with_chunking"))
    is_fused = is_megatron or bool(get("actor_rollout_ref.model.use_fused_kernels"))
    each_logit = logit_bytes(is_engine(config) and temperature != 1, has_entropy and not chunks)
    is_half = str(actor("fsdp_config.dtype", default="bfloat16")) not in ("float32", "fp32")
    recomputes = get("actor_rollout_ref.model.enable_gradient_checkpointing", default=True)
    if is_megatron:
        recomputes = actor("megatron.override_transformer_config.recompute_granularity")
    return Plan(
        str(get("actor_rollout_ref.model.path", default="")),
        Layout(
            gpus,
            shards,
            on_host,
            tensor,
            pipeline,
            whole=6 if is_megatron else 0,  # weights in half precision, their gradient in float32
            units=not is_megatron,
            is_offloaded=bool(actor("fsdp_config.offload_policy")),
        ),
        Load(
            tokens,
            micro_batches,
            2 if is_half else 4,
            bool(recomputes),
            0.0 if is_fused else each_logit,
        ),
        int(get("actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.rank", default=0)),
        -(-int(get("data.train_batch_size", default=mini_batch)) // mini_batch) * int(actor("ppo_epochs", default=1)),
    )
