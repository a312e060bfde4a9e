# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of any loop, as a step that can be run again.

:class:`LoopStep` has what such steps share; a trainer's own says how a forward is run again.

Shapes: B rows of a micro-batch, T positions.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType
from typing import Any

import torch

from ..core.sharding import reduction_deferred
from ..core.step import Details, Numerics, Outputs, Recorded, to_host
from ..loop.batch import Rows, joined

Forward = Callable[[], Any]
"""Gives log-probs (B, T), or a tuple of these, entropies (B, T) or None, and a scalar of what else the loss is made of
or None."""


@dataclass
class LoopMicroBatch:
    """What the loop said of one micro-batch, and what its passes left."""

    mask: torch.Tensor
    """bool (B, T)."""
    ids: torch.Tensor
    """(B, T)."""
    tensors: dict[str, torch.Tensor]
    """(B, T), by the names of :class:`~..loop.batch.BatchView`; those that the loop gave."""
    recorded: Recorded
    autocast: Callable[[], AbstractContextManager[Any]]
    dtype: torch.dtype
    """Of the forward."""
    names: Sequence[str] | None = None
    """Of the rows."""
    is_deferred: bool = False
    """Whether its backward left the sum over ranks to a later one."""
    forward: Forward = field(init=False)
    """How a trainer's step runs it again."""
    on_host: dict[str, torch.Tensor] = field(default_factory=dict)


class LoopStep:
    """All micro-batches of one optimizer step: see :class:`~..core.step.TrainingStep`.

    Args:
        module: as the loop calls it: plain, DDP, FSDP1 or FSDP2.
        num_ranks: processes that the gradient is averaged over.
        scale: gives what the loss was multiplied by (fp16).
    """

    around_pass: Callable[[bool], AbstractContextManager[None]] | None = None
    """An engine's own, around a micro-batch of a pass; called with whether it is the last."""
    first_row = 0
    """Where this rank's first row stands among all ranks': set once that is known."""

    def __init__(self, module: torch.nn.Module, num_ranks: int, scale: Callable[[], float]):
        self.module, self.num_ranks, self._scale = module, num_ranks, scale
        self.micro_batches: list[LoopMicroBatch] = []
        self._loss_scale: float | None = None

    # ---- what the search may ask

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)

    @property
    def numerics(self) -> Numerics:
        if self._loss_scale is None:
            self._loss_scale = self._scale()
        weight = 1.0 / (self.num_ranks * self._loss_scale)
        dtype = self.micro_batches[0].dtype
        dtype = torch.float32 if dtype == torch.float64 else dtype  # no search reckons with finer
        return Numerics(dtype, self._loss_scale, weight, reduces_once=self.reduces_once)

    def recorded(self, micro_batch: int) -> Recorded:
        return self.micro_batches[micro_batch].recorded

    def rows(self, micro_batch: int) -> list[int]:
        sizes = [len(each.mask) for each in self.micro_batches]
        first = self.first_row + sum(sizes[:micro_batch])
        return list(range(first, first + sizes[micro_batch]))

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        return self.micro_batches[micro_batch].mask

    def details(self, micro_batch: int) -> Details:
        given = self.micro_batches[micro_batch].tensors
        return Details(given.get("old_log_probs"), given.get("weights"))

    def in_pass(self, is_last: bool) -> AbstractContextManager[None]:
        if self.around_pass is not None:
            return self.around_pass(is_last)
        return reduction_deferred(self.module) if self.reduces_once and not is_last else nullcontext()

    # ---- what the driver reads

    def _settle(self) -> None:
        """Read what a healthy step is known by, once for all micro-batches: the step's only read beside the norm's."""
        on_device: list[Any] = []
        for each in self.micro_batches:
            on_device += [each.mask, each.recorded.log_prob_coefficient, each.tensors.get("advantages")]
        read = to_host(on_device)
        for index, each in enumerate(self.micro_batches):
            mask, coefficient, advantages = read[3 * index : 3 * index + 3]
            coefficient = torch.zeros(mask.shape) if coefficient is None else coefficient
            each.on_host = {"mask": mask, "coefficient": coefficient}
            if advantages is not None:
                each.on_host["advantages"] = advantages

    def release(self) -> None:
        """After the search: coefficients are read from the host, and the device's are let go."""
        for each in self.micro_batches:
            each.recorded.log_prob_coefficient = each.on_host["coefficient"]

    def counts(self) -> tuple[int, int]:
        """How many tokens are trained on, and how many rows there are, on this rank."""
        self._settle()
        masks = self._on_host("mask")
        return sum(int(mask.sum()) for mask in masks), sum(len(mask) for mask in masks)

    def brief(self) -> list[tuple[int, float]]:
        """Of each row how many tokens it has and their median advantage, or what stands in its place: enough where
        nothing spiked."""
        masks = self._on_host("mask")
        if self.has_advantages:
            return brief_of(masks, self._on_host("advantages"))
        return brief_of(masks, [self.loss_weights(index) for index in range(len(masks))])

    @property
    def has_advantages(self) -> bool:
        """Whether the loop said them."""
        return all("advantages" in each.tensors for each in self.micro_batches)

    def loss_weights(self, micro_batch: int) -> torch.Tensor:
        """(B, T), on the host: minus d loss / d log_prob; still over the number of tokens, which all ranks know."""
        return -self.micro_batches[micro_batch].on_host["coefficient"].float() * self.numerics.weight

    def all_rows(self) -> Rows:
        """Everything about the rows that an event may say, on the host: see :func:`~..loop.batch.joined`."""
        parts = []
        for index, each in enumerate(self.micro_batches):
            mask, ids = each.on_host["mask"], each.ids.cpu()
            names = [str(name) for name in each.names] if each.names is not None else [""] * len(mask)
            parts.append(
                {name: value.detach().cpu() for name, value in each.tensors.items()}
                | {"responses": ids, "attention_mask": _shown(mask), "response_mask": mask.long()}
                | {"loss_weights": self.loss_weights(index), "log_probs": each.recorded.log_prob.float().cpu()}
                | {name: each.on_host[name] for name in ("ranks", "shifted") if name in each.on_host}
                | {"names": names}
            )
        shared = set.intersection(*(set(part) for part in parts))
        return joined([{name: part[name] for name in part if name in shared} for part in parts])

    # ---- inside

    def _on_host(self, name: str) -> list[torch.Tensor]:
        return [each.on_host[name] for each in self.micro_batches]

    @property
    def reduces_once(self) -> bool:
        """Whether ranks sum the gradient after the last micro-batch alone."""
        return any(each.is_deferred for each in self.micro_batches[:-1])


