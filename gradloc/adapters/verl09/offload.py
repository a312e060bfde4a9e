# SPDX-License-Identifier: Apache-2.0
"""verl's activation offload on its FSDP engine: its handler counts a backward for every forward in training mode."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl.utils.activation_offload import ActivationHandler

from ...touched import replaced


@contextmanager
def set_aside() -> Iterator[None]:
    """While a forward runs without a graph: nothing is saved for a backward, so nothing is offloaded or counted."""

    def nothing(self: ActivationHandler, module: torch.nn.Module) -> None:
        pass

    def forward(self: ActivationHandler, module: torch.nn.Module, method: Callable, *args: Any, **given: Any) -> Any:
        return method(*args, **given)

    with replaced(ActivationHandler, pre_forward=nothing, post_forward=nothing, forward=forward):
        yield


@contextmanager
def settled(engine: Any) -> Iterator[None]:
    """Around a forward of the search with a graph: its layers' hooks are not left behind if it fails."""
    settle(engine)
    try:
        yield
    except Exception:
        settle(engine)
        raise


def settle(engine: Any) -> None:
    """Have the handler forget a forward whose backward never came, where a pass of the search has failed between.

    Args:
        engine: verl's ``FSDPEngine``; where it offloads nothing, this does nothing.
    """
    hook = _hook_of(engine.module) if engine.model_config.enable_activation_offload else None
    if hook is None:
        return
    if hook.inside_context:
        hook.__exit__()
    handler = hook.offload_handler
    if handler.current_group or handler.tensor_count_current_group:
        handler.groupid_reset()
        handler.offloaded_group_count = 0
        handler.tensor_tag_to_buf.clear()
        handler.group_offload_mapping.clear()


def _hook_of(module: torch.nn.Module) -> Any:
    """The one that all its layers' forwards share, from the first of these; None where there are too few of them."""
    for layer in module.modules():
        for cell in getattr(vars(layer).get("forward"), "__closure__", None) or ():
            if isinstance(cell.cell_contents, ActivationHandler):
                return cell.cell_contents._offload_ctx
    return None
