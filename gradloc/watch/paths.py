# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a forward all of its gradient passes through, read from autograd's graph."""

from collections.abc import Sequence
from typing import Any

import torch


def passes_through(output: torch.Tensor, hidden: torch.Tensor, head: torch.nn.Module) -> bool:
    """Return whether every path from ``output`` to a trained parameter, but the head's own, passes through ``hidden``.

    Nothing is computed: only the nodes of the graph are visited, those behind ``hidden`` excepted.
    """
    own = {id(param) for param in head.parameters()}
    visited, waiting = {hidden.grad_fn}, [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)  # which also keeps it alive, and its identity with it
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in own:
            return False
        waiting += [following for following, _ in node.next_functions]
    return True


def last_hidden(
    output: torch.Tensor, calls: Sequence[tuple[torch.nn.Module, torch.Tensor, Any]]
) -> torch.Tensor | None:
    """Return the last input of a linear layer that all of the output's gradient passes through; None without one.

    Args:
        output: of the model, with a graph.
        calls: linear layers in the order of their calls, each with its input and its output.
    """
    for module, given, _ in reversed(calls):
        if given.requires_grad and passes_through(output, given, module):
            return given
    return None
