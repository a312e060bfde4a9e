# SPDX-License-Identifier: Apache-2.0
"""Whether a search fits into memory beside training, asked on all ranks before one begins; and logits in parts.

What a search holds at its peak, beyond what lies there anyway when a step is looked into (weights, optimizer, the
gradient that is set aside):

- copies of this rank's shards: a residual to search along or a replayed gradient, what the culprits' own backwards
  gave, and ``.grad`` while the next is made;
- what a replayed micro-batch needs, which is what it needed in training: the allocator's peak tells. What the allocator
  has reserved and not in use is free for that only, not for copies on top;
- or, in a forward alone, the logits in float32, which hold no activations beside them;
- scratch of a few float32 tensors as large as the largest shard, while weights are moved.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .gradients import GradientSpace, local_shard, unwrapped

__all__ = [
    "Memory",
    "NotEnoughMemory",
    "choose_way",
    "free_bytes",
    "fused_log_probs",
    "linear_in_parts",
    "precise_fused_readout",
    "precise_readout",
]

_COPIES = {"full": 3, "bisect": 2}
_SCRATCH_BYTES = 16  # per element of the largest shard: what is drawn, its unit, the move and the moved weight
_VOCABULARY_PART = 8192  # rows of the head's weight in float32 at a time: 128 MiB of a hidden size of 4,096
_ROWS_PART = 512  # positions whose logits are held at a time, where a fused kernel never holds them all
_USABLE = 0.95  # of what is there: blocks do not fit seamlessly


class NotEnoughMemory(RuntimeError):
    """A search would not fit; carries what it needs and what there is, in bytes."""


@dataclass(frozen=True)
class Memory:
    """A device's memory as this process sees it, in bytes."""

    free: int
    """That no process has taken."""
    reserved: int = 0
    """That this process's allocator has taken,"""
    allocated: int = 0
    """of it in use now,"""
    peak: int = 0
    """and at most in use so far, in a training micro-batch or elsewhere."""

    @property
    def available(self) -> int:
        """What this process may still allocate."""
        return self.free + self.reserved - self.allocated

    def needed(self, shard_bytes: int, num_copies: int, largest: int, forward_bytes: int) -> int:
        """What a search holds at its peak.

        Args:
            shard_bytes: one copy of this rank's shards.
            num_copies: how many are held at once.
            largest: elements of the largest shard.
            forward_bytes: what a forward alone holds, without a graph.
        """
        working = max(self.peak - self.allocated, forward_bytes)
        return num_copies * shard_bytes + largest * _SCRATCH_BYTES + working


def choose_way(space: GradientSpace, forward_bytes: int, memory: Memory | None = None) -> str:
    """The best way to search that fits on this rank.

    Args:
        space: the trainable parameters.
        forward_bytes: see :meth:`.probe.TrainingStep.forward_bytes`.
        memory: what there is; None to ask the device.

    Returns:
        ``full``, any strategy; or ``bisect``, which moves no weights and searches along no residual.

    Raises:
        NotEnoughMemory: one sentence with both sizes.
    """
    device = space.params[0].device
    memory = memory or _memory_of(device)
    shards = [local_shard(param) for param in space.params]
    shard_bytes = sum(shard.numel() * shard.element_size() for shard in shards)
    largest = max(shard.numel() for shard in shards)
    needs = {
        "full": memory.needed(shard_bytes, _COPIES["full"], largest, forward_bytes),
        "bisect": memory.needed(shard_bytes, _COPIES["bisect"], 0, 0),
    }
    for way, needed in needs.items():
        if needed <= _USABLE * memory.available:
            return way
    raise NotEnoughMemory(
        f"a search needs {needs['bisect'] / 2**30:.2f} GiB beside training on {device}, where "
        f"{memory.available / 2**30:.2f} GiB are left: make micro-batches smaller, or offload the optimizer"
    )


def free_bytes(device: torch.device) -> int:
    """What this process may still take on a device, with what the caching allocator holds without using it."""
    return _memory_of(device).available


