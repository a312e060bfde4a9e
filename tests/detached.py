# SPDX-License-Identifier: Apache-2.0
"""The slow obvious way to a part of the gradient: the whole loss again, with the other tokens detached."""

import torch


def let_through(selected: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor | None:
    """The same values (B, T), with a gradient at the selected tokens alone, or times these factors."""
    if values is None:
        return None
    passed = torch.where(selected != 0, values, values.detach())
    if selected.is_floating_point():
        passed.register_hook(lambda grad: grad * selected.to(grad.dtype))
    return passed
