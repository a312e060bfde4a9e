# SPDX-License-Identifier: Apache-2.0
"""Compute log-probs and entropies of tokens from logits, in chunks of positions.

Shapes: ... any, V vocabulary.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

_CHUNK = 2**24  # logits in float32 at a time: 64 MiB


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


def _in_chunks(*tensors: torch.Tensor) -> Any:
    """Yield the tensors' rows in chunks of about ``_CHUNK`` logits; the first tensor has V columns."""
    return zip(*(tensor.split(max(_CHUNK // tensors[0].shape[1], 1)) for tensor in tensors), strict=True)


def _concatenated(chunks: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """Join chunks to a tensor that is no view, so that a loop may write into it."""
    found = chunks[0].new_empty(shape)
    torch.cat(chunks, out=found.view(-1))
    return found


class _TokenLogProbs(torch.autograd.Function):
    """Saves the logits z in their own precision, and log sum exp z and the entropy H of each position."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, ids: torch.Tensor, has_entropy: bool) -> Any:
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows, labels = logits.reshape(-1, logits.shape[-1]), ids.reshape(-1, 1)
        log_probs, log_sums, entropies = [], [], []
        for z, label in _in_chunks(rows, labels):
            z = z.to(wide)
            log_sum = z.logsumexp(-1)
            log_prob = z.gather(-1, label.clamp(min=0)).squeeze(-1) - log_sum
            log_probs.append(torch.where(label.squeeze(-1) < 0, 0.0, log_prob))
            log_sums.append(log_sum)
            if has_entropy:
                entropies.append(log_sum - (z.softmax(-1) * z).sum(-1))
        all_log_sums = torch.cat(log_sums)
        entropy = torch.cat(entropies) if has_entropy else all_log_sums.new_zeros(0)
        ctx.save_for_backward(rows, labels, all_log_sums, entropy)
        ctx.shape = logits.shape
        log_prob = _concatenated(log_probs, ids.shape)
        return log_prob, _concatenated(entropies, ids.shape) if has_entropy else entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, entropy_grad: torch.Tensor) -> Any:
        rows, labels, log_sums, entropy = ctx.saved_tensors
        has_entropy = entropy.numel() == len(rows) and len(rows) > 0
        grad = torch.where(labels.squeeze(-1) < 0, 0.0, grad.reshape(-1))
        found = torch.empty_like(rows)
        columns = [rows, labels, log_sums.unsqueeze(-1), grad.unsqueeze(-1), found]
        if has_entropy:
            columns += [entropy.unsqueeze(-1), entropy_grad.reshape(-1, 1)]
        for z, label, log_sum, d_log_prob, out, *entropy_columns in _in_chunks(*columns):
            log_p = z.to(log_sums.dtype) - log_sum
            d_z = log_p.exp().mul_(-d_log_prob)  # d log_prob / dz = 1 at the label - p
            if entropy_columns:  # dH / dz = -p (log p + H)
                h, d_h = entropy_columns
                d_z -= log_p.exp() * (log_p + h) * d_h
            d_z.scatter_add_(-1, label.clamp(min=0), d_log_prob.to(d_z.dtype))
            out.copy_(d_z)
        return found.view(ctx.shape), None, None