def outputs_of(given: Any) -> Outputs:
    """What a loop's function gave, as a search reads it.

    Raises:
        ValueError: one sentence, where it gave something else.
    """
    parts = [*given] if isinstance(given, tuple | list) else [given]
    are_tensors = [isinstance(part, torch.Tensor) or (place and part is None) for place, part in enumerate(parts)]
    if not (1 <= len(parts) <= 3 and all(are_tensors)):
        found = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(
            "Watch.log_probs takes a function that returns log_probs, (log_probs, entropies) or (log_probs, entropies, "
            f"part), all tensors and the last two maybe None, found {found}."
        )
    return Outputs(*parts)


def frozen(forward: Forward) -> Forward:
    """The function with the values that its variables have now: a loop gives them others before it is run again."""
    if not isinstance(forward, FunctionType):
        return forward
    without_value = CellType()  # equal to any other whose variable has no value yet
    closure = forward.__closure__ or ()
    cells = tuple(cell if cell == without_value else CellType(cell.cell_contents) for cell in closure)
    there = forward.__globals__
    names = _names_in(forward.__code__) | {"__name__", "__builtins__"}
    used = {name: there[name] for name in names if name in there}
    kept = FunctionType(forward.__code__, used, forward.__name__, forward.__defaults__, cells)
    kept.__kwdefaults__ = forward.__kwdefaults__
    return kept


def _names_in(code: CodeType) -> set[str]:
    """The global variables that it may read, and those of the functions in it: a script's others may be large."""
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)


def autocast_now(device: torch.device) -> tuple[Callable[[], AbstractContextManager[Any]], torch.dtype | None]:
    """The autocast that is on, to be entered again, and its dtype; None where it is off."""
    kind = device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return lambda: torch.autocast(kind, dtype=dtype, enabled=dtype is not None), dtype


def _shown(mask: torch.Tensor) -> torch.Tensor:
    """Up to the last token that is trained on: what follows is padding."""
    positions = torch.arange(mask.shape[1]) * mask
    return (torch.arange(mask.shape[1]) <= positions.amax(1, keepdim=True)).long()


def brief_of(masks: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[tuple[int, float]]:
    """Pairs for :func:`.colocated.brief_view`, of micro-batches' bool (B, T) and values (B, T)."""
    rows = [
        row[kept]
        for row_values, mask in zip(values, masks, strict=True)
        for row, kept in zip(row_values, mask, strict=True)
    ]
    return [(len(row), float(row.median()) if len(row) else 0.0) for row in rows]
