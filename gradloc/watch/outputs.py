# SPDX-License-Identifier: Apache-2.0
"""Join several outputs of a model that the loss uses to one state.

In a VAE, two towers or an actor with a critic of its own, the gradient passes through no single tensor; the model's
outputs together take the hidden state's place. Training gets an alias of each output, so that its gradient is the
loop's alone, and not that of another output which the model made of it.

Shapes: B rows, T positions.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output, in their order."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def with_aliases(output: Any, indices: Sequence[int]) -> tuple[Any, list[torch.Tensor]]:
    """Return the output with views in place of its tensors of these indices, and the views."""
    leaves = tensors_in(output)
    views = {id(leaves[index]): leaves[index].view_as(leaves[index]) for index in indices}
    aliased = tree_map(lambda leaf: views.get(id(leaf), leaf), output)
    return aliased, [views[id(leaves[index])] for index in indices]


def joinable(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors as (B, T, W) each, where all have the same positions, else as (B, W); [] if rows differ.

    A recurrent network's state (L, B, H) may be among them, but not be the first.
    """
    num_rows = len(leaves[0])
    leaves = [leaf if len(leaf) == num_rows or leaf.dim() < 2 else leaf.transpose(0, 1) for leaf in leaves]
    if any(len(leaf) != num_rows for leaf in leaves):
        return []
    has_positions = any(leaf.dim() == 3 for leaf in leaves) and all(1 < leaf.dim() <= 3 for leaf in leaves)
    num_shared = 2 if has_positions and len({leaf.shape[:2] for leaf in leaves}) == 1 else 1
    return [leaf.reshape(*leaf.shape[:num_shared], math.prod(leaf.shape[num_shared:])) for leaf in leaves]


def hook_parts(parts: Sequence[torch.Tensor], keep: Callable[[torch.Tensor], None]) -> torch.Size:
    """Hook the gradients of tensors that can be joined, and return the shape of the state that they make.

    ``keep`` is called with each part's gradient as one of the state, which is 0 elsewhere.
    """
    shaped, first = joinable([part.detach() for part in parts]), 0
    state = torch.Size([*shaped[0].shape[:-1], sum(like.shape[-1] for like in shaped)])

    def keep_whole(place: slice, shape: torch.Size, is_transposed: bool, grad: torch.Tensor) -> None:
        whole = grad.new_zeros(state)
        whole[..., place] = (grad.transpose(0, 1) if is_transposed else grad).reshape(shape)
        keep(whole)

    for part, like in zip(parts, shaped, strict=True):
        last = first + like.shape[-1]
        part.register_hook(partial(keep_whole, slice(first, last), like.shape, len(part) != len(like)))
        first = last
    return state


@torch.enable_grad()
def has_rows_mixed(output: torch.Tensor, hidden: torch.Tensor) -> bool:
    """Return whether a vector of the output (..., V) depends on several of the hidden state's (..., H).

    That is so in a graph network. One vector's backward is run, from the output to the hidden state; no parameter is
    reached.
    """
    num_vectors = math.prod(hidden.shape[:-1])
    vectors = output.reshape(-1, output.shape[-1]) if output.dim() > 1 else output.unsqueeze(-1)
    if num_vectors < 2 or len(vectors) != num_vectors:
        return False
    (grad,) = torch.autograd.grad(vectors[num_vectors // 2].sum(), hidden, retain_graph=True, materialize_grads=True)
    return int((grad.reshape(num_vectors, -1) != 0).any(-1).sum()) > 1  # whichever one, if the output is transposed
