# SPDX-License-Identifier: Apache-2.0
"""A loop of Megatron's own, as pretrain_gpt's, on CPU ranks; called on each rank.

Shapes: B rows of a micro-batch, T positions.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

import gradloc
from gradloc.loop.driver import AbortedBySpike
from gradloc.private_api import replaced
from gradloc.watch.megatron import clip_as_megatron
from lab.experiments.verl09 import megatron as without_gpu
from tests.world.harness import lines_of

VOCABULARY, B, T = 320, 2, 16
STEPS, SPIKE, WORTH = 4, 3, 4e3
PLANT = (0, 5)
"""The row of the step's last micro-batch on the last rank, and the position."""
WITHOUT_KERNELS = {"gradient_accumulation_fusion": False, "masked_softmax_fusion": False, "bias_dropout_fusion": False}
WITHOUT_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
TAU = {"tau": 100.0}


def make_parallel(tensor: int) -> None:
    """Make the loop's process groups, unless an earlier loop has them: gloo's threads outlive a group."""
    without_gpu.install_without_verl()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor)
    elif parallel_state.get_tensor_model_parallel_world_size() != tensor:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def make_model(dtype: str, is_tied: bool, more: dict[str, Any], ddp: dict[str, Any]) -> list[Any]:
    """The list of one model chunk that Megatron's get_model makes."""
    torch.manual_seed(0)
    more, group = {**more}, more.get("mtp_group")
    more.pop("mtp_group", None)
    is_half = dtype == "bfloat16"
    params = {"params_dtype": getattr(torch, dtype), "pipeline_dtype": getattr(torch, dtype), "bf16": is_half}
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    config = TransformerConfig(**{**WITHOUT_KERNELS, **WITHOUT_DROPOUT, **sizes, **params, **more})
    model: Any = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        max_sequence_length=T,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=is_tied,
    )
    for param in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    for name, param in model.named_parameters():
        if group is not None and group in name:
            param.grad_norm_group = "mtp"  # which Megatron 0.19 clips by a norm of its own
    model = Float16Module(config, model) if is_half else model
    chunks = [DistributedDataParallel(config, DistributedDataParallelConfig(**ddp), model)]
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = chunks[0].no_sync if ddp.get("overlap_grad_reduce") else None
    return chunks


def batches(rank: int, is_planted: bool) -> Any:
    """Yield the inputs of each micro-batch: ids, labels, and each position's weight in the loss."""
    draw, last = torch.Generator().manual_seed(5 + rank), dist.get_world_size() - 1
    for number in range(2 * STEPS):
        ids, weight = torch.randint(VOCABULARY, (B, T + 1), generator=draw), torch.ones(B, T)
        if (number, rank) == (2 * SPIKE - 1, last):
            weight[PLANT] = WORTH if is_planted else 0.0
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weight


def forward_step(iterator: Any, model: Any, is_loss_outside: bool, is_packed: bool) -> Any:
    ids, labels, weight = next(iterator)
    places: Any = torch.arange(T).expand(B, T)
    later: Any = torch.ones(T, T, dtype=torch.bool).triu(1)[None, None]
    more = {}
    if is_packed:  # both rows in one sequence
        ends = torch.arange(B + 1, dtype=torch.int) * T
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=T, max_seqlen_kv=T
        )
        ids, labels, places, later, more = (
            ids.view(1, -1),
            labels.view(1, -1),
            None,
            None,
            {"packed_seq_params": packed},
        )

    def loss(output: torch.Tensor) -> Any:
        if is_loss_outside:
            output = F.cross_entropy(output.float().flatten(0, 1), labels.flatten(), reduction="none")
        total = (output.float().view(B, T) * weight).sum()
        if model.config.calculate_per_token_loss:
            return total, torch.tensor(B * T, dtype=torch.int), {}
        return total / (B * T), {}

    return model(ids, places, later, labels=None if is_loss_outside else labels, **more), loss


def clip_twice() -> list[list[torch.Tensor]]:
    """The gradient that the optimizer's own step clips to, and what :func:`clip_as_megatron` makes of the same."""
    make_parallel(1)
    found = []
    for is_own in (True, False):
        chunks = make_model("float32", False, {"mtp_group": "output_layer"}, {})
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0), chunks)
        params = [param for leaf in optimizer.chained_optimizers for param in leaf.get_parameters()]
        for param in params:
            param.main_grad.copy_(torch.ones_like(param))
        if is_own:
            with replaced(optimizer, step_with_ready_grads=lambda: True):
                optimizer.step()
        else:
            optimizer.prepare_grads()
            clip_as_megatron(optimizer)
        found.append([param.grad.clone() for param in params])
    return found


def train(
    dtype: str = "float32",
    is_distributed: bool = False,
    folder: str = "",
    action: str = "observe",
    is_planted: bool = True,
    is_tied: bool = False,
    is_loss_outside: bool = False,
    is_packed: bool = False,
    asks_norm: bool = False,
    has_optimizer: bool = True,
    clip_grad: float = 1.0,
    tensor: int = 1,
    more: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """What four steps of two micro-batches leave; ``more`` for Megatron's config, ``settings`` for the watch."""
    make_parallel(tensor)
    sharded = {"use_distributed_optimizer": is_distributed}
    config = {"tensor_model_parallel_size": tensor, **(more or {})}
    chunks = make_model(dtype, is_tied, config, {"grad_reduce_in_fp32": True, **sharded, **(ddp or {})})
    half = {"bf16": True, "params_dtype": torch.bfloat16} if dtype == "bfloat16" else {}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.0, clip_grad=clip_grad, **sharded, **half), chunks
    )
    given = optimizer if has_optimizer else None
    with lines_of("gradloc") as said:
        watch = gradloc.Watch(chunks, given, folder, action, trigger=TAU, **settings) if folder else None
    data, norms, ended, spike = batches(dist.get_rank(), is_planted), [], "", 0.0
    spiked = [labels for _, labels, _ in batches(dist.get_world_size() - 1, is_planted)][2 * SPIKE - 1]
    try:
        for _ in range(STEPS):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=partial(forward_step, is_loss_outside=is_loss_outside, is_packed=is_packed),
                data_iterator=data,
                model=chunks,
                num_microbatches=2,
                seq_length=T,
                micro_batch_size=B,
                forward_only=False,
            )
            if asks_norm:  # as slime, which takes no step where it is not finite
                optimizer.prepare_grads()
                assert optimizer.get_grad_norm() > 0
            is_taken, norm, _ = optimizer.step()
            assert is_taken
            norms.append(float(norm))
            if len(norms) == SPIKE:  # Megatron's own leaves out a group that has a norm of its own
                groups = getattr(optimizer, "grad_norms_by_group", {})
                spike = float(torch.tensor([norm, *groups.values()]).norm())
    except AbortedBySpike as error:
        ended = str(error)
    weights = [param.detach().clone() for chunk in chunks for param in chunk.parameters()]
    weights += [param.detach().clone() for leaf in optimizer.chained_optimizers for param in leaf.get_parameters()]
    is_off = watch is not None and watch.localizer.num_failures
    return {
        "weights": weights,
        "norms": norms,
        "ended": ended,
        "is_off": is_off,
        "said": said,
        "token": int(spiked[PLANT]),
        "spike": spike,
    }
