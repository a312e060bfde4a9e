# SPDX-License-Identifier: Apache-2.0
"""Plain training loops on a tiny model, as people write them; the lines with ``watch`` are what they add.

Shapes: R rows of a batch, B of a micro-batch, T positions.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel as DDP

import gradloc
from gradloc import token_log_probs
from tests.toy_model.model import Block, build
from tests.watch import kinds
from tests.watch.kinds import TAU, WORTH, plain
from tests.world import DEVICE

ROWS, ROWS_EACH, T, VOCABULARY = 8, 2, 12, 96
SPIKE, PLANT = 3, (5, 4)
"""The optimizer step that is spoiled, and the row and position in all ranks' batch."""


def model_of(layout: str) -> torch.nn.Module:
    model: Any = build("tiny")
    if layout.startswith("ddp"):
        model = DDP(model)
    elif layout.startswith("fsdp2"):
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif layout.startswith("fsdp1"):
        model = FSDP1(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device(DEVICE))
    return model


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


class Unwatched:
    """In a watch's place: the loop alone."""

    def __init__(self, model: Any):
        self.model, self.metrics = model, {}

    def log_probs(self, forward: Callable[[], torch.Tensor], *_: Any, **__: Any) -> Any:
        return forward()

    def clip_grad_norm_(self, limit: float) -> torch.Tensor:
        if isinstance(self.model, FSDP1):
            return self.model.clip_grad_norm_(limit)
        return plain(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))


class Loop(kinds.Kind):
    """Weighted supervised fine-tuning that gives its log-probs; what a test changes is a method of its own.

    Args:
        folder: as of :class:`~tests.watch.kinds.Kind`.
        action: as of ``gradloc.Watch``.
        layout: as of :func:`model_of`.
        precision: of autocast.
        lr: the learning rate.
        model: in that layout; None: a tiny one.
        is_planted: as of :class:`~tests.watch.kinds.Kind`.
        settings: more for ``gradloc.Watch``.
    """

    needs, named, norms_are_taken = (), [PLANT], True

    def __init__(
        self,
        folder: Path | str = "",
        action: str = "observe",
        layout: str = "plain",
        precision: str = "float32",
        lr: float = 1e-3,
        model: Any = None,
        is_planted: bool = True,
        **settings: Any,
    ):
        self.layout, self.half, self.lr, self.given, self.settings = (
            layout,
            getattr(torch, precision),
            lr,
            model,
            settings,
        )
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=16.0, enabled=precision == "float16")
        self.rank, self.size = (0, 1) if layout == "plain" else (dist.get_rank(), dist.get_world_size())
        super().__init__(folder, action, is_planted)

    def build(self) -> Any:
        return model_of(self.layout) if self.given is None else self.given

    def prepare(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr)
        self.watch: Any = Unwatched(self.model)
        if self.folder:
            settings = TAU | self.settings
            self.watch = gradloc.Watch(self.model, self.optimizer, self.folder, self.action, **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, self.half, enabled=self.half != torch.float32):
            return token_log_probs(self.model(x[:, :-1], T), x[:, 1:])

    def log_probs(self, x: torch.Tensor, mask: torch.Tensor, **known: Any) -> Any:
        names = [str(row) for row in x[:, :3].tolist()]
        return self.watch.log_probs(lambda: self.forward(x), mask, x[:, 1:], names, **known)

    def micro_batch(self, x: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> None:
        loss = -(self.log_probs(x, mask) * mask * weight).sum() / 96 * self.size
        self.scaler.scale(loss).backward()

    def step(self, ids: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor, each: int = ROWS_EACH) -> None:
        self.optimizer.zero_grad()
        self.micro_batches(ids, mask, weight, each)
        self.take_step()

    def micro_batches(self, ids: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor, each: int) -> None:
        parts = torch.arange(len(ids)).split(each)
        for rows in parts:
            with no_sync(self.model, rows is parts[-1], self.layout):
                self.micro_batch(ids[rows], mask[rows], weight[rows])

    def take_step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.norms.append(float(self.watch.clip_grad_norm_(1.0)))
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, steps: int = 4, worth: float | None = None, **given: Any) -> "Loop":
        kinds.seed(11 + self.rank)
        for number, (ids, mask) in enumerate(batches(steps), 1):
            weight = torch.ones_like(mask, dtype=torch.float32)
            if number == SPIKE:
                weight[PLANT] = WORTH * self.is_planted if worth is None else worth
            self.step(*(values.chunk(self.size)[self.rank] for values in (ids, mask, weight)), **given)
        return self


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([plain(param.detach()).flatten() for param in model.parameters()])
