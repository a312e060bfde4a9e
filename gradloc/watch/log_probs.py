# SPDX-License-Identifier: Apache-2.0
"""Compute log-probs and entropies of tokens from logits, in chunks of positions.

Shapes: ... any, V vocabulary.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

_PART = 2**24  # logits in float32 at a time: 64 MiB


def token_log_probs(logits: torch.Tensor, ids: torch.Tensor, entropy: bool = False) -> Any:
    """Return the log-prob of each token, in float32 whatever the logits' precision, without a float32 copy of all.

    Args:
        logits: (..., V), of the position that predicts each token: a model's ``logits[:, :-1]``, for ``ids[:, 1:]``.
        ids: (...) token ids; where one is negative, as labels that are not trained on are, the log-prob is 0.
        entropy: give entropies, too.

    Returns:
        (...) log-probs; with ``entropy`` a pair of these and the entropies in nats. Both may be differentiated once.

    Raises:
        ValueError: one sentence, where the shapes do not fit.
    """
    if logits.shape[:-1] != ids.shape:
        raise ValueError(
            f"token_log_probs takes logits (..., V) and ids (...) of the same positions, found {tuple(logits.shape)} "
            f"and {tuple(ids.shape)}: for next-token logits pass logits[:, :-1] and ids[:, 1:]."
        )
    log_probs, entropies = _TokenLogProbs.apply(logits, ids, entropy)
    return (log_probs, entropies) if entropy else log_probs


def _parts(*tensors: torch.Tensor) -> Any:
    """Yield the tensors' rows in chunks of about ``_PART`` logits; the first tensor has V columns."""
    return zip(*(tensor.split(max(_PART // tensors[0].shape[1], 1)) for tensor in tensors), strict=True)


def _joined(parts: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """Return a tensor of its own, no view: a loop may write into it."""
    found = parts[0].new_empty(shape)
    torch.cat(parts, out=found.view(-1))
    return found


class _TokenLogProbs(torch.autograd.Function):
    """Saves the logits in their own precision, and two numbers of each position."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, ids: torch.Tensor, has_entropy: bool) -> Any:
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows, chosen = logits.reshape(-1, logits.shape[-1]), ids.reshape(-1, 1)
        found, totals, entropies = [], [], []
        for part, labels in _parts(rows, chosen):
            part = part.to(wide)
            total = part.logsumexp(-1)
            own = part.gather(-1, labels.clamp(min=0)).squeeze(-1) - total
            found.append(torch.where(labels.squeeze(-1) < 0, 0.0, own))
            totals.append(total)
            if has_entropy:
                entropies.append(total - (part.softmax(-1) * part).sum(-1))
        total = torch.cat(totals)
        entropy = torch.cat(entropies) if has_entropy else total.new_zeros(0)
        ctx.save_for_backward(rows, chosen, total, entropy)
        ctx.shape = logits.shape
        return _joined(found, ids.shape), _joined(entropies, ids.shape) if has_entropy else entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, entropy_grad: torch.Tensor) -> Any:
        rows, chosen, total, entropy = ctx.saved_tensors
        has_entropy = entropy.numel() == len(rows) and len(rows) > 0
        grad = torch.where(chosen.squeeze(-1) < 0, 0.0, grad.reshape(-1))
        out = torch.empty_like(rows)
        each = [rows, chosen, total.unsqueeze(-1), grad.unsqueeze(-1), out]
        if has_entropy:
            each += [entropy.unsqueeze(-1), entropy_grad.reshape(-1, 1)]
        for part, labels, totals, pull, into, *more in _parts(*each):
            log_probs = part.to(total.dtype) - totals
            found = log_probs.exp().mul_(-pull)
            if more:
                found -= log_probs.exp() * (log_probs + more[0]) * more[1]
            found.scatter_add_(-1, labels.clamp(min=0), pull.to(found.dtype))
            into.copy_(found)
        return out.view(ctx.shape), None, None
