# SPDX-License-Identifier: Apache-2.0
"""Log-probs in float32 of verl's models, which compute in half precision: see :mod:`...core.precise`."""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch

from ...core.forecast import PART_BYTES, ROWS_PART
from ...core.precise import head_of, precise_linear, precise_readout
from ...core.sharding import unwrapped
from ...touched import replaced

_CHANGE_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""What a config calls it where a model does more with its logits than read them out."""
_COMPUTE_BEHIND: WeakSet[torch.nn.Module] = WeakSet()
"""Models that were found to do so, whatever their config says."""


def readout_of(module: torch.nn.Module, compute_dtype: torch.dtype, is_fused: bool) -> AbstractContextManager[None]:
    """Log-probs of verl's model as precisely as can be; ``is_fused``: it computes them by verl's fused kernel."""
    if not is_fused:
        return precise_readout(module, compute_dtype)
    if compute_dtype == torch.float32:
        return nullcontext()
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    def forward(self: Any, hidden_states: Any, vocab_weights: Any, input_ids: Any, temperature: float = 1.0) -> Any:
        with torch.autocast(device_type=hidden_states.device.type, enabled=False):
            return fused_log_probs(hidden_states, vocab_weights, input_ids, temperature)

    return replaced(FusedLinearForPPO, forward=forward)


def fused_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies in float32, the logits of a few positions at a time.

    Args:
        hidden: (..., H), any precision.
        weight: (V, H), any precision.
        labels: (...) token ids.
        temperature: divides the logits.
        bias: (V,), of the head.

    Returns:
        float32 (...) both; no graph.
    """
    log_probs, entropies = [], []
    for rows, chosen in zip(
        hidden.reshape(-1, hidden.shape[-1]).split(ROWS_PART), labels.reshape(-1, 1).split(ROWS_PART), strict=True
    ):
        logits = precise_linear(rows, weight, bias).div_(temperature).log_softmax(-1)
        log_probs.append(logits.gather(-1, chosen.long()).squeeze(-1))
        entropies.append(-(logits.exp() * logits).sum(-1))
    return torch.cat(log_probs).view(labels.shape), torch.cat(entropies).view(labels.shape)


def reads_in_parts(module: torch.nn.Module, compute_dtype: torch.dtype) -> bool:
    """Whether :class:`PartedHead` can stand in this model: in half precision, where training holds logits half as wide,
    and where the model leaves them as they are."""
    asked: Any = getattr(unwrapped(module), "config", None)
    config = asked.get_text_config() if hasattr(asked, "get_text_config") else asked
    changes = any(getattr(config, name, None) not in (None, 1.0) for name in _CHANGE_LOGITS)
    is_plain = not changes and unwrapped(module) not in _COMPUTE_BEHIND
    return is_plain and compute_dtype != torch.float32 and isinstance(head_of(module), torch.nn.Linear)


def part_bytes(num_positions: int, vocabulary: int) -> int:
    """What log-probs of so many positions take at their peak, read in parts."""
    return int(min(num_positions, ROWS_PART) * vocabulary * PART_BYTES)


class PartedHead:
    """While a model has its forward in its head's place: the log-probs and entropies of the next tokens are computed
    there, where the head's weight is gathered, so nobody ever holds all logits. The model gives what has their shape
    with a vocabulary of one.

    Args:
        module: the model.
        temperature: divides the logits.
    """

    labels: torch.Tensor
    """Of each position, in the order of the model's: the next token's id. To be set before the forward."""

    def __init__(self, module: torch.nn.Module, temperature: float):
        self.head: Any = head_of(module)
        self._model, self._temperature = unwrapped(module), temperature
        self._given: torch.Tensor | None = None
        self._found = SimpleNamespace()

    def __enter__(self) -> "PartedHead":
        self._replaced = replaced(self.head, forward=self._forward)
        self._replaced.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._replaced.__exit__(*error)

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        labels, head = self.labels.view(hidden.shape[:-1]), self.head
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            found = fused_log_probs(hidden, head.weight, labels, self._temperature, head.bias)
        self._found.log_probs, self._found.entropy = found
        self._given = hidden.new_ones(*labels.shape, 1, dtype=torch.float32)
        return self._given

    def outputs_of(self, output: Any) -> SimpleNamespace:
        """``log_probs`` and ``entropy``, as verl's fused kernels give them, where the model has given ``output``.

        Where it has made something of its logits these are of no use, and :func:`reads_in_parts` says no from now on.
        """
        given = self._given
        if given is None or output.logits.data_ptr() != given.data_ptr() or output.logits.shape != given.shape:
            _COMPUTE_BEHIND.add(self._model)
            nothing = torch.zeros(self.labels.shape, device=self.labels.device)
            return SimpleNamespace(log_probs=nothing, entropy=nothing)
        return self._found
