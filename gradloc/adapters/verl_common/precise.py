# SPDX-License-Identifier: Apache-2.0
"""Logits and log-probs in float32 from the last hidden state of a model that computes in half precision.

Where the device has them, in its tensor cores: products of half precision are exact there, and their sums float32's.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ...touched import replaced

_VOCABULARY_PART = 8192  # rows of the head's weight in float32 at a time: 128 MiB of a hidden size of 4,096
ROWS_PART = 512  # positions whose logits are held at a time, where a fused kernel never holds them all


def logit_bytes(is_scaled: bool = False, has_entropy: bool = False) -> float:
    """What a forward alone holds for each logit at its peak, in bytes: the float32 logits and what verl makes of them.

    Args:
        is_scaled: whether a temperature makes a second tensor of them.
        has_entropy: whether entropies are computed from all of them at once.
    """
    return 4.5 + 4.0 * is_scaled + 8.0 * has_entropy


def precise_linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``linear`` of hidden states (..., H) and weights (V, H) of any precision: float32 (..., V), no graph."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    if _has_wide_product(rows, weight):
        out = torch.mm(rows, weight.T, out_dtype=torch.float32)
    else:  # with a float32 copy of a part of the weight at a time
        out = torch.empty(len(rows), len(weight), dtype=torch.float32, device=rows.device)
        for first in range(0, len(weight), _VOCABULARY_PART):
            part = slice(first, first + _VOCABULARY_PART)
            torch.mm(rows.float(), weight[part].float().T, out=out[:, part])
    if bias is not None:
        out += bias.float()
    return out.view(*hidden.shape[:-1], len(weight))


_wide_products: dict[tuple[str, torch.dtype], bool] = {}


def _has_wide_product(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether half-precision operands can be multiplied into float32 here: asked once of each kind of device."""
    if rows.dtype != weight.dtype or rows.dtype not in (torch.bfloat16, torch.float16):
        return False
    key = rows.device.type, rows.dtype
    if key not in _wide_products:
        one = torch.ones(16, 16, dtype=rows.dtype, device=rows.device)
        try:
            _wide_products[key] = torch.mm(one, one, out_dtype=torch.float32).dtype == torch.float32
        except (NotImplementedError, RuntimeError, TypeError):  # a CPU; torch before 2.8
            _wide_products[key] = False
    return _wide_products[key]


@contextmanager
def precise_readout(module: torch.nn.Module, compute_dtype: torch.dtype) -> Iterator[None]:
    """Compute the logits, or a critic's values, in float32 from the last hidden state while the model itself computes
    in half precision.

    verl's log-probs are rounded to the compute dtype where flash attention's cross entropy is absent, so a small
    change of a log-prob would read as none. Fused kernels, which never show the logits: :func:`precise_fused_readout`.

    Args:
        module: the model, under FSDP1, FSDP2 or plain.
        compute_dtype: what its forward computes in; float32 changes nothing.
    """
    unwrapped: Any = getattr(module, "_fsdp_wrapped_module", module)
    head = None
    if compute_dtype != torch.float32:  # a critic is one of transformers' token classifiers, which call it "score"
        head = unwrapped.get_output_embeddings() or getattr(unwrapped, "score", None)
    if not isinstance(head, torch.nn.Linear):  # none, or one that does more than read out
        yield
        return

    def read_out(hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            return precise_linear(hidden, head.weight, head.bias)

    with replaced(head, forward=read_out):  # in its place, so that the rounded logits do not lie beside these
        yield


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
