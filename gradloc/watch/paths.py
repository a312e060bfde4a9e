# SPDX-License-Identifier: Apache-2.0
"""Find the tensors of a model that all of its output's gradient passes through, from autograd's graph."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .outputs import tensors_in


def params_past(output: torch.Tensor, hidden: torch.Tensor) -> Iterator[torch.nn.Parameter]:
    """Yield the trained parameters that some path from ``output`` reaches without passing through ``hidden``.

    Nothing is computed: only the nodes of the graph are visited, those behind ``hidden`` excepted.
    """
    visited, waiting = {hidden.grad_fn}, [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)  # this also keeps the node alive: Python could give a new one the same identity
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        waiting += [following for following, _ in node.next_functions]


def last_hidden(
    output: torch.Tensor, calls: Sequence[tuple[torch.nn.Module, torch.Tensor, Any]]
) -> torch.Tensor | None:
    """Return the last input of a linear layer that all of the output's gradient passes through; None without one.

    ``calls`` are linear layers in the order of their calls, each with its input and its output.
    """
    for module, hidden, _ in reversed(calls):
        own = {id(param) for param in module.parameters()}
        if hidden.requires_grad and all(id(param) in own for param in params_past(output, hidden)):
            return hidden
    return None


def last_before_matrix(
    output: torch.Tensor, calls: Sequence[tuple[torch.nn.Module, torch.Tensor]]
) -> tuple[torch.nn.Module, torch.Tensor, torch.nn.Parameter] | None:
    """Find a head that is a matrix (V, H) and no module's call; return the module before it, its output, the matrix.

    All of the model's gradient, except for the matrix's and vectors', passes through that module's output (..., H). It
    is the last such module that was called once. ``calls`` are modules in the order of their calls, each with its
    output.
    """
    modules = [module for module, _ in calls]
    for module, hidden in reversed(calls):
        matrices = list(islice((param for param in params_past(output, hidden) if param.dim() > 1), 2))
        if len(matrices) == 1 and matrices[0].shape[1:] == hidden.shape[-1:] and modules.count(module) == 1:
            return module, hidden, matrices[0]
    return None


def side_outputs(leaves: Sequence[torch.Tensor], hidden: torch.Tensor, heads: Sequence[torch.nn.Module]) -> list[int]:
    """Return the indices of the tensors whose gradient reaches parameters past ``hidden``, the heads' apart."""
    own = {id(param) for head in heads for param in head.parameters()}
    found = []
    for index, leaf in enumerate(leaves):
        if leaf.grad_fn is not None and any(id(param) not in own for param in params_past(leaf, hidden)):
            found.append(index)
    return found


def has_channels_first(output: torch.Tensor) -> bool:
    """Return whether a convolution made this output, (B, C, ...), whose last dimension is no vector of a position."""
    return output.grad_fn is not None and "Convolution" in output.grad_fn.name()


def hidden_in(output: Any) -> torch.Tensor | None:
    """Return a model's last hidden state, or else the first tensor of its output that is no integer."""
    found = getattr(output, "last_hidden_state", output)
    return next((leaf for leaf in tensors_in(found) if leaf.is_floating_point()), None)


def num_differentiable(output: Any) -> int:
    """Return how many tensors of a model's output, but scalars, have a graph."""
    return sum(leaf.requires_grad and leaf.dim() > 0 for leaf in tensors_in(output))


def replace_hidden(output: Any, hidden: torch.Tensor, other: torch.Tensor) -> Any:
    """Return a body's output with h replaced: in last_hidden_state, and last in hidden_states."""
    return output if other is hidden else tree_map(lambda leaf: other if leaf is hidden else leaf, output)


def is_view(tensor: torch.Tensor, hidden: torch.Tensor) -> bool:
    """Return whether a tensor holds rows of the hidden state itself, such as a slice of its positions."""
    if tensor is hidden:
        return True
    if tensor.untyped_storage().data_ptr() != hidden.untyped_storage().data_ptr():
        return False
    is_transposed = hidden.dim() == 3 and tensor.shape == hidden.transpose(0, 1).shape
    has_whole_rows = tensor.shape[-1:] == hidden.shape[-1:] and (hidden.is_contiguous() or is_transposed)
    return has_whole_rows and tensor.stride(-1) == 1
