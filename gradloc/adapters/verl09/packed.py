# SPDX-License-Identifier: Apache-2.0
"""How verl's engine lays out a micro-batch: prompts and responses end to end, N positions, without padding.

A position's log-prob is that of the next token: a response's first stands at its prompt's last position.

Shapes: B rows of the micro-batch, T response positions, N positions.
"""

from typing import Any

import torch
from tensordict import TensorDict


def padded(values: torch.Tensor) -> torch.Tensor:
    """(B, T), 0 where there is no token."""
    return values.to_padded_tensor(0) if values.is_nested else values


class Layout:
    """Where the log-probs of a micro-batch's response tokens stand among its N positions.

    Args:
        data: verl's TensorDict, as it came to the engine.
        device: of the values.
    """

    def __init__(self, data: Any, device: torch.device):
        ends = data["input_ids"].offsets().cpu()[1:]
        lengths = data["responses"].offsets().cpu().diff()
        steps = torch.arange(int(lengths.max()))
        is_token = steps < lengths.unsqueeze(1)
        places = (ends - lengths - 1).unsqueeze(1) + steps
        tokens = is_token.flatten().nonzero().squeeze(-1)
        self._num_positions = int(ends[-1])
        self._is_token = is_token.to(device)
        self._places = places.clamp(max=self._num_positions - 1).to(device)
        self._tokens, self._positions = tokens.to(device), places.flatten()[tokens].to(device)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """From response tokens (B, T) to the positions that have their log-probs, (N,); 0 and False elsewhere."""
        kept = values.flatten().index_select(0, self._tokens)
        return values.new_zeros(self._num_positions).index_put((self._positions,), kept)

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """The other way, (N,) to (B, T): 0 where there is no token."""
        return torch.where(self._is_token, values[self._places], 0)


def pack(values: torch.Tensor, data: Any) -> torch.Tensor:
    """:meth:`Layout.pack`, once."""
    return Layout(data, values.device).pack(values)


def nested_rows(rows: dict[str, list[torch.Tensor]]) -> TensorDict:
    """verl's TensorDict of these tensors, one for each row, laid end to end."""
    nested = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in rows.items()}
    return TensorDict(nested, batch_size=len(rows["input_ids"]))


def scaled(values: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """verl's model output, nested or (N,), times one factor for each position."""
    if not values.is_nested:
        return values * packed
    return torch.nested.nested_tensor_from_jagged(values.values() * packed, values.offsets())
