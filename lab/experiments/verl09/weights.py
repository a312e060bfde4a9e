# SPDX-License-Identifier: Apache-2.0
"""Weights for rollout servers in processes of their own, through a file: verl's checkpoint engine "file_cpu".

Loaded by `rollout.checkpoint_engine.custom_backend_module`, for `trainer.v1.trainer_mode=separate_async`, which takes
no engine that shares the trainer's processes.
"""

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab.experiments.verl09 import rollout
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngine

__all__ = ["rollout"]  # the server's, which its worker looks for

# verl 0.9.1 cannot write its own line about a trainer that has no rollouts in its processes.
logging.getLogger("verl.trainer.ppo.v1.trainer_separate_async").setLevel(logging.WARNING)


@CheckpointEngineRegistry.register("file_cpu")
class FileEngine(CheckpointEngine):
    """Rank 0 of the trainer writes, the rollouts read. verl makes both calls at once, so a reader waits until the file
    has its name."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        self.path = ""

    def prepare(self) -> dict[str, Any]:
        return {"folder": tempfile.gettempdir(), "process": os.getpid()}

    @classmethod
    def build_topology(cls, trainers: int, rollouts: int, metadata: list[dict]) -> tuple[dict, dict]:
        path = os.path.join(metadata[0]["folder"], f"weights-{metadata[0]['process']}.pt")
        return {"path": [path] * trainers}, {"path": [path] * rollouts}

    def init_process_group(self, path: str) -> None:
        self.path = path
        self.finalize()  # what a run that was killed has left

    def finalize(self) -> None:
        Path(self.path).unlink(missing_ok=True)

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> dict:
        kept = {name: tensor.detach().cpu().clone() for name, tensor in weights}
        if dist.get_rank() == 0:
            torch.save(kept, f"{self.path}.part")
            os.replace(f"{self.path}.part", self.path)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        while not os.path.exists(self.path):
            await asyncio.sleep(0.05)
        for name, tensor in torch.load(self.path).items():
            yield name, tensor
