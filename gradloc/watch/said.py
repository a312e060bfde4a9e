# SPDX-License-Identifier: Apache-2.0
"""What a loop says of a forward, checked and in one shape.

Shapes: B rows, T positions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..checks import require
from ..core.step import Outputs
from ..loop.batch import at_first


def said(
    size: tuple[int, ...] | None,
    mask: torch.Tensor | None,
    ids: torch.Tensor | None,
    rows: Sequence[Any] | None,
    given: Mapping[str, torch.Tensor | None],
) -> dict[str, Any]:
    """Return what is known of a forward: ``mask`` and ``ids`` (B, T), ``rows``, and ``tensors`` (B, T) by name.

    Args:
        size: B and T of the forward where no mask is given; None: there is no forward.
        mask: (B, T), or None.
        ids: (B, T), or None.
        rows: B names, or None.
        given: (B, T) or (B,) by name, or None; ``rewards`` are (B,).

    Raises:
        ValueError: one sentence, where shapes do not fit.
    """
    for name, value in (("mask", mask), ("ids", ids)):
        is_matrix = value is None or isinstance(value, torch.Tensor) and value.dim() == 2
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        require(is_matrix, f"Watch's {name}", "a tensor (B, T)", found)
    require((mask is None) == (ids is None), "Watch's mask and ids", "given together", "one of them")
    known: dict[str, Any] = {}
    if mask is not None and ids is not None:
        size = tuple(mask.shape)
        if ids.shape != mask.shape:
            raise ValueError(
                f"Watch: the ids have shape {tuple(ids.shape)}, the mask {size}: give all of the tokens that the "
                "positions predict, such as ids[:, 1:] for next-token log-probs."
            )
        known |= {"mask": mask.detach().bool(), "ids": ids.detach()}
    if size is None:
        return known
    if rows is not None:
        known["rows"] = [*rows]
        if len(known["rows"]) != size[0]:
            raise ValueError(f"Watch: rows has {len(known['rows'])} names for {size[0]} rows.")
    known["tensors"] = {name: _wide(name, value, size) for name, value in given.items() if value is not None}
    rewards = known["tensors"].pop("rewards", None)
    if rewards is not None:
        zeros = torch.zeros(size, device=rewards.device)
        known["tensors"]["token_level_scores"] = at_first(rewards[:, 0], zeros)
    return known


def _wide(name: str, value: Any, size: tuple[int, ...]) -> torch.Tensor:
    """As (B, T)."""
    require(isinstance(value, torch.Tensor), f"Watch's {name}", "a tensor", type(value).__name__)
    value = value.detach().view(-1) if name == "rewards" else value.detach()
    value = value.unsqueeze(1) if value.dim() == 1 else value
    if value.dim() != 2 or value.shape[0] != size[0] or value.shape[1] not in (1, size[1]):
        raise ValueError(f"Watch: {name} has shape {tuple(value.shape)}, the mask {size}.")
    return value.expand(size)


def check_outputs(outputs: Outputs, mask: torch.Tensor, has_entropy: bool) -> None:
    """Refuse log-probs and entropies that are not of the mask's shape.

    Raises:
        ValueError: one sentence.
    """
    shapes = {"log_probs": outputs.log_prob.shape, "entropies": getattr(outputs.entropy, "shape", None)}
    for name, shape in shapes.items():
        if shape is not None and shape != mask.shape:
            raise ValueError(
                f"Watch.log_probs: the {name} have shape {tuple(shape)}, the mask {tuple(mask.shape)}: give all of the "
                "tokens that the log-probs are of, such as ids[:, 1:] for next-token log-probs."
            )
    if has_entropy and outputs.entropy is None:
        raise ValueError("Watch.log_probs: with entropy=True the function returns (log_probs, entropies).")
