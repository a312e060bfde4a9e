# SPDX-License-Identifier: Apache-2.0
"""A bare optimizer step for the core: model, clipped policy loss, sharding. No trainer.

Implements the core's ``TrainingStep``. The loss of a rank's micro-batch is the sum of its tokens' losses, each times
its weight in the step's (over N, the mean over tokens), times W because FSDP averages gradients over the ranks.

Shapes: B rows of a micro-batch, R rows and N response tokens of the step, T response positions, W ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard

from gradloc.core.gradients import GradientSpace
from gradloc.core.step import ByRow, Details, LossReplay, Outputs, stack_rows
from tests.detached import let_through
from tests.toy_model.amplifier import edit_of
from tests.toy_model.batch import Batch, Place
from tests.toy_model.model import Block, Decoder, entropy_of, log_prob_of
from tests.world import DEVICE


def shard(
    model: Decoder, layout: str = "fsdp2", dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> torch.nn.Module:
    """The model as verl would hold it: every block a unit, float32 masters, reduction in float32, FSDP2's parameters
    along their first dimension that the ranks divide.

    Args:
        model: changed in place.
        layout: ``fsdp2`` or ``fsdp1`` over all ranks of the default process group, or ``plain``: one process.
        dtype: what forward and backward compute in; float32 only where ``plain``.
        device: where the weights go; None: ``DEVICE``.
    """
    device = device or torch.device(DEVICE)
    model.to(device)
    if layout == "plain":
        return model
    if layout == "fsdp1":
        precision = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
        wrap = ModuleWrapPolicy({Block})
        return FSDP1(model, auto_wrap_policy=wrap, mixed_precision=precision, device_id=device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)

    def place(param: torch.nn.Parameter) -> Shard:
        return Shard(next((dim for dim, size in enumerate(param.shape) if size % mesh.size() == 0), 0))

    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, shard_placement_fn=place)
    return fully_shard(model, mesh=mesh, mp_policy=policy, shard_placement_fn=place)


def clip_gradient(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
    """Clip ``.grad`` as verl's actor does; returns the norm before, a scalar, the same on every rank."""
    if isinstance(model, FSDP1):
        return model.clip_grad_norm_(max_norm)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class ToyTrainer:
    """The localizer's handle on this trainer, whose gradients are clipped to 1."""

    clip_limit, scales_loss, takes_what_is_not_finite, is_unclipped = 1.0, False, False, False

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def clip(self) -> torch.Tensor:
        return clip_gradient(self.model, self.clip_limit)

    def save_weights(self, global_step: int) -> None:
        """Nobody needs them."""


AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
"""How tokens' losses make the step's, by verl's names."""


