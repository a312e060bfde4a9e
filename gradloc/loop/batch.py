# SPDX-License-Identifier: Apache-2.0
"""The driver's batch as the loop sees it, whatever the trainer keeps it in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class BatchView:
    """A whole batch in the order in which its rows are dealt out to the ranks: R rows, P prompt, T response positions.

    What is not known is left out. A mapping may fetch a tensor when it is first asked for.
    """

    tensors: Mapping[str, torch.Tensor]
    """``input_ids``, ``attention_mask``, ``position_ids`` (R, P + T): prompts padded on the left, responses on the
    right; ``responses``, ``response_mask``, ``old_log_probs``, ``advantages`` and others (R, T). With pictures the
    position ids are (R, C, P + T)."""
    labels: Mapping[str, Sequence[Any]]
    """``uid``, ``sequence_id``, ``data_source``, and ``multi_modal_inputs`` (tensors by name, or nothing): one for each
    row. A sequence may fetch a row when it is first asked for."""
    is_critics: bool = False
    """Whether the critic is updated: ``values`` (before the update) and ``returns`` (R, T) are there, too."""
