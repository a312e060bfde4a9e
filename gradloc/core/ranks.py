# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The ranks acting as one: reductions, gathers, and agreement before a collective.

A rank that fails alone leaves its peers waiting in a collective. So whatever may fail locally runs through
:meth:`Ranks.agree`, which tells every rank whether all of them succeeded before anyone enters the next collective.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = ["LostRank", "PeerFailure", "Ranks"]

T = TypeVar("T")


class PeerFailure(RuntimeError):
    """Some rank failed in its local part, and every rank heard of it."""


class LostRank(RuntimeError):
    """This rank failed where its peers wait for it in a collective: the process group cannot go on."""


class Ranks:
    """The data-parallel ranks of a process group, or a single process when torch.distributed is not initialised.

    With sequence parallelism, ``replicas`` consecutive processes hold the same sequences and count as one rank.

    Args:
        group: the process group of all trainer processes; None for the default one.
        device: where the small tensors of the reductions live (the backend decides).
        replicas: processes per data-parallel rank; divides the group's size.
    """

    def __init__(self, group: Any | None = None, device: str | torch.device = "cpu", replicas: int = 1):
        self.group = group
        self.device = torch.device(device)
        self.replicas = replicas
        alone = not dist.is_initialized()
        process = 0 if alone else dist.get_rank(group)
        self.num_processes = 1 if alone else dist.get_world_size(group)
        self.rank = process // replicas
        self.size = self.num_processes // replicas
        self.is_first = process == 0

    def sum(self, values: list[float]) -> list[float]:
        """Add each value over the ranks in float64; every rank gets the same bits."""
        if self.num_processes == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.group)
        return (total / self.replicas).tolist()

    def max(self, values: list[float]) -> list[float]:
        """The largest of each value over the ranks; NaN counts as the largest. The same bits on every rank."""
        if self.num_processes == 1:
            return [float(value) for value in values]
        # gloo and NCCL disagree on NaN, so it travels as infinity does
        most = torch.tensor(values, dtype=torch.float64, device=self.device).nan_to_num(nan=math.inf, posinf=math.inf)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return most.tolist()

    def all(self, flag: bool) -> bool:
        """Whether the flag is set on every rank."""
        return self.max([0.0 if flag else 1.0])[0] == 0.0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.num_processes == 1:
            return [value]
        values: list[Any] = [None] * self.num_processes
        dist.all_gather_object(values, value, group=self.group)
        return values[:: self.replicas]

    def agree(self, local: Callable[[], T]) -> T:
        """Run a local computation and return its result only if it succeeded on every rank.

        Raises:
            PeerFailure: on every rank, when any rank's computation raised.
        """
        error: BaseException | None = None
        result: Any = None
        try:
            result = local()
        except Exception as caught:
            error = caught
        if self.sum([0.0 if error is None else 1.0])[0] > 0:
            reason = f"rank {self.rank}: {type(error).__name__}: {error}" if error is not None else "on another rank"
            raise PeerFailure(f"a local part of the search failed ({reason})") from error
        return result
