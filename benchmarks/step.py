# SPDX-License-Identifier: Apache-2.0
"""A bare optimizer step for the core: model, clipped policy loss, ranks under FSDP2. No trainer.

Implements the core's ``TrainingStep``. The loss of a rank's micro-batch is its tokens' clipped
policy losses over N, times W because FSDP averages gradients over the ranks.

Shapes: B rows of a micro-batch, T response positions.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.batch import Amplified, Batch
from benchmarks.core import core
from benchmarks.model import Decoder

_CLIP = 0.2  # PPO's clip ratio, verl's default


def shard(model: Decoder, dtype: torch.dtype, device: torch.device) -> Decoder:
    """FSDP2 as verl applies it: every block a unit, float32 masters, reduction in float32."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model.to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def policy_loss(log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """PPO's clipped loss per token (arXiv 1707.06347, eq. 7)."""
    ratio = (log_prob - old).exp()
    clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
    return torch.maximum(-advantage * ratio, -advantage * clipped)


class BareStep:
    """One rank's part of a batch, in M micro-batches: what the search may replay."""

    loss_scale = 1.0

    def __init__(self, model: Decoder, batch: Batch, num_micro_batches: int, dtype: torch.dtype):
        self.model = model
        self.compute_dtype = dtype
        self.num_micro_batches = num_micro_batches
        self._size = dist.get_world_size()
        self._num_tokens = batch.num_tokens
        self.device = next(model.parameters()).device
        rank, per_rank = dist.get_rank(), len(batch.labels) // self._size
        per_micro_batch = per_rank // num_micro_batches
        mine = slice(rank * per_rank, (rank + 1) * per_rank)
        fields = (batch.tokens, batch.labels, batch.advantages, batch.old_log_probs)
        self._parts = list(
            zip(
                *(value[mine].to(self.device).split(per_micro_batch) for value in fields),
                strict=True,
            )
        )
        self._recorded = [None] * num_micro_batches
        self._amplifiers = [None] * num_micro_batches
        if batch.amplified is not None and batch.amplified.row // per_rank == rank:
            index, row = divmod(batch.amplified.row - rank * per_rank, per_micro_batch)
            self._amplifiers[index] = Amplifier(model, batch.amplified, row)

    def train(self, after_backward=lambda: None) -> None:
        """The training pass: fills ``.grad`` and the records that a trainer's hooks would fill.

        Args:
            after_backward: called after every micro-batch.
        """
        probe = core("core.probe")
        for index, (tokens, labels, advantages, old) in enumerate(self._parts):
            self._recorded[index] = probe.Recorded(rng=probe.RngState(self.device))
            log_prob = self._log_prob(index, tokens, labels)
            probe.record(self._recorded[index], log_prob, None)
            self._loss(log_prob, old, advantages).backward()
            after_backward()

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        return torch.ones_like(self._parts[micro_batch][1], dtype=torch.bool)

    def token_weights(self, micro_batch: int) -> torch.Tensor:
        return torch.full_like(self._parts[micro_batch][3], 1.0 / self._num_tokens)

    def recorded(self, micro_batch: int):
        return self._recorded[micro_batch]

    def coefficients(self, micro_batch: int) -> tuple[torch.Tensor, None]:
        return self._recorded[micro_batch].log_prob_coefficient / self._size, None

    def forward(self, micro_batch: int) -> tuple[torch.Tensor, None]:
        tokens, labels, _, _ = self._parts[micro_batch]
        with torch.no_grad():
            return self._log_prob(micro_batch, tokens, labels, precise=True), None

    def backward(self, micro_batch: int, selected: torch.Tensor | None) -> None:
        tokens, labels, advantages, old = self._parts[micro_batch]
        log_prob = self._log_prob(micro_batch, tokens, labels)
        if selected is not None:
            log_prob = core("core.probe").let_through(selected, log_prob)
        self._loss(log_prob, old, advantages).backward()

    def _log_prob(self, micro_batch: int, tokens, labels, precise: bool = False) -> torch.Tensor:
        amplifier = self._amplifiers[micro_batch]
        is_precise = precise and self.compute_dtype != torch.float32
        if amplifier is None:
            return self.model(tokens, labels, precise=is_precise)
        with amplifier:
            return self.model(tokens, labels, precise=is_precise)

    def _loss(self, log_prob, old, advantages) -> torch.Tensor:
        losses = policy_loss(log_prob.float(), old, advantages)
        return losses.sum() * (self._size / self._num_tokens)


class Amplifier:
    """Context in which some MLPs' output at one position is y + (factor - 1) (mlp(x0) - y0).

    x0 and y0 are the input and output there at the first forward, kept as constants: the value is
    unchanged at those weights, the derivative by these MLPs' weights is ``factor`` times as large.
    """

    def __init__(self, model: Decoder, amplified: Amplified, row: int):
        self._mlps = [model.blocks[layer].mlp for layer in amplified.layers]
        self._at = (row, amplified.position)
        self._factor = amplified.factor
        self._first: dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}
        self._handles = []

    def __enter__(self) -> None:
        self._handles = [mlp.register_forward_hook(self._change) for mlp in self._mlps]

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.remove()

    def _change(self, mlp: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        run = type(mlp).forward  # calling the module itself would run this hook again
        if mlp not in self._first:
            x = inputs[0][self._at].detach().clone()
            self._first[mlp] = x, run(mlp, x).detach()
        x, y = self._first[mlp]
        extra = torch.zeros_like(output)
        extra[self._at] = (self._factor - 1) * (run(mlp, x) - y)
        return output + extra
