# SPDX-License-Identifier: Apache-2.0
"""Make the model react far too strongly to its weights at one token of a batch, or be surer of it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from tests.toy_model.model import Decoder


@dataclass(frozen=True)
class Amplified:
    """Some layers' MLPs react ``factor`` times as strongly to their own weights at one position.

    The output at the present weights stays what it was, so no log-prob and no coefficient shows it.
    """

    layers: tuple[int, ...]
    row: int
    position: int
    """Position among the tokens that the model reads, prompt included."""
    factor: float


@dataclass(frozen=True)
class Sharpened:
    """The model is surer of what it says at one position: its logits there are ``factor`` times what they were."""

    row: int
    position: int
    """Position in the response."""
    factor: float


def edit_of(model: Decoder, edit: Amplified | Sharpened | None, rows: Sequence[int]) -> AbstractContextManager[None]:
    """Context in which the model does this while it reads these rows of the batch; nothing if the row is not there."""
    return nullcontext() if edit is None or edit.row not in rows else _Edited(model, edit, rows.index(edit.row))


class _Edited:
    """Amplified, some MLPs' output at one position is y + (factor - 1) (mlp(x0) - y0).

    x0 and y0 are the input and output there at the first forward, kept as constants: the value is
    unchanged at those weights, the derivative by these MLPs' weights is ``factor`` times as large.
    """

    def __init__(self, model: Decoder, edit: Amplified | Sharpened, row: int):
        self._at, self._factor = (row, edit.position), edit.factor
        self._first: dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}
        self._change, self._modules = self._sharpened, [model]
        if isinstance(edit, Amplified):
            self._change, self._modules = self._amplified, [model.blocks[layer].mlp for layer in edit.layers]

    def __enter__(self) -> None:
        self._handles = [module.register_forward_hook(self._change) for module in self._modules]

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.remove()

    def _amplified(self, mlp: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        run = type(mlp).forward  # calling the module itself would run this hook again
        if mlp not in self._first:
            x = inputs[0][self._at].detach().clone()
            self._first[mlp] = x, run(mlp, x).detach()
        x, y = self._first[mlp]
        extra = torch.zeros_like(output)
        extra[self._at] = (self._factor - 1) * (run(mlp, x) - y)
        return output + extra

    def _sharpened(self, model: torch.nn.Module, inputs: tuple, logits: torch.Tensor) -> torch.Tensor:
        factors = torch.ones_like(logits[..., :1])
        factors[self._at] = self._factor
        return logits * factors
