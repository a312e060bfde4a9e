# SPDX-License-Identifier: Apache-2.0
"""The gradient of an engine whose optimizer has weights and gradients of its own, as DeepSpeed's and Megatron's have.

The engine adds gradients up in buffers that it uses again for each step. So a gradient is set aside by copy, and what
is put back is written where the optimizer's step reads it. Weights are moved in the optimizer's own, from where the
model takes them.
"""

from typing import Any

import torch

from .gradients import Gradient, GradientSpace


class WeightView(torch.nn.Parameter):
    """A view of a part of the optimizer's weights, to write through, whose gradient may have another dtype."""

    grad: Any = None

    @staticmethod
    def over(weights: torch.Tensor) -> "WeightView":
        """Return a view of these weights."""
        return WeightView(weights.detach(), requires_grad=False)


class EngineSpace(GradientSpace):
    """Base class for such engines; a subclass fills in :meth:`publish` and :meth:`buffers`."""

    is_mirrored = True

    def reshard(self) -> None:
        """Nothing is gathered but by :meth:`publish`."""

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, param.detach()) for name, param in zip(self.names, self.params, strict=True)]

    def buffers(self) -> set[int]:
        """Return the addresses of the storages that the engine uses again for its next gradient."""
        raise NotImplementedError

    def show(self) -> None:
        """Load into ``.grad`` what the optimizer is about to take, where it reads that elsewhere."""

    def give(self) -> None:
        """Write ``.grad`` where the optimizer's step reads it, where that is elsewhere."""

    def take(self) -> Gradient:
        buffers = self.buffers()

        def own(grad: torch.Tensor | None) -> torch.Tensor | None:
            is_view = grad is not None and grad.untyped_storage().data_ptr() in buffers
            return grad.clone() if grad is not None and is_view else grad

        gradient = self.run_local_synced(lambda: [own(param.grad) for param in self.params])
        self.clear()
        return gradient
