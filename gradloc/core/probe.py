# SPDX-License-Identifier: Apache-2.0
"""The gradient of a chosen set of tokens, as an exact part of the training gradient (docs/method.md, section 2).

A probe is training's forward again, with the same random numbers, and a backward that begins with the coefficients that
training's own backward left on the log-probs and entropies: those of the set, and 0 for all other tokens. No loss is
run, so no clip, gate or denominator can come out differently. For disjoint sets that cover all tokens the probes
therefore add up to the full gradient, under any loss.

Shapes: B rows of the micro-batch, T response positions.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from .gradients import Gradient, GradientSpace
from .host_step import HostStep
from .precision import HALVES, UNITS, NoFloat32, float32_forwards, forward_unit
from .ranks import LostRank, Ranks
from .selection import Part, Token, mask_of, mask_without
from .step import Outputs, Recorded, TrainingStep, run_backward, stack_rows
from .tracker import increments_of

T = TypeVar("T")


Chosen = list[tuple[int, list[int] | None]]
"""The rows that run, by micro-batch; None for all of one."""


class _Pass(NamedTuple):
    """A forward, and a backward that begins with ``pull``."""

    rows: Chosen
    pull: Any
    """:class:`Outputs` of these rows, or a function of what the forward returns."""


def _rows_of(selected: torch.Tensor | None, pull: Outputs) -> list[int] | None:
    """Return the rows with anything selected, or row 0 without any, since every rank runs a forward. None means all
    rows: also where a part of the loss passes through no token."""
    if selected is None or pull.auxiliary is not None:
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

    def __init__(self, step: TrainingStep | HostStep, space: GradientSpace, ranks: Ranks):
        self.step = step if isinstance(step, HostStep) else HostStep(step, space.device, ranks.size)
        self.space = space
        self.ranks = ranks
        self.num_forwards = 0
        self.num_backwards = 0
        self.is_wide = self.step.dtype in HALVES and not space.is_mirrored
        """Whether :meth:`forward_for_difference` is in float32 though training is not; until a model refuses."""
        self.routes: dict[int, list[torch.Tensor]] = {}
        """Mixture of experts, by micro-batch: what each top-k of the forward chose, in their order."""
        self.sizes: dict[int, float] = {}
        """Approximate norm of each micro-batch's gradient in the last pass without some tokens, where it is known."""
        self._running: list[torch.Tensor] = []
        self._unsized: list[int] = []
        """Micro-batches of the last pass whose :attr:`sizes` are not noted yet."""
        self._is_by_row = self.step.is_by_row

    @property
    def cost(self) -> int:
        """The cost so far, in forwards of one micro-batch; a backward counts as two."""
        return self.num_forwards + 2 * self.num_backwards

    @property
    def reduction_error(self) -> float:
        """The relative error of training's sums over ranks, see :meth:`.gradients.GradientSpace.reduction_error`."""
        return self.space.reduction_error(self.step.num_micro_batches, self.step.reduces_once)

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Outputs:
        """Run a micro-batch's forward again at the present weights, see :meth:`.step.TrainingStep.forward`."""
        self.num_forwards += 1
        self.ranks.run_local_synced(self._reserve_memory)
        return self._run_on_all_ranks(lambda: self.step.forward(micro_batch, needs_entropy))

    @property
    def unit(self) -> float:
        """Unit roundoff of what a difference of two forwards goes through: products, and weights that are moved."""
        if self.is_wide:  # weights in half precision are moved in float32, too
            return forward_unit(self.space.module)
        return UNITS.get(self.step.dtype, UNITS[torch.float32])

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
        self.ranks.run_local_synced(self._reserve_memory)
        try:
            return self._run_on_all_ranks(run)
        except LostRank:
            raise
        except Exception as error:
            self.is_wide = False
            raise NoFloat32(str(error)) from error

    def entropies(self, micro_batch: int) -> torch.Tensor | None:
        """Return entropies (B, T) at the present weights, in nats; None where the trainer has none. Free if training
        computed them."""
        recorded = self.step.recorded(micro_batch).entropy
        return self.forward(micro_batch, needs_entropy=True).entropy if recorded is None else recorded

    def _reserve_memory(self) -> None:
        """Allocate what the next pass needs and free it again, so that a lack of memory shows before a collective."""
        if self.space.room is not None:
            self.space.room.make_sure()

    def _run_on_all_ranks(self, joint: Callable[[], T]) -> T:
        """Run a forward or backward. If it fails on any rank, all ranks' modules are made fit for training again."""
        try:
            return self.ranks.run_collective(joint)
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
        kept: list[tuple[int, Any, torch.Tensor | None]] = []

        def made(by_row: bool) -> list[_Pass]:
            if not kept:
                kept.extend((index, self.step.pull(index, selected), selected) for index, selected in selections)
            passes = []
            for index, pull, selected in kept:
                rows = _rows_of(selected, pull) if by_row else None
                passes.append(_Pass([(index, rows)], pull.at(rows) if by_row else pull))
            return passes

        self._fill(made, by_row and self._is_by_row)

    def compute_recorded(self, records: Mapping[int, Recorded]) -> None:
        """Fill ``.grad`` with what training would have accumulated, bit for bit, had its backward delivered the
        coefficients of these records, by micro-batch; see :meth:`.step.LossReplay.recorded_under`.
        """
        self._fill(lambda _: [_Pass([(index, None)], record.pull(None)) for index, record in records.items()])

    def compute_part(self, records: Sequence[Recorded], selected: Sequence[torch.Tensor]) -> None:
        """Fill ``.grad`` with the gradient that these records' coefficients give, of what is selected.

        Where the step can run rows by themselves, only those with a selected coefficient that is not 0 run: together,
        whatever micro-batches they came from, in forwards no larger than training's. So sums round in another order.

        Args:
            records: one of each micro-batch.
            selected: bool (B, T) of each micro-batch.
        """
        runs = self.ranks.run_local_synced(lambda: self._runs(records, selected) if self.step.is_by_row else [])
        missing = int(self.ranks.max([float(len(runs))])[0]) - len(runs)

        def made(_: bool) -> list[_Pass]:
            pairs = zip(records, selected, strict=True)
            pulls = [record.pull(mask.to(self.space.device)) for record, mask in pairs]
            if not self.step.is_by_row:
                return [_Pass([(index, None)], pull) for index, pull in enumerate(pulls)]
            joined = [_Pass(run, stack_rows([pulls[index].at(rows) for index, rows in run])) for run in runs]
            nothing = records[0].pull(torch.zeros_like(selected[0], device=self.space.device)).at([0])
            return joined + [_Pass([(0, [0])], nothing)] * missing  # which the peers' collectives wait for

        self._fill(made)

    def _runs(self, records: Sequence[Recorded], selected: Sequence[torch.Tensor]) -> list[Chosen]:
        """Cut the rows that have a part into runs, none with more rows and tokens than a micro-batch has."""
        lengths = [self.step.token_mask(index).sum(1).tolist() for index in range(len(selected))]
        known = [(len(each), sum(each)) for each in lengths]
        nonzero = []
        for record, mask in zip(records, selected, strict=True):
            pull = record.pull(mask.to(self.space.device))
            parts = [(values != 0).any(1) for values in pull[:2] if values is not None]  # NaN is one
            nonzero.append(torch.stack(parts).any(0).cpu())
        runs: list[Chosen] = []
        size = (0, 0)
        for index, are_rows in enumerate(nonzero):
            for row in are_rows.nonzero().flatten().tolist():
                size = size[0] + 1, size[1] + lengths[index][row]
                if not runs or not any(size[0] <= rows and size[1] <= tokens for rows, tokens in known):
                    runs.append([])
                    size = 1, lengths[index][row]
                runs[-1].append((index, [row]))
        return runs

    def _fill(self, made: Callable[[bool], list[_Pass]], by_row: bool = False) -> None:
        """Clear ``.grad``, build the passes and run them. With ``by_row`` they may leave rows out; where the others
        then differ from training, all rows are run."""

        def prepare() -> list[_Pass]:
            self._reserve_memory()
            return made(by_row)

        self.space.clear()
        self._running, self._unsized = [], []
        passes = self.ranks.run_local_synced(prepare)
        if self.step.is_scheduled:
            self.num_forwards += len(passes)
            self.num_backwards += len(passes)
            self._run_on_all_ranks(partial(self.step.run_pass, [(each.rows[0][0], each.pull) for each in passes]))
            return
        if not self._run(passes, by_row):
            self._is_by_row = by_row = False
            self._run(self.ranks.run_local_synced(prepare))
        if self.step.loss_scale != 1.0:
            self.space.scale(1.0 / self.step.loss_scale)

    def _run(self, passes: list[_Pass], by_row: bool = False) -> bool:
        """Run the passes. Return False, with ``.grad`` empty, if rows that ran alone differ from training on any rank,
        as with dropout or kernels whose result depends on the shape."""
        for number, each in enumerate(passes, 1):
            self.num_forwards += 1
            with self.step.in_pass(is_last=number == len(passes)):
                # Ranks agree between forward and backward. The logits need most memory: a rank that fails there would
                # otherwise leave its peers waiting in the backward's collectives.
                outputs = self._run_on_all_ranks(partial(self.step.forward_with_graph, each.rows))
                if by_row and not self._match_training(outputs, each):
                    self._abandon()
                    return False
                self.num_backwards += 1
                self._run_on_all_ranks(partial(self._run_backward, outputs, each.pull))
        return True

    def _run_backward(self, outputs: Outputs, pull: Any) -> None:
        run_backward(outputs, pull)
        self._running.append(self.space.local_squares())

    def _match_training(self, outputs: Outputs, one_pass: _Pass) -> bool:
        """Return whether the log-probs of rows that ran alone are training's, bit for bit, on every rank."""

        ((micro_batch, rows),) = one_pass.rows

        def is_same() -> bool:
            if rows is None:
                return True
            mask = self.step.token_mask(micro_batch)[rows]
            known = self.step.recorded(micro_batch).log_prob[rows]
            return torch.equal(outputs.log_prob.detach().cpu()[mask], known[mask])

        return self.ranks.all(self._run_on_all_ranks(is_same))

    def add(self, gradient: Gradient, alpha: float = 1.0) -> None:
        """Add ``alpha`` times a gradient set aside to ``.grad``; fails on all ranks if one has no memory for it."""
        self.ranks.run_local_synced(lambda: self.space.add(gradient, alpha))

    def compute_without(self, tokens: Sequence[Token], micro_batches: Sequence[int] | None = None) -> None:
        """Fill ``.grad`` with the gradient of these micro-batches (by default all) without some tokens.

        Over all micro-batches this is, bit for bit, what training would have accumulated if these tokens' coefficients
        were zero: the same kernels run on the same values in the same order.
        """
        step, rank = self.step, self.ranks.rank
        chosen = range(step.num_micro_batches) if micro_batches is None else micro_batches

        self.compute((index, mask_without(tokens, index, rank, step.token_mask(index))) for index in chosen)
        self._unsized = list(chosen)

    def norm(self) -> float:
        """Return the norm of what is in ``.grad``. After :meth:`compute_without` the same read notes :attr:`sizes`."""
        chosen, self._unsized = self._unsized, []
        for index in chosen:
            self.sizes.pop(index, None)
        running = self._running if chosen and not self.step.reduces_once else []
        squares, *found, _ = self.space.reduce_all(
            lambda: [self.space.own_squares(), *(each.sum() for each in running)]
        )
        square = sum(squares.tolist())
        if running:
            *sizes, missing = increments_of([*(float(each) / self.step.loss_scale**2 for each in found), square])
            if missing < max(sizes):  # with DeepSpeed's ZeRO all of it comes after the last micro-batch
                known = zip(chosen, sizes, strict=True)
                self.sizes |= {index: size for index, size in known if math.isfinite(size)}
        return square**0.5

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

        selected, sums = self.ranks.run_local_synced(prepare)
        self.compute([(part.micro_batch, selected)])
        num_tokens, square = self.ranks.sum(sums)
        return Measurement(norm=self.space.norm(), num_tokens=int(num_tokens), weight_norm=square**0.5)
