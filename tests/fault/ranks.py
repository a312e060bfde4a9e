# SPDX-License-Identifier: Apache-2.0
"""The runs of :mod:`lab.benchmarks.links` on several ranks; called inside a rank of :mod:`tests.world`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel as DDP

from lab.benchmarks import links

PLAN = links.Plan("gpt", 7, 32, 2, 2e-3, 0.1, 0.999, 2, 4)


class Shared(links.Run):
    """Each rank has its own batches, and the model is wrapped as ``layout`` says."""

    layout = "ddp"

    def wrapped(self, model: nn.Module) -> nn.Module:
        if self.layout == "ddp":
            return DDP(model)
        if self.layout == "fsdp1":
            return FSDP1(model, auto_wrap_policy=ModuleWrapPolicy({links._Block}), device_id=torch.device("cpu"))
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    def clip(self) -> torch.Tensor:
        return self.model.clip_grad_norm_(1.0) if self.layout == "fsdp1" else super().clip()


def train(layout: str, fault: str, folder: str = "") -> dict[str, Any]:
    """Train up to two steps after the fault; returns this rank's part of the weights and of the optimizer's state."""
    torch.set_num_threads(1)
    made = type("Layout", (Shared,), {"layout": layout})(PLAN, fault, folder=folder, trigger={"floor": 2.0, "cap": 2.5})
    made.rng.manual_seed(100 + dist.get_rank())
    for _ in range(links.HEALTHY + 3):
        made.take()
    held = [*made.model.parameters(), *(value for each in made.optimizer.state.values() for value in each.values())]
    parts = [getattr(each, "_local_tensor", each).detach().flatten().double() for each in held]
    if made.watch is not None:
        made.watch.close()
    return {"weights": torch.cat(parts)}
