# SPDX-License-Identifier: Apache-2.0
"""Bound the attention logits of a forward that runs anyway.

Logits that grow until softmax is one-hot are a known way for weights to go bad (arXiv 2302.05442, 2309.14322). Seen are
PyTorch's own attention and a softmax over four dimensions; a flash kernel of another package is not.
"""

import logging
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ..core.ranks import Ranks
from ..core.sharding import is_compiled, plain_name

logger = logging.getLogger(__name__)

LARGE_LOGIT = 100.0
"""The bound that QK-Clip keeps attention logits under (arXiv 2507.20534, section 2.1)."""
_SOFTMAXES = (torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax)
_ATTENTION_DIMS = 4  # batch, heads, queries, keys


class AttentionLogits(TorchFunctionMode):
    """Notes, while it is active, how large each module's attention logits may be. It changes no result. A compiled
    model is not looked into.

    Of PyTorch's attention that is max |q| max |k| times the scale, over a head's queries and keys; a softmax's input is
    read itself.

    Args:
        model: the model whose forward runs.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self._names: dict[int, str] = {}
        if not is_compiled(model):
            parts = model.named_modules()
            self._names = {id(part): plain_name(name) for name, part in parts}
        self._inside: list[torch.nn.Module] = []
        self._largest: dict[str, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self.sizes: list[float] = []
        """The :attr:`bounds`, once they are read."""

    @property
    def bounds(self) -> list[torch.Tensor]:
        """Bounds on this process' logits, by module: scalars on the device."""
        return list(self._largest.values())

    def __enter__(self) -> "AttentionLogits":
        def enter(module: torch.nn.Module, _: Any) -> None:
            self._inside.append(module)

        def leave(module: torch.nn.Module, *_: Any) -> None:
            while self._inside and self._inside.pop() is not module:  # modules whose forward raised are still there
                pass

        if not self._names:
            return self
        self._hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._names:
            super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        try:
            if func is scaled_dot_product_attention:
                query, key, *_ = args
                self._note(_bound(query, key, given.get("scale")))
            elif func in _SOFTMAXES and args[0].dim() == _ATTENTION_DIMS:
                if given.get("dim", args[1] if len(args) > 1 else None) in (-1, _ATTENTION_DIMS - 1):  # over the keys
                    self._note(args[0].detach().amax())
        except Exception as error:  # a call of another shape; the forward goes on
            logger.debug("gradloc: attention logits are not known: %s", error)
        return func(*args, **given)

    def _note(self, size: torch.Tensor) -> None:
        name = next((self._names[id(each)] for each in reversed(self._inside) if id(each) in self._names), "")
        known = self._largest.get(name)
        self._largest[name] = size if known is None else torch.maximum(known, size)

    def largest(self, ranks: Ranks) -> tuple[float, str]:
        """Return the largest bound of all ranks and the name of its module; 0 and "" where no attention was seen.

        All ranks call this together, once :attr:`sizes` are known.
        """
        sizes = zip(self.sizes, self._largest, strict=True)
        mine = max(((size, name) for size, name in sizes if size == size), default=(0.0, ""))
        return max(ranks.gather(mine))


@torch.no_grad()
def _bound(query: torch.Tensor, key: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Return max |q| max |k| times the scale, over the heads: a scalar.

    Args:
        query: (..., heads, queries, width).
        key: (..., heads or fewer, keys, width); each head of its own is shared by equally many of the queries' heads.
        scale: None for 1 / sqrt(width).
    """
    # a norm with a dtype makes no copy of q and k in float32, which no search has room for
    queries, keys = (torch.linalg.vector_norm(each, dim=-1, dtype=torch.float32).amax(-1) for each in (query, key))
    if queries.shape != keys.shape:
        keys = keys.repeat_interleave(queries.shape[-1] // keys.shape[-1], dim=-1)
    return (queries * keys).max() * (query.shape[-1] ** -0.5 if scale is None else scale)
