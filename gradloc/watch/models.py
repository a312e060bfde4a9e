# SPDX-License-Identifier: Apache-2.0
"""Where a model says that its body and its head are, inside of the wrappers that a loop puts around it."""

from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.nn.parallel import DistributedDataParallel

from .megatron import is_chunk, without_wrappers
from .zero import is_engine


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
    plain: Any = getattr(model, "get_base_model", lambda: model)()  # PEFT's around it
    asked = getattr(plain, "get_output_embeddings", None)
    if asked is None:
        return None, None
    try:
        head = asked()
    except (AttributeError, NotImplementedError):
        head = None
    head = head or next((getattr(plain, name) for name in ("score", "classifier") if hasattr(plain, name)), None)
    body = getattr(plain, "base_model", None)
    body = innermost(body) if isinstance(body, torch.nn.Module) else None
    if head is None and body is not None:
        behind = set(plain.modules()) - set(body.modules())
        linear = [part for part in plain.modules() if part in behind and isinstance(part, torch.nn.Linear)]
        head = linear[0] if len(linear) == 1 else None
    if body is plain and head is None and hasattr(plain, "config"):  # a body that is trained without a head
        return body, None
    is_body = body is not None and body is not plain and (head is None or head not in set(body.modules()))
    return body if is_body else None, head


def is_sequence_first(model: torch.nn.Module) -> bool:
    """Return whether this is a language model of Megatron's, whose hidden states are (T, B, H)."""
    is_megatron = any(kind.__module__.startswith("megatron.core.") for kind in type(model).__mro__)
    return is_megatron and hasattr(model, "decoder") and hasattr(model, "output_layer")


def trained_parts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the parts that a loop may call in place of the model: the transformers model inside, its only trained
    child, or all trained children of a container without a forward."""
    found = _transformers_model_in(model)
    if found is not model:
        return [found]
    if any(param.requires_grad for param in model.parameters(recurse=False)):
        return []
    trained = [part for part in model.children() if any(param.requires_grad for param in part.parameters())]
    is_container = type(model).forward is torch.nn.Module.forward
    return trained if len(trained) == 1 or is_container else []


def _transformers_model_in(model: torch.nn.Module) -> torch.nn.Module:
    """Return the one transformers model inside of the user's module, such as Lightning's; else the module."""
    found = [part for part in model.modules() if hasattr(part, "get_output_embeddings")]
    is_one = bool(found) and set(found) <= set(found[0].modules())
    return found[0] if is_one else model


def sparse_embedding(model: torch.nn.Module) -> str | None:
    """Return the name of the first embedding whose gradient is a sparse tensor; None without one."""
    return next((name for name, part in model.named_modules() if getattr(part, "sparse", False) is True), None)
