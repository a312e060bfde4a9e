# SPDX-License-Identifier: Apache-2.0
"""How a model is dealt out over processes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

MEGATRON = "actor_rollout_ref.actor.megatron"
PACKED = "actor_rollout_ref.model.use_remove_padding=true"
TP, PP = f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.pipeline_model_parallel_size=2"
INTERLEAVED = f"{MEGATRON}.virtual_pipeline_model_parallel_size=2"
EP, ETP_1 = f"{MEGATRON}.expert_model_parallel_size=2", f"{MEGATRON}.expert_tensor_parallel_size=1"
NORMALIZED = f"++{MEGATRON}.override_transformer_config.moe_router_pre_softmax=false"  # as transformers' Mixtral
CP = f"{MEGATRON}.context_parallel_size=2"
SHARDED = f"{MEGATRON}.use_distributed_optimizer=true"
FUSED = f"{PACKED} actor_rollout_ref.model.use_fused_kernels=true".split()
RECOMPUTED = [
    f"++{MEGATRON}.override_transformer_config.{setting}"
    for setting in ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
]
OPTIMIZER = "actor_rollout_ref.actor.optim.override_optimizer_config"
ON_CPU = [
    SHARDED,
    *(
        f"++{OPTIMIZER}.{setting}"
        for setting in (
            "optimizer_cpu_offload=true",
            "optimizer_offload_fraction=1",
            "overlap_cpu_optimizer_d2h_h2d=true",
            "use_precision_aware_optimizer=true",
        )
    ),
]
"""As verl's own scripts have it."""
CLIPPED = f"++{OPTIMIZER}.clip_grad=0.5"
"""Megatron's limit, where verl's own setting says 1."""
BY_TOKENS = [f"++{MEGATRON}.override_transformer_config.calculate_per_token_loss=true"]
"""Megatron-Bridge sets this with context parallelism."""
OFFLOADED = [SHARDED, *(f"{MEGATRON}.{what}_offload=true" for what in ("param", "optimizer"))]


class Layout(NamedTuple):
    """The layout of a run over processes."""

    size: int
    overrides: list[str]
    dtype: str = "float32"
    is_tied: bool = False
    experts: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        model = [] if self.experts is None else [f"experts={self.experts}"]
        return {"overrides": self.overrides, "model": model, "dtype": self.dtype}


