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
from typing import Any, NamedTuple, TypeVar

import torch

from .gradients import Gradient, GradientSpace
from .precision import HALVES, UNITS, NoFloat32, float32_forwards, forward_unit, rounds_moves
from .ranks import LostRank, Ranks
from .selection import Part, Token, mask_of, mask_without
from .step import HostStep, Outputs, Recorded, TrainingStep, run_backward

T = TypeVar("T")


class _Pass(NamedTuple):
    """One micro-batch of a pass: a forward, and a backward that begins with ``pull``."""

    micro_batch: int
    pull: Any
    """:class:`Outputs`, or a function of what the forward returns."""
    rows: list[int] | None = None
    """Those that run; None for all."""


def _rows_of(selected: torch.Tensor | None, pull: Outputs) -> list[int] | None:
    """Those with anything selected, or the first: every rank runs a forward. None for all, as where a part of the loss
    passes through no token."""
    if selected is None or pull.beside is not None:
        return None
    rows = selected.any(dim=1).nonzero().flatten().tolist() or [0]
    return rows if len(rows) < len(selected) else None


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
        self.is_wide = self.step.numerics.dtype in HALVES and not space.is_mirrored
        """Whether :meth:`forward_for_difference` is in float32 though training is not; until a model refuses."""
        self.routes: dict[int, list[torch.Tensor]] = {}
        """Mixture of experts, by micro-batch: what each top-k of the forward chose, in their order."""
        self._is_by_row = self.step.is_by_row

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

    @property
    def unit(self) -> float:
        """Unit roundoff of what a difference of two forwards goes through: products, and weights that are moved."""
        dtype = self.step.numerics.dtype
        if not self.is_wide:
            return UNITS.get(dtype, UNITS[torch.float32])
        forward = forward_unit(self.space.module)
        return max(forward, UNITS[dtype]) if rounds_moves(self.space.params, self.space.module) else forward

    def forward_for_difference(self, micro_batch: int) -> Outputs:
        """Run a forward at moved weights, in float32 where the model can.

        Raises:
            NoFloat32: on every rank, where this model cannot; from then on forwards are in training's precision.
        """
        if not self.is_wide:
            return self.forward(micro_batch)

        def run() -> Outputs:
            with float32_forwards(self.space.module, self.space.shift):
                return self.step.forward(micro_batch)

        self.num_forwards += 1
        self.ranks.agree(self._make_sure)
        try:
            return self._together(run)
        except LostRank:
            raise
        except Exception as error:
            self.is_wide = False
            raise NoFloat32(str(error)) from error

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
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Make all ranks' modules fit for training again, after a forward that no backward follows."""
        try:
            self.space.abandon_pass()
        except Exception as error:
            why = "a forward or backward of the search that was cut off left the engine in a state of its own"
            raise LostRank(why) from error

    def compute(self, selections: Iterable[tuple[int, torch.Tensor | None]], by_row: bool = False) -> None:
        """Fill ``.grad`` with the sum of these selections' gradients, in the order given.

        Args:
            selections: pairs of a micro-batch and what to select: bool (B, T), factors (B, T), or None for all.
            by_row: whether rows with nothing selected may be left out, where the others come out as in training.
        """
        by_row = by_row and self._is_by_row

        def made() -> list[_Pass]:
            pulls = [(index, self.step.pull(index, selected), selected) for index, selected in selections]
            return [_Pass(index, pull, _rows_of(chosen, pull) if by_row else None) for index, pull, chosen in pulls]

        self._fill(made, by_row)

    def compute_recorded(self, records: Mapping[int, Recorded]) -> None:
        """Fill ``.grad`` with the gradient that these records' coefficients give, by micro-batch: the one that training
        would have accumulated bit for bit, had its backward delivered them (:meth:`.step.OwnLoss.recorded_under`)."""
        self._fill(lambda: [_Pass(micro_batch, record.pull(None)) for micro_batch, record in records.items()])

    def _fill(self, made: Callable[[], list[_Pass]], by_row: bool = False) -> None:
        """Run the forwards of these micro-batches, each with its backward; ``by_row`` if any may leave rows out."""

        def prepare() -> list[_Pass]:
            self._make_sure()
            return made()

        self.space.clear()
        passes = self.ranks.agree(prepare)
        if self.step.is_scheduled:
            self.num_forwards += len(passes)
            self.num_backwards += len(passes)
            self._together(partial(self.step.run_pass, [(each.micro_batch, each.pull) for each in passes]))
            return
        if not self._run(passes, by_row):
            self._is_by_row = False
            self._run([each._replace(rows=None) for each in passes])
        if self.step.numerics.loss_scale != 1.0:
            self.space.scale(1.0 / self.step.numerics.loss_scale)

    def _run(self, passes: list[_Pass], by_row: bool = False) -> bool:
        """Returns whether rows that ran alone came out as in training, on every rank. If not, as with dropout or
        kernels that go by the shape, ``.grad`` is left empty."""
        for number, each in enumerate(passes, 1):
            self.num_forwards += 1
            with self.step.in_pass(is_last=number == len(passes)):
                # Ranks agree between forward and backward. The logits need most memory: a rank that fails there would
                # otherwise leave its peers waiting in the backward's collectives.
                outputs = self._together(partial(self.step.forward_with_graph, each.micro_batch, each.rows))
                if by_row and not self._are_trainings(outputs, each):
                    self._abandon()
                    return False
                self.num_backwards += 1
                pull = each.pull if each.rows is None else each.pull.at(each.rows)
                self._together(partial(run_backward, outputs, pull))
        return True

    def _are_trainings(self, outputs: Outputs, of: _Pass) -> bool:
        """Whether the log-probs of rows that ran alone are training's, bit for bit, on every rank."""

        def is_same() -> bool:
            if of.rows is None:
                return True
            mask = self.step.token_mask(of.micro_batch)[of.rows]
            known = self.step.recorded(of.micro_batch).log_prob[of.rows]
            return torch.equal(outputs.log_prob.detach().cpu()[mask], known[mask])

        return self.ranks.all(self._together(is_same))

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

        self.compute(((index, selected(index)) for index in micro_batches), by_row=True)

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
