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
"""Move the sharded weights along a direction and put them back bit for bit.

A forward of FSDP uses gathered copies of the weights. Unless every unit drops its copy first, a forward after a move
still sees the old weights, and, worse, one after the restore may see the moved ones. So all units are resharded
before every forward and after the last (measured on FSDP1 and FSDP2, with both settings of reshard_after_forward).
"""

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

from ..core.gradients import Gradient, GradientSpace, local_shard

__all__ = ["MovedWeights", "reshard"]

_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}


def reshard(module: torch.nn.Module) -> None:
    """Make every FSDP unit drop its gathered weights, so that the next forward gathers the shards anew."""
    if isinstance(module, FSDP1):
        for unit in FSDP1.fsdp_modules(module):
            handle = unit._handle
            if handle is not None and handle.uses_sharded_strategy:
                handle.reshard(True)
        return
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


class MovedWeights:
    """Context in which the weights may be moved; leaving it restores them from a copy of the local shards.

    Args:
        space: the trainable parameters.
        compute_dtype: what the forward computes in. In bfloat16 and float16 a common dither of one unit in the last
            place keeps small moves from being rounded away (needed where the master weights lie on the grid).
        seed: of the dither, the same for every move.
    """

    def __init__(self, space: GradientSpace, compute_dtype: torch.dtype, seed: int = 0):
        self._space = space
        self._bits = _MANTISSA_BITS.get(compute_dtype)
        self._seed = seed
        self._saved: list[torch.Tensor] = []

    @torch.no_grad()
    def __enter__(self) -> "MovedWeights":
        reshard(self._space.module)
        self._saved = [local_shard(param).clone() for param in self._space.params]
        return self

    @torch.no_grad()
    def move(self, direction: Gradient, step: float) -> None:
        """Set the weights to (original + dither + step * direction)."""
        reshard(self._space.module)
        self._set(lambda index: None if direction[index] is None else step * local_shard(direction[index]))

    @torch.no_grad()
    def move_randomly(self, seed: int, step: float) -> None:
        """Set the weights to (original + dither + step * v), v standard normal and different on every shard."""
        reshard(self._space.module)
        generator = self._generator(seed)

        def draw(index: int) -> torch.Tensor:
            saved = self._saved[index]
            return step * torch.randn(saved.shape, generator=generator, device=saved.device, dtype=saved.dtype)

        self._set(draw)

    @torch.no_grad()
    def distance(self) -> float:
        """L2 norm, over all weights and shards, of how far they are from where they were."""
        square = torch.zeros(1, dtype=torch.float64, device=self._space.params[0].device)
        for param, saved in zip(self._space.params, self._saved, strict=True):
            square += torch.linalg.vector_norm(local_shard(param) - saved, dtype=torch.float64) ** 2
        return float(self._space.reduce(square).sqrt())

    def _set(self, change) -> None:
        dither = self._generator(self._seed)
        for index, (param, saved) in enumerate(zip(self._space.params, self._saved, strict=True)):
            shard = local_shard(param)
            shard.copy_(saved)
            if self._bits is not None and saved.numel():
                uniform = torch.rand(saved.shape, generator=dither, device=saved.device, dtype=saved.dtype) - 0.5
                _, exponent = torch.frexp(saved)  # |saved| = m * 2**exponent with m in [0.5, 1)
                shard.add_(torch.ldexp(uniform, exponent - 1 - self._bits))
            delta = change(index)
            if delta is not None:
                shard.add_(delta)

    def _generator(self, seed: int) -> torch.Generator:
        generator = torch.Generator(device=self._space.params[0].device)
        return generator.manual_seed(1_000_003 * (seed + 1) + self._space.shard_index)

    @torch.no_grad()
    def __exit__(self, *_) -> None:
        for param, saved in zip(self._space.params, self._saved, strict=True):
            local_shard(param).copy_(saved)
        reshard(self._space.module)
        self._saved = []
