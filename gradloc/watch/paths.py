# SPDX-License-Identifier: Apache-2.0
"""Tensors that a model's output has, and that all of its gradient passes through, as autograd's graph says."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


def passing_by(output: torch.Tensor, hidden: torch.Tensor) -> Iterator[torch.nn.Parameter]:
    """Yield the trained parameters that some path from ``output`` reaches without passing through ``hidden``.

    Nothing is computed: only the nodes of the graph are visited, those behind ``hidden`` excepted.
    """
    visited, waiting = {hidden.grad_fn}, [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)  # which also keeps it alive, and its identity with it
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        waiting += [following for following, _ in node.next_functions]


def last_hidden(
    output: torch.Tensor, calls: Sequence[tuple[torch.nn.Module, torch.Tensor, Any]]
) -> torch.Tensor | None:
    """Return the last input of a linear layer that all of the output's gradient passes through; None without one.

    Args:
        output: of the model, with a graph.
        calls: linear layers in the order of their calls, each with its input and its output.
    """
    for module, given, _ in reversed(calls):
        own = {id(param) for param in module.parameters()}
        if given.requires_grad and all(id(param) in own for param in passing_by(output, given)):
            return given
    return None


def last_part(
    output: torch.Tensor, calls: Sequence[tuple[torch.nn.Module, torch.Tensor]]
) -> tuple[torch.nn.Module, torch.Tensor, torch.nn.Parameter] | None:
    """Return the last module whose output (..., H) all of the output's gradient passes through but one matrix's (V, H),
    with its output and that matrix: a head that is no call of a module. None without one.

    Args:
        output: of the model, with a graph.
        calls: modules in the order of their calls, each with its output.
    """
    once = [module for module, _ in calls]
    for module, given in reversed(calls):
        matrices: list[torch.nn.Parameter] = []
        for param in passing_by(output, given):
            matrices += [param] if param.dim() > 1 else []
            if len(matrices) > 1:
                break
        if len(matrices) == 1 and matrices[0].shape[1:] == given.shape[-1:] and once.count(module) == 1:
            return module, given, matrices[0]
    return None


def side_outputs(leaves: Sequence[torch.Tensor], hidden: torch.Tensor, heads: Sequence[torch.nn.Module]) -> list[int]:
    """Return the places of the tensors whose gradient reaches parameters, other than the heads', past ``hidden``."""
    own = {id(param) for head in heads for param in head.parameters()}
    graphs = [(place, leaf) for place, leaf in enumerate(leaves) if leaf.grad_fn is not None]
    return [place for place, leaf in graphs if any(id(param) not in own for param in passing_by(leaf, hidden))]


def has_channels_first(output: torch.Tensor) -> bool:
    """Return whether a convolution made this output, (B, C, ...), whose last dimension is no vector of a position."""
    return output.grad_fn is not None and "Convolution" in output.grad_fn.name()


def hidden_in(output: Any) -> torch.Tensor | None:
    """Return a model's last hidden state, or else the first tensor of its output that is no integer."""
    found = getattr(output, "last_hidden_state", output)
    floating = (leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
    return next(floating, None)


def num_differentiable(output: Any) -> int:
    """Return how many tensors of a model's output, but scalars, have a graph."""
    leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return sum(leaf.requires_grad and leaf.dim() > 0 for leaf in leaves)


def replace_hidden(output: Any, hidden: torch.Tensor, other: torch.Tensor) -> Any:
    """Return a body's output with h replaced: in last_hidden_state, and last in hidden_states."""
    return output if other is hidden else tree_map(lambda leaf: other if leaf is hidden else leaf, output)


def is_view(given: torch.Tensor, hidden: torch.Tensor) -> bool:
    """Return whether ``given`` holds rows of the hidden state itself, such as a slice of its positions."""
    if given is hidden:
        return True
    is_same = given.untyped_storage().data_ptr() == hidden.untyped_storage().data_ptr()
    is_known = hidden.is_contiguous() or (hidden.dim() == 3 and given.shape == hidden.transpose(0, 1).shape)
    return is_same and given.shape[-1:] == hidden.shape[-1:] and is_known and given.stride(-1) == 1