DEFAULT = ("TP 2", "PP 2", "DP 2, sharded optimizer", "experts, EP 2")
LAYOUTS = {
    "TP 2": Layout(2, [TP, PACKED]),
    "PP 2": Layout(2, [PP, PACKED]),
    "DP 2, sharded optimizer": Layout(2, [SHARDED, PACKED, CLIPPED]),
    "experts, EP 2": Layout(2, [EP, PACKED], experts="qwen3_moe"),
    "one process": Layout(1, [PACKED]),
    "TP 2 without sequence parallelism": Layout(2, [TP, f"{MEGATRON}.sequence_parallel=false", PACKED]),
    "TP 2, padded": Layout(2, [TP, f"{MEGATRON}.use_remove_padding=false"]),
    "PP 2, interleaved": Layout(2, [PP, INTERLEAVED, PACKED]),
    "PP 2, tied embeddings": Layout(2, [PP, PACKED], is_tied=True),
    "DP 2": Layout(2, [PACKED]),
    "TP 2, sharded optimizer, bfloat16": Layout(2, [TP, SHARDED, PACKED], "bfloat16"),
    "PP 2, bfloat16": Layout(2, [PP, PACKED], "bfloat16"),
    "TP 2 x PP 2": Layout(4, [TP, PP, PACKED]),
    "TP 2 x DP 2, sharded optimizer": Layout(4, [TP, SHARDED, PACKED]),
    "PP 2 x DP 2, sharded optimizer, tied": Layout(4, [PP, SHARDED, PACKED], is_tied=True),
    "experts, one process": Layout(1, [PACKED], experts="qwen3_moe"),
    "experts, TP 2": Layout(2, [TP, PACKED], experts="qwen3_moe"),
    "experts, PP 2": Layout(2, [PP, PACKED], experts="qwen3_moe"),
    "experts, DP 2, sharded optimizer": Layout(2, [SHARDED, PACKED], experts="qwen3_moe"),
    "experts, TP 2 x EP 2": Layout(2, [TP, EP, ETP_1, PACKED], experts="qwen3_moe"),
    "experts, EP 2, sharded optimizer, bfloat16": Layout(2, [EP, SHARDED, PACKED], "bfloat16", experts="qwen3_moe"),
    "experts, TP 2 x EP 2 x DP 2, sharded optimizer": Layout(4, [TP, EP, ETP_1, SHARDED, PACKED], experts="qwen3_moe"),
    "experts, TP 2 within, EP 2": Layout(4, [TP, EP, PACKED], experts="qwen3_moe"),
    "experts, PP 2 x EP 2": Layout(4, [PP, EP, PACKED], experts="qwen3_moe"),
    "Mixtral, EP 2": Layout(2, [EP, NORMALIZED, PACKED], experts="mixtral"),
    "fused kernel, TP 2": Layout(2, [TP, *FUSED]),
    "fused kernel, TP 2, sharded optimizer, bfloat16": Layout(2, [TP, SHARDED, *FUSED], "bfloat16"),
    "fused kernel, PP 2, tied embeddings": Layout(2, [PP, *FUSED], is_tied=True),
    "fused kernel, experts, EP 2": Layout(2, [EP, *FUSED], experts="qwen3_moe"),
    "recomputed, TP 2": Layout(2, [TP, PACKED, *RECOMPUTED]),
    "recomputed, PP 2, bfloat16": Layout(2, [PP, PACKED, *RECOMPUTED], "bfloat16"),
    "recomputed, experts, EP 2": Layout(2, [EP, PACKED, *RECOMPUTED], experts="qwen3_moe"),
    "optimizer on the CPU, TP 2, bfloat16": Layout(2, [TP, PACKED, *ON_CPU, *OFFLOADED], "bfloat16"),
    "optimizer on the CPU, DP 2": Layout(2, [PACKED, *ON_CPU]),
    "optimizer on the CPU, experts, EP 2, bfloat16": Layout(
        2, [EP, PACKED, *ON_CPU, *OFFLOADED], "bfloat16", experts="qwen3_moe"
    ),
    "half of the optimizer on the CPU, DP 2": Layout(
        2, [PACKED, *ON_CPU, f"++{OPTIMIZER}.optimizer_offload_fraction=0.5"]
    ),
    "optimizer on the CPU, not precision-aware, DP 2, bfloat16": Layout(
        2, [PACKED, *ON_CPU, f"++{OPTIMIZER}.use_precision_aware_optimizer=false"], "bfloat16"
    ),
    "CP 2": Layout(2, [CP, PACKED]),
    "CP 2, padded": Layout(2, [CP, f"{MEGATRON}.use_remove_padding=false"]),
    "CP 2, by tokens": Layout(2, [CP, PACKED, *BY_TOKENS]),
    "DP 2, by tokens": Layout(2, [PACKED, *BY_TOKENS]),
    "PP 2, by tokens": Layout(2, [PP, PACKED, *BY_TOKENS]),
    "CP 2, fused kernel": Layout(2, [CP, *FUSED]),
    "CP 2, experts, EP 2": Layout(2, [CP, EP, PACKED], experts="qwen3_moe"),
    "CP 2, experts, EP 2, by tokens": Layout(2, [CP, EP, PACKED, *BY_TOKENS], experts="qwen3_moe"),
    "CP 2 x TP 2, sharded optimizer, bfloat16": Layout(4, [CP, TP, SHARDED, PACKED], "bfloat16"),
    "CP 2 x PP 2": Layout(4, [CP, PP, PACKED]),
    "CP 2 x DP 2, optimizer on the CPU, by tokens": Layout(4, [CP, PACKED, *ON_CPU, *BY_TOKENS]),
    "offload, PP 2": Layout(2, [PP, PACKED, *OFFLOADED]),
}
"""The first are part of the default tests; sequence parallelism goes with TP unless it says otherwise."""


def marks_of(layout: str, default: Sequence[str]) -> list[pytest.MarkDecorator]:
    """Mark a case as slow unless its layout is one of these."""
    return [] if layout in default else [pytest.mark.slow]


def in_layouts(*names: str, default: Sequence[str] = DEFAULT) -> Any:
    """Repeat a test for these layouts; by default for those of ``default`` and no others."""
    cases = [pytest.param(name, marks=marks_of(name, default)) for name in names]
    return pytest.mark.parametrize("layout", cases, indirect=True)
