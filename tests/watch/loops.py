# SPDX-License-Identifier: Apache-2.0
"""Plain training loops on a tiny model, as people write them; the lines with ``watch`` are what they add.

Shapes: R rows of a batch, B of a micro-batch, T positions.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import gradloc
from gradloc import token_log_probs
from tests.bare.model import Block, build
from tests.world import DEVICE

ROWS, ROWS_EACH, T, VOCABULARY = 8, 2, 12, 96
SPIKE, PLANT = 3, (5, 4)
"""The optimizer step that is spoiled, and the row and position in all ranks' batch."""
TAU = {"trigger": {"tau": 20.0}}
"""A fixed threshold between a healthy step and a planted one."""
WORTH = 4000.0


def model_of(layout: str, dropout: float = 0.1, is_checkpointed: bool = False, compiled: str = "") -> torch.nn.Module:
    model: Any = build("tiny", dropout=dropout)
    if is_checkpointed:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if compiled == "inside":
        model = torch.compile(model, backend="aot_eager")
    if layout.startswith("ddp"):
        model = DDP(model)
    elif layout.startswith("fsdp2"):
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif layout.startswith("fsdp1"):
        model = FSDP1(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device(DEVICE))
    return torch.compile(model, backend="aot_eager") if compiled == "outside" else model


def batches(steps: int, seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """ids (R, T + 1) and mask (R, T); some rows are shorter."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, VOCABULARY, (ROWS, T + 1), generator=generator)
        mask = torch.ones(ROWS, T, dtype=torch.long)
        mask[1, 9:] = 0
        yield ids.to(DEVICE), mask.to(DEVICE)


def no_sync(model: Any, is_last: bool, layout: str) -> AbstractContextManager[Any]:
    """As a loop that reduces once does."""
    if not layout.endswith("once"):
        return nullcontext()
    if layout.startswith("fsdp2"):
        model.set_requires_gradient_sync(is_last)
        return nullcontext()
    return nullcontext() if is_last else model.no_sync()


def train(
    folder: str = "",
    action: str = "observe",
    layout: str = "plain",
    precision: str = "float32",
    worth: float = WORTH,
    steps: int = 4,
    loss: Callable[..., torch.Tensor] | None = None,
    **of_model: Any,
) -> dict[str, Any]:
    """Weighted supervised fine-tuning; without a folder nothing is watched.

    Returns:
        Weights (flat, whole), norms, and the watch's metrics of each step.
    """
    torch.manual_seed(7)
    model: Any = model_of(layout, **of_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=16.0) if precision == "float16" else None
    half = getattr(torch, precision)
    watch = gradloc.Watch(model, optimizer, folder, action=action, scaler=scaler, **TAU) if folder else None
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() and layout != "plain" else (0, 1)
    norms, metrics, each = [], [], ROWS // size
    torch.manual_seed(11 + rank)
    for number, (ids, mask) in enumerate(batches(steps), 1):
        weight = torch.ones(ROWS, T, device=DEVICE)
        if number == SPIKE:
            weight[PLANT] = worth
        optimizer.zero_grad()
        starts = range(rank * each, (rank + 1) * each, ROWS_EACH)
        for start in starts:
            rows = slice(start, start + ROWS_EACH)
            x, kept = ids[rows], mask[rows]

            def forward() -> torch.Tensor:
                with torch.autocast(DEVICE, half, enabled=half != torch.float32):
                    return token_log_probs(model(x[:, :-1], T), x[:, 1:])  # noqa: B023 (as people write it)

            with no_sync(model, start == starts[-1], layout):
                log_probs = watch.log_probs(forward, kept, x[:, 1:], [*range(ROWS)[rows]]) if watch else forward()
                total = (loss or weighted)(log_probs, weight[rows], kept) / mask.sum() * size
                (scaler.scale(total) if scaler else total).backward()
        if scaler:
            scaler.unscale_(optimizer)
        norm = watch.clip_grad_norm_(1.0) if watch else clip(model)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        norms.append(float(norm))
        metrics.append(watch.metrics if watch else {})
    return {"weights": flat(model), "norms": norms, "metrics": metrics}


def weighted(log_probs: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return -(log_probs * weight * mask).sum()


def clip(model: Any) -> torch.Tensor:
    if isinstance(model, FSDP1):
        return model.clip_grad_norm_(1.0)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def flat(model: torch.nn.Module) -> torch.Tensor:
    params = [param.detach() for param in model.parameters()]
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).flatten() for p in params])
