# SPDX-License-Identifier: Apache-2.0
"""Engines that reduce the gradient and take the optimizer's step by themselves: DeepSpeed's ZeRO, and Megatron."""

from typing import Any

import torch

from ..checks import require
from .megatron import MegatronEngine, is_chunk
from .models import innermost
from .zero import ZeroEngine, is_engine

Engine = ZeroEngine | MegatronEngine


def find_engine(model: Any, optimizer: Any) -> tuple[Engine | None, torch.nn.Module]:
    """Return a loop's engine, None without one, and the model that the taps go to.

    Args:
        model: a module, DeepSpeed's engine around one, or Megatron's list of model chunks.
        optimizer: the loop's, or None.

    Raises:
        ValueError: where the model is none of these.
    """
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    if chunks and all(is_chunk(chunk) for chunk in chunks):
        return MegatronEngine(chunks, optimizer), chunks[0]
    require(isinstance(model, torch.nn.Module), "gradloc.Watch's model", "a torch.nn.Module", type(model).__name__)
    return (ZeroEngine(model), innermost(model)) if is_engine(model) else (None, model)
