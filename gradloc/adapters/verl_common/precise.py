# SPDX-License-Identifier: Apache-2.0
"""Log-probs in float32 of verl's models, which compute in half precision: see :mod:`...core.precise`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ...core.precise import precise_linear, precise_readout
from ...touched import replaced

ROWS_PART = 512  # positions whose logits are held at a time, where a fused kernel never holds them all


def readout_of(module: torch.nn.Module, compute_dtype: torch.dtype, is_fused: bool) -> AbstractContextManager[None]:
    """Log-probs of verl's model as precisely as can be; ``is_fused``: it computes them by verl's fused kernel."""
    if not is_fused:
        return precise_readout(module, compute_dtype)
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return precise_fused_readout(FusedLinearForPPO, compute_dtype)


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
        hidden.reshape(-1, hidden.shape[-1]).split(ROWS_PART), labels.reshape(-1, 1).split(ROWS_PART), strict=True
    ):
        logits = (precise_linear(rows, weight, None) / temperature).log_softmax(-1)
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

    with replaced(kernel, forward=forward):
        yield