def _memory_of(device: torch.device) -> Memory:
    if device.type == "cpu":
        import psutil  # comes with accelerate

        return Memory(free=psutil.virtual_memory().available)
    module = torch.get_device_module(device.type)
    counts = module.memory_reserved(), module.memory_allocated(), module.max_memory_allocated()
    return Memory(module.mem_get_info()[0], *counts)


def linear_in_parts(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``linear`` in float32 with a float32 copy of a part of the weight at a time.

    Args:
        hidden: (..., H), any precision.
        weight: (V, H), any precision.
        bias: (V,) or None.

    Returns:
        float32 (..., V); no graph.
    """
    rows = hidden.reshape(-1, hidden.shape[-1]).float()
    out = rows.new_empty(len(rows), len(weight))
    for first in range(0, len(weight), _VOCABULARY_PART):
        part = slice(first, first + _VOCABULARY_PART)
        torch.mm(rows, weight[part].float().T, out=out[:, part])
    if bias is not None:
        out += bias.float()
    return out.view(*hidden.shape[:-1], len(weight))


@contextmanager
def precise_readout(module: torch.nn.Module, compute_dtype: torch.dtype) -> Iterator[None]:
    """Compute the logits, or a critic's values, in float32 from the last hidden state while the model itself computes
    in half precision.

    verl's log-probs are rounded to the compute dtype where flash attention's cross entropy is absent, so a small
    change of a log-prob would read as none. Fused kernels, which never show the logits: :func:`precise_fused_readout`.

    Args:
        module: the model, under FSDP1, FSDP2, DDP or plain.
        compute_dtype: what its forward computes in; float32 changes nothing.
    """
    model: Any = unwrapped(module)
    head = None if compute_dtype == torch.float32 else model.get_output_embeddings() or _value_head(model)
    if not isinstance(head, torch.nn.Linear):  # none, or one that does more than read out
        yield
        return

    def read_out(hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            return linear_in_parts(hidden, head.weight, head.bias)

    own = vars(head).get("forward")
    vars(head)["forward"] = read_out  # in its place, so that the rounded logits do not lie beside these
    try:
        yield
    finally:
        vars(head).pop("forward")
        if own is not None:
            vars(head)["forward"] = own


def _value_head(module: Any) -> Any:
    """Of transformers' token classifiers, which verl takes for critics; None where there is none."""
    return getattr(module, "score", None)


def fused_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies in float32, the logits of a few positions at a time.

    Args:
        hidden: (..., H), any precision.
        weight: (V, H), any precision.
        labels: (...) token ids.
        temperature: divides the logits.

    Returns:
        float32 (...) both; no graph.
    """
    log_probs, entropies = [], []
    for rows, chosen in zip(
        hidden.reshape(-1, hidden.shape[-1]).split(_ROWS_PART), labels.reshape(-1, 1).split(_ROWS_PART), strict=True
    ):
        logits = (linear_in_parts(rows, weight, None) / temperature).log_softmax(-1)
        log_probs.append(logits.gather(-1, chosen.long()).squeeze(-1))
        entropies.append(-(logits.exp() * logits).sum(-1))
    return torch.cat(log_probs).view(labels.shape), torch.cat(entropies).view(labels.shape)


@contextmanager
def precise_fused_readout(kernel: type, compute_dtype: torch.dtype) -> Iterator[None]:
    """:func:`precise_readout` where a fused kernel takes the head's weight and gives log-probs and entropies.

    Args:
        kernel: a module's class; ``forward(hidden, weight, labels, temperature)`` as :func:`fused_log_probs`.
        compute_dtype: what the model computes in; float32 changes nothing.
    """
    if compute_dtype == torch.float32:
        yield
        return

    def forward(self: Any, hidden_states: Any, vocab_weights: Any, input_ids: Any, temperature: float = 1.0) -> Any:
        with torch.autocast(device_type=hidden_states.device.type, enabled=False):
            return fused_log_probs(hidden_states, vocab_weights, input_ids, temperature)

    own = vars(kernel)["forward"]
    kernel.forward = forward  # type: ignore[attr-defined]
    try:
        yield
    finally:
        kernel.forward = own  # type: ignore[attr-defined]
