# SPDX-License-Identifier: Apache-2.0
"""One optimizer step as the taps recorded it.

A search reads a number of each position from forwards without a graph, and asks for the gradient of some positions.
The gradient comes from dL/dh and dL/dz themselves. What is read depends on the loss:

- ``outputs``: the model returned log-probs itself: these are read, and the gradient is the backward from them with the
  derivatives that training's backward left there;
- ``log_probs``: dL/dh fits a loss of log-probs, entropies, mean log-probs and log-sum-exps; these are read, in float32;
- ``logits``: any other loss, where dL/dz was kept: <dL/dz, z> of each position is read;
- ``hidden``: where it was not: <dL/dh, h>. The head's own gradient is then no part of the search.

Shapes: B rows, T positions, H hidden size, V vocabulary, W a head's outputs. A loop's mask may be of a window of the
positions, such as that of ``logits[:, :-1]``: it is then (B, T').
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from ..core.fp32_head import precise_linear
from ..core.host_step import to_host
from ..core.ranks import Ranks
from ..core.step import Details, Outputs, Recorded, TrainingStep, only
from ..loop.batch import NO_TOKEN, Rows, stack_rows
from .forwarded import Graph, RecordedForward, returned_log_probs
from .head import SMALL, Fit, Potentials, chunks, fit, fit_small, logit_gradients, matmul, potentials, rounding
from .rows import attention_mask, summaries
from .step import LoopStep, TapRecorded, follow_weights, keep_first
from .taps import ModelTap

Form = Literal["outputs", "log_probs", "logits", "hidden"]
"""What is read of a position, as the list above says."""
_NUM_PROBED = 64  # positions that labels are recognised by
_BETTER = 0.9  # of a residual's square: later labels have to fit better by this factor
_NUM_TOLERANCES = 3.0  # residual of the whole step, over a position's tolerance, up to which its loss has the form
_TINY = 1e-30  # in place of a size of 0


@dataclass
class TapMicroBatch:
    """One forward of the step, what the loop noted about it, and the record of its passes."""

    forwarded: RecordedForward
    mask: torch.Tensor
    """bool (B, T')."""
    ids: torch.Tensor
    """(B, T')."""
    recorded: Recorded
    on_host: dict[str, torch.Tensor] = field(default_factory=dict)
    start: int = 0
    """Where the window of the mask begins."""
    is_masked_by_coefficient: bool = False
    """Whether the mask is where the coefficient is not 0."""
    labels: torch.Tensor | None = None
    """(B, T): the token that each position was to predict."""
    fit: Fit | None = None
    """The fit of all positions, flat; None until the step is settled."""
    dots: torch.Tensor = field(init=False)
    """<dL/dh, h> of all positions, flat, at training's weights."""
    biases: torch.Tensor = field(init=False)
    """<dL/dz, bias> of all positions, flat, of the calls whose dL/dz is known."""
    unexplained: float = math.inf
    """Squared norm of the part of dL/dh that the heads' dL/dz do not explain; inf where some dL/dz is not known."""
    sizes: torch.Tensor = field(init=False)
    """The factor on each position's read number in the loss, flat."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors (B, T') that the loop gave, by the names of :class:`~..loop.batch.BatchView`."""
        return self.forwarded.known.get("tensors", {})

    @property
    def has_tokens(self) -> bool:
        """Whether positions predict tokens: not where a row is one position, whose label is a class, or has none."""
        is_known = "ids" in self.forwarded.known or self.labels is not None or bool(self.forwarded.ids())
        return self.mask.shape[1] > 1 and (is_known or self.forwarded.has_log_probs)

    @property
    def window(self) -> slice:
        return slice(self.start, self.start + self.mask.shape[1])

    def calls(self, device: torch.device) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
        """Yield the head, the numbers of the positions (N,), and dL/dz (N, W) of each call whose dL/dz is known."""
        for call in self.forwarded.head_calls:
            if call.logit_grad is not None:
                where = call.place.positions(device).reshape(-1)
                yield call.head, where, call.logit_grad.reshape(len(where), -1)

    def in_window(self, flat: torch.Tensor) -> torch.Tensor:
        """Return values of all positions as those of the window, (B, T')."""
        return flat.view(self.forwarded.positions)[:, self.window]


class TapStep(LoopStep):
    """All forwards of one optimizer step, whose gradient is averaged over ``ranks``."""

    def __init__(self, tap: ModelTap, ranks: Ranks):
        super().__init__(tap, ranks.size)
        self.ranks = ranks
        self.form: Form = "log_probs"
        self.first_row = 0
        """Number of this rank's first row among all ranks'; set once that is known."""
        self.weights_at: list[tuple[int, int]] | None = None
        """Which weights the last backward was made at, see :func:`.replay.versions`; None where that is not known."""
        self.has_rest = False
        """Whether some position has a part that is neither log-prob nor entropy."""

    @property
    def has_log_probs(self) -> bool:
        """Whether the model returned the log-probs that the loss is made of, in all micro-batches."""
        return self.form == "outputs"

    def take(self, forwards: Sequence[RecordedForward]) -> None:
        """Make a micro-batch of each forward that had a backward."""
        has_log_probs = bool(forwards) and all(each.has_log_probs for each in forwards)
        self.form = "outputs" if has_log_probs else "log_probs"
        self.micro_batches = [
            self._with_log_probs(each) if has_log_probs else self._without_log_probs(each) for each in forwards
        ]

    @staticmethod
    def _with_log_probs(forwarded: RecordedForward) -> TapMicroBatch:
        """Return the micro-batch of a forward that returned log-probs; TRL's also has labels, of the next tokens."""
        whole, known, labels = forwarded.recorded, forwarded.known, forwarded.kwargs.get("labels")
        assert whole is not None and whole.log_prob_coefficient is not None
        width = whole.log_prob.shape[1]
        if "mask" in known:
            mask, ids = known["mask"], known["ids"]
        elif isinstance(labels, torch.Tensor):
            labels = labels[:, 1:]  # a prompt that is learned comes first, and has none
            labels = torch.nn.functional.pad(labels, (width - labels.shape[1], 0), value=-100)
            mask, ids = labels != -100, labels.clamp(min=0)
        else:
            mask = whole.log_prob_coefficient != 0
            ids = torch.zeros_like(mask, dtype=torch.long)
        start = width - mask.shape[1]
        recorded = Recorded(whole.rng, auxiliary_coefficient=whole.auxiliary_coefficient)
        for name in ("log_prob", "entropy", "log_prob_coefficient", "entropy_coefficient"):
            value = getattr(whole, name)
            setattr(recorded, name, None if value is None else value[:, start:])
        return TapMicroBatch(forwarded, mask, ids, recorded, start=start)

    def _without_log_probs(self, forwarded: RecordedForward) -> TapMicroBatch:
        """Return the micro-batch of any other forward; reads nothing from the device and runs nothing."""
        norms, known, width = forwarded.norms, forwarded.known, forwarded.positions[1]
        start, window = 0, slice(None)
        if "mask" in known and known["mask"].shape[1] != width:
            start = min(_starts(width, known["mask"].shape[1]), default=0)
            window = slice(start, start + known["mask"].shape[1])
        coefficient = forwarded.coefficient
        is_masked = coefficient is None and forwarded.factor is None and "mask" not in known
        if coefficient is None:
            coefficient = (norms if window == slice(None) else norms[:, window]) / self.tap.unit
        if forwarded.factor is not None:
            coefficient = coefficient.where(forwarded.factor[:, window], 0.0)
        mask = known["mask"] if "mask" in known else norms != 0
        ids = known["ids"] if "ids" in known else self.tap.zeros_like(mask, torch.long)
        recorded = Recorded(forwarded.rng)
        recorded.log_prob, recorded.log_prob_coefficient = self.tap.zeros_like(coefficient), coefficient
        return TapMicroBatch(forwarded, mask, ids, recorded, start=start, is_masked_by_coefficient=is_masked)

    # ---- what the search may ask

    def rows(self, micro_batch: int) -> list[int]:
        sizes = [len(each.mask) for each in self.micro_batches]
        first = self.first_row + sum(sizes[:micro_batch])
        return list(range(first, first + sizes[micro_batch]))

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        return self.micro_batches[micro_batch].mask

    def details(self, micro_batch: int) -> Details:
        given = self.micro_batches[micro_batch].tensors
        return Details(given.get("old_log_probs"), given.get("weights"))

    @staticmethod
    def precisely(dtype: torch.dtype) -> AbstractContextManager[None]:
        """Return a context in which a model that returns log-probs returns float32, where the trainer can do that."""
        return nullcontext()

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Any:
        batch = self.micro_batches[micro_batch]
        if self.has_log_probs:
            if torch.is_grad_enabled():
                given = self.tap.graph(batch.forwarded, is_cut=False).given
            else:
                with self.precisely(batch.forwarded.dtype):
                    given = batch.forwarded.run()
            found: Any = returned_log_probs(given)
            entropy = None if found.entropy is None else found.entropy[:, batch.start :]
            return found._replace(log_prob=found.log_prob[:, batch.start :], entropy=entropy)
        if torch.is_grad_enabled():
            return self.tap.graph(batch.forwarded, left_out=self._left_out(batch))
        seen: list[Outputs] = []
        self.tap.read(
            batch.forwarded, lambda hidden, heads: seen.append(self._read(batch, hidden, heads, needs_entropy))
        )
        if not seen:
            raise RuntimeError("the forward, run again, came to no hidden state")
        return seen[0]

    @staticmethod
    def _left_out(batch: TapMicroBatch) -> torch.Tensor | None:
        """Return the positions (B, T) that are left out of the gradient, all of a row of which nothing remains; None
        where the derivatives of all are finite."""
        selected = getattr(batch.recorded, "selected", None)
        if selected is None or bool(batch.on_host["coefficient"].isfinite().all()):
            return None
        left_out = torch.zeros(batch.forwarded.positions, dtype=torch.bool, device=selected.device)
        left_out[:, batch.window] = selected == 0
        return left_out | ((selected == 0) | ~batch.mask.to(selected.device)).all(1, keepdim=True)

    def typical_sizes(self, micro_batch: int) -> torch.Tensor:
        """Return about |d loss / d log_prob| (B, T'), on the host: exact where the loop gives its log-probs, else from
        the norm of dL/dh."""
        if self.has_log_probs:
            return self.recorded(micro_batch).coefficients(self.weight)[0]
        on_host = self.micro_batches[micro_batch].on_host
        return on_host.get("typical", on_host["coefficient"]) / self.num_ranks

    def forward_bytes(self) -> int:
        """Return the bytes of the logits in float32, twice; 0 where the head is not known."""
        width = max((getattr(head, "out_features", 0) for head in self.tap.heads), default=0)
        return 8 * width * max(rows * length for rows, length in (e.forwarded.positions for e in self.micro_batches))

    # ---- at other weights

    def prepare_to_keep(self) -> None:
        """Keep the next forward's logits until the step is taken, if there is room."""
        self.tap.keeps_logits = True

    def kept(self) -> TrainingStep:
        return super().kept() if self.has_log_probs else keep_first(self)

    def anew(self) -> LoopStep:
        """Return the settled step as one whose loss follows the weights."""
        return self if self.has_log_probs else follow_weights(self)

    # ---- before a search

    @torch.no_grad()
    def settle(self) -> None:
        """Recover the loss's derivatives at each position by a forward of each micro-batch, on all ranks together."""
        micro_batches = self.micro_batches
        if self.has_log_probs:
            return
        for batch in micro_batches:
            batch.recorded.rng.restore()
            self.ranks.run_collective(partial(self.tap.read, batch.forwarded, partial(self._recover, batch)))
        known = [batch.fit for batch in micro_batches if batch.fit is not None]
        off = sum(float(found.residual.double().square().sum()) for found in known)
        whole = sum(float(batch.forwarded.norms.double().square().sum()) for batch in micro_batches)
        has_rest = any(bool((found.parts[:, 2:] != 0).any()) for found in known)
        unexplained = sum(batch.unexplained for batch in micro_batches)
        off, whole, rest, unexplained = self.ranks.sum([off, whole, float(has_rest), unexplained])
        self.has_rest, residual = rest > 0, (off / whole) ** 0.5 if whole > 0 else 0.0
        is_labelled = self.ranks.all(all(batch.labels is not None for batch in micro_batches))
        most = _NUM_TOLERANCES * rounding(micro_batches[0].forwarded.dtype)
        is_kept = unexplained != math.inf and not unexplained > most**2 * whole
        is_formed = is_labelled and not residual > most
        # parts: log-prob and entropy first, then mean log-prob, log-sum-exp and the outputs of small heads
        likely, others = (_largest([found.parts[:, part] for found in known]) for part in (slice(0, 2), slice(2, None)))
        likely, others = self.ranks.max([likely, others])
        is_of_log_probs = is_formed and not (is_kept and others > likely)  # else a z-loss, say, is the loudest
        self.form = "log_probs" if is_of_log_probs else "logits" if is_kept else "hidden"
        for batch in micro_batches:
            self.ranks.run_local_synced(partial(self._record, batch))

    def _recover(self, batch: TapMicroBatch, hidden: torch.Tensor, heads: Sequence[torch.nn.Module]) -> None:
        """Recover them for one micro-batch, inside of its forward, where a sharded head is whole."""
        self._fit(batch, hidden, heads)
        self._fill_small_heads(batch)
        batch.biases = self._biases(batch)
        batch.unexplained = self._unexplained(batch)

    def _fit(self, batch: TapMicroBatch, hidden: torch.Tensor, heads: Sequence[torch.nn.Module]) -> None:
        """Fit its dL/dh, and find its labels."""
        rows, width = batch.forwarded.positions
        given = batch.forwarded.hidden_grad.to(hidden.device)
        h, grads = hidden.reshape(rows * width, -1), given.reshape(rows * width, -1)
        batch.dots = (h.float() * grads.float()).sum(-1)
        head, small = _split_heads(heads)
        further = torch.cat([each.weight for each in small]) if small else None
        tolerance = rounding(batch.forwarded.dtype)
        if head is None:
            if further is not None:
                parts, residual = fit_small(grads, further, tolerance)
                nothing = _empty_fit(residual)
                batch.fit = nothing._replace(parts=torch.cat([nothing.parts, parts], 1), residual=residual)
            return

        def fitted(at: Any, labels: torch.Tensor, neighbours: torch.Tensor) -> Fit:
            """Fit these positions."""
            own = h[at], head.weight, getattr(head, "bias", None), labels[at], grads[at]
            return fit(*own, tolerance, neighbours[at], further)

        loudest = grads.float().norm(dim=-1).nan_to_num().topk(min(_NUM_PROBED, len(grads))).indices
        least: float | None = None
        for labels, start in self._labels(batch):
            flat = labels.reshape(-1)
            trial = fitted(loudest, flat, flat.unsqueeze(1))
            has_moved = trial.labels != flat[loudest]  # a token that fits is found wherever the given one does not
            left = torch.where(has_moved, grads[loudest].float().norm(dim=-1), trial.residual)
            off = float(left.nan_to_num().square().sum())
            if least is None or off < _BETTER * least:
                least, batch.labels, batch.start = off, labels, start
        assert batch.labels is not None
        flat = batch.labels.reshape(-1)
        neighbours = torch.stack([batch.labels.roll(by, 1).reshape(-1) for by in (1, -1)], -1)
        fits = [fitted(at, flat, neighbours) for at in chunks(len(h), len(head.weight))]
        batch.fit = Fit(*(torch.cat(each) for each in zip(*fits, strict=True)))
        batch.labels = batch.fit.labels.view(rows, width)

    def _labels(self, batch: TapMicroBatch) -> list[tuple[torch.Tensor, int]]:
        """Return what may be the labels of all positions, (B, T), each with the beginning of the loop's window."""
        forwarded, known = batch.forwarded, batch.forwarded.known
        rows, width = forwarded.positions
        if "ids" not in known:
            inputs = [each.clamp(min=0) for each in forwarded.ids()]
            found = [labels for each in inputs for labels in (each.roll(-1, 1), each)]
            found = found or [torch.zeros(rows, width, dtype=torch.long, device=forwarded.norms.device)]
            return [(labels, batch.start) for labels in found]
        ids, windows = known["ids"].clamp(min=0), []
        for start in _starts(width, ids.shape[1]) if ids.shape[1] != width else [0]:
            labels = ids.new_zeros(rows, width)
            labels[:, start : start + ids.shape[1]] = ids
            windows.append((labels, start))
        return windows

    @staticmethod
    def _fill_small_heads(batch: TapMicroBatch) -> None:
        """Take dL/dz of heads with few outputs from the fit, where it was not kept."""
        forwarded, first = batch.forwarded, 4
        for call in forwarded.head_calls:
            count = len(call.head.weight)  # whole, inside of the forward
            if count > SMALL or batch.fit is None or batch.fit.parts.shape[1] < first + count:
                continue
            if call.logit_grad is None:
                where = call.place.positions(batch.fit.parts.device)
                call.logit_grad = batch.fit.parts[:, first : first + count][where]
            first += count

    def _record(self, batch: TapMicroBatch) -> None:
        """Set a micro-batch's record in the loss's form."""
        forwarded = batch.forwarded
        norms = forwarded.norms.view(-1)
        found = batch.fit = _empty_fit(norms) if batch.fit is None else batch.fit
        if "ids" not in forwarded.known:
            read = [batch.labels] if batch.labels is not None else [each.clamp(min=0) for each in forwarded.ids()]
            batch.ids = batch.in_window(read[0].reshape(-1)) if read else batch.ids
        recorded = TapRecorded(forwarded.rng, backward=partial(self._backward, batch))
        recorded.log_prob, recorded.is_known = batch.in_window(found.log_prob), batch.labels is not None
        recorded.is_entropy = not self.has_rest
        if self.form == "log_probs":
            rest = found.parts[:, 1:]
            batch.sizes = rest.abs().sum(-1) if self.has_rest else rest[:, 0]
            recorded.log_prob_coefficient = batch.in_window(found.parts[:, 0])
            if self.has_rest or bool((rest != 0).any()):
                recorded.entropy_coefficient = batch.in_window(batch.sizes)
            batch.on_host |= {"ranks": batch.in_window(found.rank).cpu(), "shifted": _shifted(batch, found)}
        else:
            batch.sizes = norms / self.tap.unit
            if self.form == "logits":
                batch.sizes = torch.zeros_like(norms)
                for _, where, grad in batch.calls(norms.device):
                    size = grad.float().abs().sum(-1) / 2  # |c| (1 - p) where the loss is a log-prob
                    batch.sizes.index_add_(0, where, size)
            recorded.log_prob_coefficient = batch.in_window(batch.sizes)
            dots = batch.dots if self.form == "hidden" else batch.dots + batch.biases
            recorded.score = batch.in_window(dots / batch.sizes.clamp(min=_TINY))
        recorded.auxiliary_coefficient = forwarded.auxiliary_coefficient
        batch.recorded = recorded
        batch.on_host.setdefault("typical", batch.on_host["coefficient"])
        given = forwarded.coefficient if self.form == "log_probs" else None
        assert recorded.log_prob_coefficient is not None
        batch.on_host["coefficient"] = (recorded.log_prob_coefficient if given is None else given).float().cpu()

    @staticmethod
    def _unexplained(batch: TapMicroBatch) -> float:
        """Return :attr:`TapMicroBatch.unexplained`: more than rounding where the loss also uses h without a head."""
        forwarded = batch.forwarded
        if not forwarded.head_calls or any(call.logit_grad is None for call in forwarded.head_calls):
            return math.inf  # not a number is what a gradient that is not finite leaves
        rest = forwarded.hidden_grad.to(batch.dots.device, torch.float32, copy=True)
        rest = rest.reshape(-1, rest.shape[-1])
        for head, where, grad in batch.calls(rest.device):
            for part in chunks(len(grad), len(head.weight)):
                rest.index_add_(0, where[part], matmul(grad[part].float(), head.weight), alpha=-1.0)
        return float(rest.double().square().sum())

    def _biases(self, batch: TapMicroBatch) -> torch.Tensor:
        """Return <dL/dz, bias> of each position, flat: the constant by which <dL/dz, z> differs from <dL/dh, h>."""
        found = torch.zeros_like(batch.dots)
        for head, where, grad in batch.calls(found.device):
            bias = getattr(head, "bias", None)
            if bias is not None:
                found.index_add_(0, where, grad.float() @ bias.detach().float())
        return found

    def _read(
        self, batch: TapMicroBatch, hidden: torch.Tensor, heads: Sequence[torch.nn.Module], needs_entropy: bool
    ) -> Outputs:
        """Return what a search reads at each position at the present weights, float32 (B, T')."""
        forwarded = batch.forwarded
        rows, width = forwarded.positions
        flat = hidden.reshape(rows * width, -1)
        head, small = _split_heads(heads)
        if self.form != "log_probs" and not (needs_entropy and head is not None):
            total = flat.new_zeros(rows * width, dtype=torch.float32)
            if self.form == "hidden":
                total = (forwarded.hidden_grad.to(flat.device).reshape(rows * width, -1).float() * flat.float()).sum(-1)
            else:
                for called, where, grad in batch.calls(flat.device):
                    total.index_add_(0, where, _along(flat[where], called, grad))
            return Outputs(batch.in_window(total / batch.sizes.clamp(min=_TINY)))
        known = []
        labels = batch.labels.reshape(-1) if batch.labels is not None else flat.new_zeros(len(flat), dtype=torch.long)
        for part in chunks(len(flat), len(head.weight)):
            logits = precise_linear(flat[part], head.weight, getattr(head, "bias", None))
            known.append(potentials(logits, labels[part].clamp(0, len(head.weight) - 1)))
        joined = Potentials(*(torch.cat(each) for each in zip(*known, strict=True)))
        if needs_entropy or not self.has_rest:
            return Outputs(batch.in_window(joined.log_prob), batch.in_window(joined.entropy))
        assert batch.fit is not None
        parts = batch.fit.parts
        rest = torch.stack([parts[:, index] * joined[index] for index in (1, 2, 3)]).sum(0)
        if small:
            further = torch.cat([precise_linear(flat, each.weight, each.bias) for each in small], 1)
            rest = rest + (further * parts[:, 4 : 4 + further.shape[1]]).sum(-1)
        return Outputs(batch.in_window(joined.log_prob), batch.in_window(rest / batch.sizes.clamp(min=_TINY)))

    # ---- the gradient of a selection

    def _backward(self, batch: TapMicroBatch, selected: torch.Tensor | None, graph: Graph, unit: float = 1.0) -> None:
        """Add the selected positions' part of the gradient to ``.grad``."""
        forwarded, keep = batch.forwarded, None
        if selected is not None:
            keep = torch.ones(forwarded.positions, dtype=selected.dtype, device=forwarded.norms.device)
            keep[:, batch.window] = selected
        assert graph.hidden is not None
        roots, grads = [graph.hidden], [_select(keep, forwarded.hidden_grad.to(graph.hidden.device), unit)]
        for output, call in zip(graph.heads, forwarded.head_calls, strict=True):
            if not output.requires_grad or self.form == "hidden":
                continue
            positions = call.place.positions(output.device)
            grad = self._logit_grad(batch, output, positions) if call.logit_grad is None else call.logit_grad
            if grad is not None:
                roots.append(output)
                grads.append(_select(None if keep is None else keep.view(-1)[positions], grad.to(output.dtype), unit))
        auxiliary = forwarded.auxiliary_coefficient
        graph.backward(roots, grads, None if auxiliary is None else auxiliary / unit)

    def _logit_grad(self, batch: TapMicroBatch, output: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Return dL/dz from the parts of the loss; None where it has not that form."""
        if self.form != "log_probs" or batch.labels is None or batch.fit is None:
            return None
        where = positions.reshape(-1)
        labels = batch.labels.reshape(-1)[where].clamp(0, output.shape[-1] - 1)
        return logit_gradients(output.detach(), labels, batch.fit.parts[where])

    # ---- what the driver reads

    def _copy_to_host(self) -> None:
        """Copy what a healthy step is judged by to the host, at once: the step's only read but the norm's."""
        on_device: list[Any] = []
        for each in self.micro_batches:
            mask = None if each.is_masked_by_coefficient else each.mask
            on_device += [mask, each.recorded.log_prob_coefficient, each.tensors.get("advantages")]
        read = to_host(on_device)
        for index, each in enumerate(self.micro_batches):
            mask, coefficient, advantages = read[3 * index : 3 * index + 3]
            assert coefficient is not None
            mask = coefficient != 0 if mask is None else mask
            each.on_host = {"mask": mask, "coefficient": coefficient}
            if advantages is not None:
                each.on_host["advantages"] = advantages

    def release(self) -> None:
        """Free the device's coefficients after the search; the host's take their place."""
        for each in self.micro_batches:
            each.recorded = copy.copy(each.recorded)
            each.recorded.log_prob_coefficient = each.on_host["coefficient"]

    def counts(self) -> tuple[int, int]:
        """Return the numbers of trained tokens and of rows on this rank."""
        self._copy_to_host()
        masks = self._on_host("mask")
        return sum(int(mask.sum()) for mask in masks), sum(len(mask) for mask in masks)

    def summaries(self) -> list[tuple[int, float]]:
        """Return each row's number of tokens and their median advantage or loss weight: enough where nothing spiked."""
        masks = self._on_host("mask")
        if self.has_advantages:
            return summaries(masks, self._on_host("advantages"))
        return summaries(masks, [self.loss_weights(index).abs() for index in range(len(masks))])

    @property
    def has_advantages(self) -> bool:
        """Whether the loop noted them."""
        return all("advantages" in each.tensors for each in self.micro_batches)

    def loss_weights(self, micro_batch: int) -> torch.Tensor:
        """Return minus d loss / d log_prob (B, T') on the host, as in a mean over all ranks' tokens."""
        return -self.micro_batches[micro_batch].on_host["coefficient"].float() * self.weight

    def all_rows(self) -> Rows:
        """Return all columns of the rows that an event may show, on the host; see :func:`~..loop.batch.stack_rows`."""
        parts = []
        for index, each in enumerate(self.micro_batches):
            mask, names = each.on_host["mask"], each.forwarded.known.get("rows")
            ids = each.ids.cpu() if each.has_tokens else torch.full_like(mask, NO_TOKEN, dtype=torch.long)
            known = each.recorded.log_prob.float().cpu()
            log_probs = known if each.recorded.is_known else torch.full_like(known, math.nan)
            parts.append(
                {name: value.detach().cpu() for name, value in each.tensors.items()}
                | {"responses": ids, "attention_mask": attention_mask(mask), "response_mask": mask.long()}
                | {"loss_weights": self.loss_weights(index), "log_probs": log_probs}
                | {name: each.on_host[name] for name in ("ranks", "shifted") if name in each.on_host}
                | {"broken_inputs": each.forwarded.broken_inputs()}
                | {"names": [""] * len(mask) if names is None else [str(name) for name in names]}
            )
        shared = set.intersection(*(set(part) for part in parts))
        return stack_rows([{name: part[name] for name in part if name in shared} for part in parts])

    def _on_host(self, name: str) -> list[torch.Tensor]:
        return [each.on_host[name] for each in self.micro_batches]


def _largest(parts: Sequence[torch.Tensor]) -> float:
    """Return the largest absolute value that is finite; 0 without any."""
    return max(
        (float(each.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()) for each in parts if each.numel()),
        default=0.0,
    )


def _starts(width: int, window: int) -> list[int]:
    """Return where a window of the positions may begin: at the first, before the last, at the end."""
    return sorted({start for start in (0, width - window - 1, width - window, 1) if 0 <= start <= width - window})


def _split_heads(heads: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the head with a vocabulary, None where there is none, and those with few outputs."""
    matrices = [head for head in heads if getattr(head, "weight", None) is not None and head.weight.dim() == 2]
    large = [head for head in matrices if len(head.weight) > SMALL]
    return max(large, key=lambda head: len(head.weight), default=None), [e for e in matrices if len(e.weight) <= SMALL]


def _select(keep: torch.Tensor | None, grad: torch.Tensor, unit: float) -> torch.Tensor:
    """Return the gradient (..., W) of the kept positions (...) over the unit, exactly 0 elsewhere."""
    grad = grad if unit == 1.0 else grad / unit
    shape = (*grad.shape[:-1], 1)
    if keep is not None and keep.numel() != math.prod(shape):  # a row is one position
        shape = (len(grad), *[1] * (grad.dim() - 1))
    return only(None if keep is None else keep.view(shape), grad)


def _along(flat: torch.Tensor, head: Any, grad: torch.Tensor) -> torch.Tensor:
    """Return <dL/dz, z> of each position, float32 (N,)."""
    found = []
    for part in chunks(len(flat), len(head.weight)):
        logits = precise_linear(flat[part], head.weight, getattr(head, "bias", None))
        found.append((logits * grad[part].float()).sum(-1))
    return torch.cat(found)


def _shifted(batch: TapMicroBatch, found: Fit) -> torch.Tensor:
    """Return log-probs (B, T') of the labels moved by one, in each row's likelier direction; on the host."""
    moved = [batch.in_window(values) for values in found.neighbours.unbind(-1)]
    sums = [(values * batch.mask).sum(1) for values in moved]
    return torch.where((sums[0] > sums[1]).unsqueeze(1), moved[0], moved[1]).cpu()


def _empty_fit(norms: torch.Tensor) -> Fit:
    zero = torch.zeros_like(norms)
    return Fit(zero.long(), zero.unsqueeze(-1).expand(-1, 4), norms, zero, zero.long(), zero.unsqueeze(-1))
