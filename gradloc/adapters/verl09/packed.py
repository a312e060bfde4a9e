# SPDX-License-Identifier: Apache-2.0
"""How verl's engine lays out a micro-batch: sequences end to end, without padding.

There are ``N`` positions of prompts and responses in one micro-batch. A position's log-prob is that of the token after
it, so a response's first log-prob stands at its prompt's last position.

Shapes: B rows of the micro-batch, T response positions, N positions.
"""

from typing import Any

import torch

from ...core.probe import let_through

__all__ = ["only", "pack", "padded", "scaled", "unpack"]


def padded(values: torch.Tensor) -> torch.Tensor:
    """(B, T), 0 where there is no token."""
    return values.to_padded_tensor(0) if values.is_nested else values


def _places(data: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the log-prob of each response token stands among N positions, and which are tokens: int and bool (B, T)."""
    ends = data["input_ids"].offsets()[1:].to(device)
    lengths = data["responses"].offsets().diff().to(device)
    steps = torch.arange(int(lengths.max()), device=device)
    return (ends - lengths - 1).unsqueeze(1) + steps, steps < lengths.unsqueeze(1)


def pack(values: torch.Tensor, data: Any) -> torch.Tensor:
    """From response tokens (B, T) to the positions that have their log-probs, (N,); 0 and False elsewhere."""
    places, is_token = _places(data, values.device)
    num_positions = int(data["input_ids"].offsets()[-1])
    return values.new_zeros(num_positions).index_put((places[is_token],), values[is_token])


def unpack(values: torch.Tensor, data: Any) -> torch.Tensor:
    """The other way, (N,) to (B, T): 0 where there is no token."""
    places, is_token = _places(data, values.device)
    return torch.where(is_token, values[places.clamp(max=len(values) - 1)], 0)


def only(packed: torch.Tensor, nested: torch.Tensor) -> torch.Tensor:
    """Let gradient through at these positions only; the values stay the same, bit for bit."""
    if nested is None or not nested.requires_grad:
        return nested
    return torch.nested.nested_tensor_from_jagged(let_through(packed, nested.values()), nested.offsets())


def scaled(values: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """verl's model output, nested or (N,), times one factor for each position."""
    if not values.is_nested:
        return values * packed
    return torch.nested.nested_tensor_from_jagged(values.values() * packed, values.offsets())
