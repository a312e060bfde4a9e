# SPDX-License-Identifier: Apache-2.0
"""Several outputs of a model that the loss uses, as one state.

Where no tensor is passed by all of the gradient, as in a VAE, two towers or an actor with a critic of its own, the
model's outputs together are such a state. Training gets an alias of each, so that its gradient is the loop's alone, and
not that of another output which the model made of it.

Shapes: B rows, T positions.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

Keep = Callable[[int, torch.Tensor], None]
"""Called with where a part begins in the last dimension, and its gradient (..., W)."""


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output, in their order."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def with_aliases(output: Any, places: Sequence[int]) -> tuple[Any, list[torch.Tensor]]:
    """Return the output with views of the tensors at these places, and the views."""
    leaves = tensors_in(output)
    views = {id(leaves[place]): leaves[place].view_as(leaves[place]) for place in places}
    found = tree_map(lambda leaf: views.get(id(leaf), leaf), output)
    return found, [views[id(leaves[place])] for place in places]


def wide(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors as (B, T, ...) each, where all have the same positions, else as (B, ...); [] if rows differ.

    A recurrent network's state (L, B, H) may be among them, but not be the first.
    """
    count = len(leaves[0])
    leaves = [leaf if len(leaf) == count or leaf.dim() < 2 else leaf.transpose(0, 1) for leaf in leaves]
    if any(len(leaf) != count for leaf in leaves):
        return []
    has_positions = any(leaf.dim() == 3 for leaf in leaves) and all(1 < leaf.dim() <= 3 for leaf in leaves)
    num_shared = 2 if has_positions and len({leaf.shape[:2] for leaf in leaves}) == 1 else 1
    return [leaf.reshape(*leaf.shape[:num_shared], math.prod(leaf.shape[num_shared:])) for leaf in leaves]


def hook_parts(parts: Sequence[torch.Tensor], keep: Keep) -> torch.Size:
    """Hook the gradients of tensors that can be joined, and return the shape of all of them."""
    shaped, first = wide([part.detach() for part in parts]), 0
    for part, like in zip(parts, shaped, strict=True):
        part.register_hook(partial(_keep_part, keep, first, like.shape, len(part) != len(like)))
        first += like.shape[-1]
    return torch.Size([*shaped[0].shape[:-1], first])


def _keep_part(keep: Keep, first: int, shape: torch.Size, is_turned: bool, grad: torch.Tensor) -> None:
    keep(first, (grad.transpose(0, 1) if is_turned else grad).reshape(shape))


@torch.enable_grad()
def has_rows_mixed(output: torch.Tensor, hidden: torch.Tensor) -> bool:
    """Return whether a vector of the output (..., V) is made of several of the hidden state (..., H), as on a graph.

    One vector's backward is run, from the output to the hidden state; no parameter is reached.
    """
    count = math.prod(hidden.shape[:-1])
    rows = output.reshape(-1, output.shape[-1]) if output.dim() > 1 else output.unsqueeze(-1)
    if not 1 < count == len(rows):
        return False
    (grad,) = torch.autograd.grad(rows[count // 2].sum(), hidden, retain_graph=True, materialize_grads=True)
    return int((grad.reshape(count, -1) != 0).any(-1).sum()) > 1  # one, if another where the output is transposed
