# SPDX-License-Identifier: Apache-2.0
"""The module where a NaN or inf first appears, forward or backward: by hooks during a replay of one micro-batch.

Each module's output, and the gradient that comes back to it, is measured by its largest absolute value, which stays on
the device until the end. The last values before the first that is not finite show whether numbers grew until they
overflowed.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ...core.ranks import PeerFailure
from ...record import FirstNotFinite
from ..task import Task

_NUM_BEFORE = 3  # modules told of before the first that is not finite
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_WAYS = ("forward", "backward")


def first_not_finite(task: Task) -> tuple[FirstNotFinite | None, int | None]:
    """Replay micro-batches, one probe each, until one of them shows it. All ranks call this together.

    Returns:
        Where, and in which micro-batch. (None, None) if none shows it, if the loss's own derivative is not finite, or
        if the search may not cost as much.
    """
    prober, ranks = task.prober, task.prober.ranks
    if prober.step.is_scheduled:  # no process of a pipeline sees all modules
        return None, None
    broken, suspects = _suspects(task)
    for index in suspects:
        if not task.can_afford(backwards=1, is_certificate=True):
            break
        sizes = _Sizes()
        try:
            with sizes.of(prober.space.model):
                prober.compute([(index, None)])
            mine = ranks.agree(partial(sizes.first, _WAYS if broken else _WAYS[1:]))
            found = [first for first in ranks.gather(mine) if first is not None]
        except PeerFailure:  # all ranks heard of it, and go on without
            break
        if found:
            return min(found, key=lambda first: _WAYS.index(first.way)), index
    return None, None


def _suspects(task: Task) -> tuple[bool, list[int]]:
    """(whether a log-prob is not finite, which micro-batches to replay): the first with such a log-prob, none if only
    the loss is not finite, else all."""
    step, ranks = task.prober.step, task.prober.ranks
    num = step.num_micro_batches

    def local() -> list[float]:
        masks = [step.token_mask(index) for index in range(num)]
        forwards = [step.recorded(index).log_prob[mask] for index, mask in enumerate(masks)]
        losses = [step.coefficients(index)[0][mask] for index, mask in enumerate(masks)]
        return [float(not values.isfinite().all()) for values in forwards + losses]

    flags = ranks.max(ranks.agree(local))
    broken = [index for index in range(num) if flags[index]]
    return bool(broken), broken[:1] if broken else [] if any(flags) else list(range(num))


class _Sizes:
    """The largest |value| of every module's output and of its gradient, in the order of computation."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[str, torch.Tensor]]] = {way: [] for way in _WAYS}

    @contextmanager
    def of(self, model: torch.nn.Module) -> Iterator[None]:
        """Context in which runs of this model are noted."""
        named = {_plain(name): module for name, module in model.named_modules()}  # without wrappers
        hooks = [module.register_forward_hook(partial(self._note, name)) for name, module in named.items() if name]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def first(self, ways: tuple[str, ...]) -> FirstNotFinite | None:
        """The first on these ways that is not finite on this rank, with the last ones before it; None if all are."""
        for way in ways:
            found = self._found[way]
            values = torch.stack([size.float() for _, size in found]).tolist() if found else []
            at = next((at for at, value in enumerate(values) if not math.isfinite(value)), None)
            if at is not None:
                before = {name: values[number] for number, (name, _) in enumerate(found[:at])}
                return FirstNotFinite(found[at][0], way, dict(list(before.items())[-_NUM_BEFORE:]))
        return None

    def _note(self, name: str, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        is_recomputed = torch._C._current_graph_task_id() != -1  # by checkpointing, within the backward
        for tensor in tree_leaves(output):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or not tensor.numel():
                continue
            if not is_recomputed:
                self._add("forward", name, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._add, "backward", name))

    def _add(self, way: str, name: str, tensor: torch.Tensor) -> None:
        self._found[way].append((name, torch.linalg.vector_norm(tensor.detach(), math.inf)))


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
