# SPDX-License-Identifier: Apache-2.0
"""Transfer weights to rollout servers in other processes through a file: verl's checkpoint engine "file_cpu".

Loaded by `rollout.checkpoint_engine.custom_backend_module` for `trainer.v1.trainer_mode=separate_async`, which needs an
engine outside the trainer's processes.
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

__all__ = ["rollout"]  # the worker looks for the server in this module

# verl 0.9.1 fails to format its own log line about a trainer without rollouts
logging.getLogger("verl.trainer.ppo.v1.trainer_separate_async").setLevel(logging.WARNING)


@CheckpointEngineRegistry.register("file_cpu")
class FileEngine(CheckpointEngine):
    """Let rank 0 of the trainer write a file that the rollouts read.

    verl calls both at once, so a reader waits for the file's final name."""

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
        self.finalize()  # left over from a killed run

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
