# SPDX-License-Identifier: Apache-2.0
"""Has the routers of a mixture of experts send every token where they sent it in training, while weights are moved.

A router's choice of experts jumps where two of them are as good: a log-prob jumps with it, and a difference of two
log-probs over a small step is then no derivative. Autograd differentiates with the choice as it was. So a forward at
the weights of training notes what every top-k chose, and the forwards at moved weights take the values at the same
indices.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..core.gradients import unwrapped
from ..core.probe import Prober

_TOP_K = (torch.topk, torch.Tensor.topk)
"""What the routers of transformers' models choose with."""


def has_experts(module: torch.nn.Module) -> bool:
    """Whether a model's config (transformers') says that each token goes to some of several experts."""
    config: Any = getattr(unwrapped(module), "config", None)
    read = getattr(config, "get_text_config", lambda: config)
    return bool(getattr(read(), "num_experts_per_tok", None))


def hold_routes(prober: Prober, micro_batches: Iterable[int]) -> None:
    """Note where the routers send each token at the present weights: a forward of each micro-batch that is not yet
    known, and none where the model has no experts."""
    if not has_experts(prober.space.module):
        return
    for index in micro_batches:
        if index not in prober.routes:
            chosen: list[torch.Tensor] = []
            with _Noting(chosen):
                prober.forward(index)
            prober.routes[index] = chosen


def forward_on_routes(prober: Prober, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:meth:`~..core.probe.Prober.forward` with every token sent where :func:`hold_routes` noted it."""
    chosen = prober.routes.get(micro_batch)
    if not chosen:
        return prober.forward(micro_batch)
    with _Holding(chosen):
        return prober.forward(micro_batch)


class _Noting(TorchFunctionMode):
    def __init__(self, chosen: list[torch.Tensor]):
        super().__init__()
        self._chosen = chosen

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _TOP_K:
            self._chosen.append(found.indices.to("cpu", torch.int32))
        return found


class _Holding(TorchFunctionMode):
    def __init__(self, chosen: Sequence[torch.Tensor]):
        super().__init__()
        self._chosen = iter(chosen)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func not in _TOP_K:
            return func(*args, **given)
        values = args[0] if args else given["input"]
        dim = given.get("dim", args[2] if len(args) > 2 else -1)
        indices = next(self._chosen).to(values.device, torch.int64)
        return torch.return_types.topk((values.gather(dim, indices), indices))
