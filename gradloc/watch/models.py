# SPDX-License-Identifier: Apache-2.0
"""Find a loop's engine, and a model's body and head inside of the wrappers that a loop puts around it."""

from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.nn.parallel import DistributedDataParallel

from ..checks import require
from .megatron import MegatronEngine, is_chunk, without_wrappers
from .zero import ZeroEngine, is_engine

Engine = ZeroEngine | MegatronEngine
"""An engine that reduces the gradient and takes the optimizer's step by itself."""


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


def innermost(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DDP's, FSDP1's, DeepSpeed's, Megatron's and torch.compile's wrappers."""
    found: Any = model
    while True:
        if isinstance(found, FSDP1):
            found = found._fsdp_wrapped_module
        elif isinstance(found, DistributedDataParallel) or is_engine(found):
            found = found.module
        elif is_chunk(found):
            found = without_wrappers(found)
        elif hasattr(found, "_orig_mod"):
            found = found._orig_mod
        else:
            return found


def find_body_and_head(
    model: torch.nn.Module, hidden: torch.nn.Module | str | None
) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
    """Return the body, whose output is the last hidden state, and the head; None where the model does not say."""
    if isinstance(hidden, torch.nn.Module):
        return hidden, None
    if hidden is not None:
        try:
            return model.get_submodule(hidden), None
        except AttributeError:
            raise ValueError(f"gradloc.Watch's hidden names no module of the model: {hidden!r}") from None
    if is_sequence_first(model):
        return model.get_submodule("decoder"), model.get_submodule("output_layer")
    model = _transformers_model_in(model)
    base: Any = getattr(model, "get_base_model", lambda: model)()  # inside of PEFT's
    if getattr(base, "get_output_embeddings", None) is None:
        return None, None
    body = getattr(base, "base_model", None)
    body = innermost(body) if isinstance(body, torch.nn.Module) else None
    head = _find_head(base, body)
    if body is base:
        is_trained_alone = head is None and hasattr(base, "config")
        return body if is_trained_alone else None, head
    has_head_inside = body is not None and head in set(body.modules())
    return None if has_head_inside else body, head


def _find_head(base: Any, body: torch.nn.Module | None) -> torch.nn.Module | None:
    """Return the head that a transformers model declares, else its only linear layer outside of the body."""
    try:
        head = base.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        head = None
    head = head or next((getattr(base, name) for name in ("score", "classifier") if hasattr(base, name)), None)
    if head is not None or body is None:
        return head
    outside = set(base.modules()) - set(body.modules())
    linear = [module for module in base.modules() if module in outside and isinstance(module, torch.nn.Linear)]
    return linear[0] if len(linear) == 1 else None


def is_sequence_first(model: torch.nn.Module) -> bool:
    """Return whether the model's hidden states are (T, B, H), as those of Megatron's language models are."""
    is_megatron = any(kind.__module__.startswith("megatron.core.") for kind in type(model).__mro__)
    return is_megatron and hasattr(model, "decoder") and hasattr(model, "output_layer")


def trained_parts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the parts that a loop may call in place of the model: the transformers model inside, its only trained
    child, or all trained children of a container without a forward."""
    inner = _transformers_model_in(model)
    if inner is not model:
        return [inner]
    if any(param.requires_grad for param in model.parameters(recurse=False)):
        return []
    trained = [part for part in model.children() if any(param.requires_grad for param in part.parameters())]
    is_container = type(model).forward is torch.nn.Module.forward
    return trained if len(trained) == 1 or is_container else []


def _transformers_model_in(model: torch.nn.Module) -> torch.nn.Module:
    """Return the one transformers model inside of the user's module, such as Lightning's; else the module."""
    found = [part for part in model.modules() if hasattr(part, "get_output_embeddings")]
    is_one = bool(found) and set(found) <= set(found[0].modules())  # the others are its own parts
    return found[0] if is_one else model


def sparse_embedding(model: torch.nn.Module) -> str | None:
    """Return the name of the first embedding whose gradient is a sparse tensor; None without one."""
    return next((name for name, part in model.named_modules() if getattr(part, "sparse", False) is True), None)
