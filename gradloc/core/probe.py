# SPDX-License-Identifier: Apache-2.0
"""The gradient of a chosen set of tokens, as an exact part of the training gradient (docs/method.md, section 2).

A probe is training's forward again, with the same random numbers, and a backward that begins with the coefficients that
training's own backward left on the log-probs and entropies: those of the set, and 0 for all other tokens. No loss is
run, so no clip, gate or denominator can come out differently. For disjoint sets that cover all tokens the probes
therefore add up to the full gradient, under any loss.

Shapes: B rows of the micro-batch, T response positions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from .gradients import Gradient, GradientSpace
from .ranks import LostRank, Ranks
from .selection import Part, Token, mask_of, mask_without
from .step import HostStep, Outputs, Recorded, TrainingStep, run_backward

T = TypeVar("T")


@dataclass(frozen=True)
class Measurement:
    """The outcome of a probe, the same on every rank."""

    norm: float
    """L2 norm of these tokens' part of the training gradient."""
    num_tokens: int
    weight_norm: float
    """L2 norm of these tokens' weights in the loss; the published threshold is proportional to it."""


class Prober:
    """Measures parts of a step's gradient and counts what that costs.

    ``.grad`` is scratch space here, so set the training gradient aside first. All ranks call every method together.
    """

    def __init__(self, step: TrainingStep, space: GradientSpace, ranks: Ranks):
        self.step = step if isinstance(step, HostStep) else HostStep(step, space.device, ranks.size)
        self.space = space
        self.ranks = ranks
        self.num_forwards = 0
        self.num_backwards = 0
        self.scatter: float | None = None
        """Half precision: the share of the noise's bound that is noise (:mod:`..search.share`); None until measured."""
        self.routes: dict[int, list[torch.Tensor]] = {}
        """Mixture of experts, by micro-batch: what each top-k of the forward chose, in their order."""

    @property
    def cost(self) -> int:
        """What was spent so far, in forwards of one micro-batch; a backward counts as two."""
        return self.num_forwards + 2 * self.num_backwards

    @property
    def reduction_error(self) -> float:
        """See :meth:`.gradients.GradientSpace.reduction_error`."""
        return self.space.reduction_error(self.step.num_micro_batches, self.step.numerics.reduces_once)

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Outputs:
        """See :meth:`HostStep.forward`."""
        self.num_forwards += 1
        self.ranks.agree(self._make_sure)
        return self._together(lambda: self.step.forward(micro_batch, needs_entropy))

    def entropies(self, micro_batch: int) -> torch.Tensor | None:
        """In nats (B, T) at the present weights; free if training computed them, None where the trainer has none."""
        recorded = self.step.recorded(micro_batch).entropy
        return self.forward(micro_batch, needs_entropy=True).entropy if recorded is None else recorded

    def _make_sure(self) -> None:
        """See :meth:`.memory.Room.make_sure`."""
        if self.space.room is not None:
            self.space.room.make_sure()

    def _together(self, joint: Callable[[], T]) -> T:
        """Run a forward or backward. If it fails on any rank, all ranks' modules are made fit for training again."""
        try:
            return self.ranks.together(joint)
        except LostRank:
            raise
        except Exception:
            try:
                self.space.abandon_pass()
            except Exception as error:
                why = "a failed forward or backward of the search left the engine in a state of its own"
                raise LostRank(why) from error
            raise

    def compute(self, selections: Iterable[tuple[int, torch.Tensor | None]]) -> None:
        """Fill ``.grad`` with the sum of these selections' gradients, in the order given.

        Args:
            selections: pairs of a micro-batch and what to select: bool (B, T), factors (B, T), or None for all.
        """
        self._fill(
            lambda: [(micro_batch, self.step.pull(micro_batch, selected)) for micro_batch, selected in selections]
        )

    def compute_recorded(self, records: Mapping[int, Recorded]) -> None:
        """Fill ``.grad`` with the gradient that these records' coefficients give, by micro-batch: the one that training
        would have accumulated bit for bit, had its backward delivered them (:meth:`.step.OwnLoss.recorded_under`)."""
        self._fill(lambda: [(micro_batch, record.pull(None)) for micro_batch, record in records.items()])

    def _fill(self, pulled: Callable[[], list[tuple[int, Outputs]]]) -> None:
        """One pass: the forwards of these micro-batches, each with its backward from what is pulled."""
        self.space.clear()

        def prepare() -> list[tuple[int, Outputs]]:
            self._make_sure()
            return pulled()

        pulls = self.ranks.agree(prepare)
        self.num_forwards += len(pulls)
        self.num_backwards += len(pulls)
        if self.step.is_scheduled:
            self._together(partial(self.step.run_pass, pulls))
            return
        for number, (micro_batch, pull) in enumerate(pulls, 1):
            with self.step.in_pass(is_last=number == len(pulls)):
                # Ranks agree between forward and backward. The logits need most memory: a rank that fails there would
                # otherwise leave its peers waiting in the backward's collectives.
                outputs = self._together(partial(self.step.forward_with_graph, micro_batch))
                self._together(partial(run_backward, outputs, pull))
        if self.step.numerics.loss_scale != 1.0:
            self.space.scale(1.0 / self.step.numerics.loss_scale)

    def add(self, gradient: Gradient, alpha: float = 1.0) -> None:
        """Add ``alpha`` times a gradient set aside to ``.grad``; all ranks hear if one has no memory for it."""
        self.ranks.agree(lambda: self.space.add(gradient, alpha))

    def compute_without(self, tokens: Sequence[Token], micro_batches: Sequence[int] | None = None) -> None:
        """Fill ``.grad`` with the gradient of these micro-batches (by default all) without some tokens.

        Over all micro-batches this is, bit for bit, what training would have accumulated if these tokens' coefficients
        were zero: the same kernels run on the same values in the same order.
        """
        step, rank = self.step, self.ranks.rank
        chosen = range(step.num_micro_batches) if micro_batches is None else micro_batches

        self.compute((index, mask_without(tokens, index, rank, step.token_mask(index))) for index in chosen)

    def compute_only(self, tokens: Sequence[Token], micro_batches: Sequence[int], factor: float = 1.0) -> None:
        """Fill ``.grad`` with ``factor`` times these tokens' gradient, plus what passes through no token, times 1."""
        step, rank = self.step, self.ranks.rank

        def selected(index: int) -> torch.Tensor:
            mask = step.token_mask(index)
            return factor * (mask & ~mask_without(tokens, index, rank, mask)).float()

        self.compute((index, selected(index)) for index in micro_batches)

    def measure(self, part: Part) -> Measurement:
        """Probe one part. Its gradient stays in ``.grad``."""

        def prepare() -> tuple[torch.Tensor, list[float]]:
            selected = mask_of(part, self.ranks.rank, self.step.token_mask(part.micro_batch))
            weights = self.step.token_weights(part.micro_batch)[selected].double()
            return selected, [selected.sum().item(), weights.square().sum().item()]

        selected, sums = self.ranks.agree(prepare)
        self.compute([(part.micro_batch, selected)])
        num_tokens, square = self.ranks.sum(sums)
        return Measurement(norm=self.space.norm(), num_tokens=int(num_tokens), weight_norm=square**0.5)