@dataclass(frozen=True)
class Loss:
    """Terms of a token's loss, and how much each counts."""

    clip: float = 0.2
    """PPO's clip ratio; verl's default."""
    entropy: float = 0.0
    """Factor of the entropy bonus; 0 leaves the entropy out of the loss, as verl does."""
    kl: float = 0.0
    """Factor of the squared log-ratio to the reference policy over two (verl's ``k2``)."""
    aggregation: str = AGGREGATIONS[0]
    """The mean over all ranks' tokens, or over all ranks' R rows of each row's token sum or token mean."""

    def weights(self, mask: torch.Tensor, batch: Batch) -> torch.Tensor:
        """How much every token's loss counts in the step's: float64 (B, T), 0 outside of the mask.

        Args:
            mask: bool (B, T), of some rows.
            batch: all ranks' rows.
        """
        if self.aggregation == "token-mean":
            return mask.double() / batch.num_tokens
        each = mask.double() / len(batch.labels)
        return each if self.aggregation == "seq-mean-token-sum" else each / mask.sum(-1, keepdim=True).clamp(min=1)

    def of_tokens(self, log_prob: torch.Tensor, entropy: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """Loss (B, T) of every token by itself: PPO's clipped one (arXiv 1707.06347, eq. 7) and the other terms."""
        ratio = (log_prob - batch.old_log_probs).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        losses = torch.maximum(-batch.advantages * ratio, -batch.advantages * clipped)
        if self.kl:
            losses = losses + self.kl * (log_prob - batch.reference_log_probs).square() / 2
        return losses if entropy is None else losses - self.entropy * entropy


class ToyStep(LossReplay, ByRow):
    """One rank's part of a batch, in M micro-batches: what the search may replay.

    Args:
        model: what :func:`shard` gave.
        batch: all ranks' rows; R a multiple of W times M.
        num_micro_batches: M, per rank.
        dtype: the one that the model was sharded with.
        loss: of every token.
        loss_scale: what fp16 training would multiply the loss with.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batch: Batch,
        num_micro_batches: int,
        dtype: torch.dtype = torch.float32,
        loss: Loss = Loss(),  # noqa: B008 (frozen)
        loss_scale: float = 1.0,
    ):
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        super().__init__(next(model.parameters()).device, num_ranks, 1.0 / loss_scale)
        self.model, self.dtype = model, dtype
        self._num_parts = num_micro_batches
        self._batch, self._terms = batch, loss
        self._vocabulary = model.head.out_features
        self._each = len(batch.labels) // (num_ranks * num_micro_batches)
        self._first = rank * num_micro_batches * self._each
        self._parts = [batch.part(slice(rows[0], rows[-1] + 1), self.device) for rows in self._all_rows()]
        self._weights = [loss.weights(part.mask, batch) for part in self._parts]
        self._edits = [edit_of(model, batch.amplified, rows) for rows in self._all_rows()]

    def train(self, after_backward: Callable[[], None] = lambda: None) -> None:
        """The training pass: fills ``.grad`` and the records that a trainer's hooks would fill.

        Args:
            after_backward: called after every micro-batch.
        """
        self.micro_batches = []
        for index, part in enumerate(self._parts):
            self.before_forward(part)
            outputs = self._outputs(index)
            self.after_forward(outputs)
            self._total(outputs.log_prob, outputs.entropy, index).backward()
            after_backward()

    def rows(self, micro_batch: int) -> list[int]:
        """Where the micro-batch's rows stand in the batch."""
        first = self._first + micro_batch * self._each
        return list(range(first, first + self._each))

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        return self._parts[micro_batch].mask

    def details(self, micro_batch: int) -> Details:
        return Details(self._parts[micro_batch].old_log_probs, self._weights[micro_batch].float())

    @property
    def without_kl(self) -> dict[str, Any] | None:
        return {"kl": 0.0} if self._terms.kl else None

    def loss_under(self, micro_batch: int, given: Outputs, settings: Mapping[str, Any], tensors: Any) -> torch.Tensor:
        terms, part = replace(self._terms, **settings), replace(self._parts[micro_batch], **tensors)
        return self._sum(terms.of_tokens(given.log_prob.float(), given.entropy, part), micro_batch)

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Outputs:
        is_read = not torch.is_grad_enabled()
        return self._outputs(micro_batch, precise=is_read, needs_entropy=needs_entropy)

    def forward_rows(self, rows: Sequence[tuple[int, list[int]]]) -> Outputs:
        return stack_rows([self._forward_rows(micro_batch, chosen) for micro_batch, chosen in rows])

    def _forward_rows(self, micro_batch: int, rows: list[int]) -> Outputs:
        part, numbers = self._parts[micro_batch], self.rows(micro_batch)
        with edit_of(self.model, self._batch.amplified, [numbers[row] for row in rows]):
            logits = self.model(part.tokens[rows], part.labels.shape[1])
        return Outputs(log_prob_of(logits, part.labels[rows]), entropy_of(logits) if self._terms.entropy else None)

    def forward_bytes(self) -> int:
        return 4 * self._parts[0].labels.numel() * self._vocabulary

    def loss(self, micro_batch: int, selected: torch.Tensor | None) -> torch.Tensor:
        """The slow obvious way, which a probe is held against: the whole loss again, with the gradient of some tokens
        let through alone."""
        self.recorded(micro_batch).rng.restore()
        outputs = self._outputs(micro_batch)
        if selected is not None:
            outputs = Outputs(*(let_through(selected, each) for each in outputs))
        return self._total(outputs.log_prob, outputs.entropy, micro_batch)

    def norm_of(self, space: GradientSpace, places: Iterable[Place], without: bool = False) -> float:
        """The truth: the gradient's norm of these tokens alone, or without them, by a backward of every micro-batch."""
        space.clear()
        for index in range(self._num_parts):
            chosen, rows = torch.zeros_like(self.token_mask(index)), self.rows(index)
            for row, position in places:
                if row in rows:
                    chosen[rows.index(row), position] = True
            self.loss(index, ~chosen if without else chosen).backward()
        norm = space.norm()
        space.clear()
        return norm

    def _all_rows(self) -> list[list[int]]:
        return [self.rows(index) for index in range(self._num_parts)]

    def _outputs(self, micro_batch: int, precise: bool = False, needs_entropy: bool = False) -> Outputs:
        logits = self._logits(micro_batch, precise)
        entropy = entropy_of(logits) if self._terms.entropy or needs_entropy else None
        return Outputs(log_prob_of(logits, self._parts[micro_batch].labels), entropy)

    def _logits(self, micro_batch: int, precise: bool = False) -> torch.Tensor:
        part = self._parts[micro_batch]
        with self._edits[micro_batch]:
            return self.model(part.tokens, part.labels.shape[1], precise)

    def _total(self, log_prob: torch.Tensor, entropy: torch.Tensor | None, micro_batch: int) -> torch.Tensor:
        losses = self._terms.of_tokens(log_prob.float(), entropy, self._parts[micro_batch])
        return self._sum(losses, micro_batch) / self.backward_factor

    def _sum(self, losses: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """The micro-batch's part of this rank's loss: FSDP takes the mean over the ranks."""
        kept = torch.where(self._parts[micro_batch].mask, losses, 0.0)
        return (kept * self._weights[micro_batch].to(kept.dtype)).sum() * self.num_ranks
