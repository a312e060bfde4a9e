# SPDX-License-Identifier: Apache-2.0
"""One optimizer step as the taps saw it, in the form that a search takes.

A search reads a number of each position from forwards without a graph, and asks for the gradient of some positions.
The gradient comes from dL/dh and dL/dz themselves. What is read depends on the loss:

- ``outputs``: the model returned log-probs itself, and nothing needs to be recovered: these are read, and the gradient
  is the backward from them with the derivatives that training's left there;
- ``log_probs``: dL/dh fits a loss of log-probs, entropies, mean log-probs and log-sum-exps; these are read, in float32;
- ``logits``: any other loss, where dL/dz was kept: <dL/dz, z> of each position is read;
- ``hidden``: where it was not: <dL/dh, h>. The head's own gradient is then no part of the search.

Shapes: B rows, T positions, H hidden size, V vocabulary, W a head's outputs. A loop that says which tokens are trained
on may do so for a window of the positions, as ``logits[:, :-1]`` is one: its mask is then (B, T').
"""

import copy
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..core.fp32_head import precise_linear
from ..core.host_step import to_host
from ..core.ranks import Ranks
from ..core.step import Details, Numerics, Outputs, Recorded
from ..loop.batch import Rows, joined
from ..record import Fault
from .anew import TapRecorded, kept, present
from .head import SMALL, Fit, Potentials, chunks, fit, fit_small, fits, logit_gradient, mixed, potentials
from .rows import brief_of, shown
from .step import LoopStep, returned_log_probs
from .taps import Forwarded, Graph, ModelTap, Zero

FORMS = ("outputs", "log_probs", "logits", "hidden")
_PROBED = 64  # positions by which labels are told from other inputs
_BETTER = 0.9  # of a residual's square: later labels have to fit by so much better
_TIMES = 3.0  # a position's tolerance: a residual of the whole step up to which its loss has the form
_TINY = 1e-30  # in place of a size of 0


@dataclass
class TapMicroBatch:
    """One forward of the step: what the loop said of it, and what its passes left."""

    forwarded: Forwarded
    mask: torch.Tensor
    """bool (B, T')."""
    ids: torch.Tensor
    """(B, T')."""
    recorded: Recorded
    on_host: dict[str, torch.Tensor] = field(default_factory=dict)
    start: int = 0
    """Where the window of the mask begins."""
    is_masked_by_coefficient: bool = False
    """Whether the mask says where the coefficient is not 0, and nothing else."""
    labels: torch.Tensor | None = None
    """(B, T): the token that each position was to predict."""
    found: Fit | None = None
    """Of all positions, flat; None until the step is looked into."""
    dots: torch.Tensor | None = None
    """<dL/dh, h> of all positions, flat, as training had them."""
    biases: torch.Tensor | None = None
    """<dL/dz, bias> of all positions, flat, as far as dL/dz is known."""
    unexplained: float = math.inf
    """Squared norm of dL/dh less what dL/dz of the heads brings it; inf where some dL/dz is not known."""
    sizes: torch.Tensor | None = None
    """Of all positions, flat: what a read number is multiplied by in the loss."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """(B, T'), by the names of :class:`~..loop.batch.BatchView`; those that the loop gave."""
        return self.forwarded.known.get("tensors", {})

    @property
    def dtype(self) -> torch.dtype:
        """Of the forward."""
        return self.forwarded.dtype

    @property
    def window(self) -> slice:
        return slice(self.start, self.start + self.mask.shape[1])

    def shown(self, flat: torch.Tensor) -> torch.Tensor:
        """Return values of all positions as those of the window, (B, T')."""
        return flat.view(self.forwarded.positions)[:, self.window]


class TapStep(LoopStep):
    """All forwards of one optimizer step: see :class:`~..core.step.TrainingStep`.

    Args:
        tap: on the model.
        ranks: processes that the gradient is averaged over.
    """

    def __init__(self, tap: ModelTap, ranks: Ranks):
        super().__init__(tap.outer, ranks.size, lambda: 1.0)
        self.around_pass = tap.around_pass
        self.tap, self.ranks, self.form = tap, ranks, FORMS[1]
        self.micro_batches: list[TapMicroBatch] = []
        self.first_row = 0
        """Where this rank's first row stands among all ranks': set once that is known."""
        self.backward_factor = 1.0
        """What the gradient was multiplied by between backward and clipping, such as 1 / the loss's scale."""
        self.objection = ""
        """Why no search may trust the gradient that is run again; empty where it may."""
        self.fault: Fault | None = None
        """Which link broke, where the objection says it."""
        self.apart = 0.0
        """Norm of the difference between the gradient that is run again and the optimizer's, before clipping."""
        self.unsearched_norm = 0.0
        """Of the gradient of :attr:`unsearched`."""
        self.unsearched: tuple[str, ...] = ()
        """Parameters whose gradient is no part of the search: the head's, where dL/dz is not known."""
        self.spent = 0, 0
        """Forwards and backwards of a micro-batch that a look took before its search."""
        self.residual = 0.0
        """What is not of the form of :mod:`.head`, over the norm of all dL/dh."""
        self.has_rest = False
        """Whether some position has a part that is neither log-prob nor entropy."""

    @property
    def is_open(self) -> bool:
        """Whether the model returned the log-probs that the loss is made of, in all micro-batches."""
        return self.form == FORMS[0]

    def take(self, forwards: Sequence[Forwarded]) -> None:
        """Take over the forwards that had a backward."""
        is_open = bool(forwards) and all(each.is_open for each in forwards)
        self.form = FORMS[0] if is_open else FORMS[1]
        self.micro_batches = [self._opened(each) if is_open else self._made(each) for each in forwards]

    @staticmethod
    def _opened(forwarded: Forwarded) -> TapMicroBatch:
        """What is known of a forward that returned log-probs; of TRL's also the labels, of the next tokens."""
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
        recorded = Recorded(whole.rng, beside_coefficient=whole.beside_coefficient)
        for name in ("log_prob", "entropy", "log_prob_coefficient", "entropy_coefficient"):
            value = getattr(whole, name)
            setattr(recorded, name, None if value is None else value[:, start:])
        return TapMicroBatch(forwarded, mask, ids, recorded, start=start)

    def _made(self, forwarded: Forwarded) -> TapMicroBatch:
        """What a healthy step knows of a forward: nothing is read from the device, no forward is run again."""
        assert forwarded.norms is not None
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

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)

    @property
    def numerics(self) -> Numerics:
        """In the unit of the gradient as it was clipped."""
        dtype, factor = self.micro_batches[0].dtype, self.backward_factor
        dtype = torch.float32 if dtype == torch.float64 else dtype  # no search reckons with finer
        return Numerics(dtype, 1.0 / factor, factor / self.num_ranks, reduces_once=self.reduces_once)

    @property
    def reduces_once(self) -> bool:  # type: ignore[override]
        return any(each.forwarded.is_deferred for each in self.micro_batches[:-1])

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

    @staticmethod
    def precisely(dtype: torch.dtype) -> AbstractContextManager[None]:
        """Context of a forward without a graph whose log-probs the model returns: in it these are float32, where the
        trainer can have them so."""
        return nullcontext()

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Any:
        made = self.micro_batches[micro_batch]
        if self.is_open:
            if torch.is_grad_enabled():
                given = self.tap.graph(made.forwarded, is_cut=False).given
            else:
                with self.precisely(made.dtype):
                    given = made.forwarded.run()
            found: Any = returned_log_probs(given)
            entropy = None if found.entropy is None else found.entropy[:, made.start :]
            return found._replace(log_prob=found.log_prob[:, made.start :], entropy=entropy)
        if torch.is_grad_enabled():
            return self.tap.graph(made.forwarded)
        seen: list[Outputs] = []
        self.tap.read(made.forwarded, lambda hidden, heads: seen.append(self._read(made, hidden, heads, needs_entropy)))
        if not seen:
            raise RuntimeError("the forward, run again, came to no hidden state")
        return seen[0]

    def typical_sizes(self, micro_batch: int) -> torch.Tensor:
        """About |d loss / d log_prob| (B, T'), on the host, by which healthy steps are known.

        As the backward left it: exact where the loop gives its log-probs, else from the norm of dL/dh.
        """
        if self.is_open:
            return self.recorded(micro_batch).coefficients(self.numerics.weight)[0]
        on_host = self.micro_batches[micro_batch].on_host
        return on_host.get("typical", on_host["coefficient"]) / self.num_ranks

    def forward_bytes(self) -> int:
        """The logits in float32, and as much again; of a head that is not known nothing."""
        width = max((getattr(head, "out_features", 0) for head in self.tap.heads), default=0)
        return 8 * width * max(rows * length for rows, length in (e.forwarded.positions for e in self.micro_batches))

    # ---- at other weights

    def prepare_to_keep(self) -> None:
        """Have the next forward's logits kept until the step is taken, as far as there is room."""
        self.tap.keeps_logits = True

    def kept(self) -> LoopStep:
        """Return the first micro-batch, to be run again at the weights of a later step."""
        if not self.is_open:
            return kept(self)
        found, first = copy.copy(self), self.micro_batches[0]
        found.micro_batches = [copy.copy(first)]
        found.micro_batches[0].recorded = copy.copy(first.recorded)
        return found

    def anew(self) -> LoopStep:
        """Return the settled step as one whose loss follows the weights."""
        return self if self.is_open else present(self)

    @property
    def is_stale(self) -> bool:
        """Whether an input was written to since."""
        return any(each.forwarded.is_changed for each in self.micro_batches)

    # ---- before a search

    @torch.no_grad()
    def settle(self) -> None:
        """Recover what the loss asked of each position: one forward of each micro-batch. All ranks call it together."""
        micro_batches = self.micro_batches
        if self.is_open:
            return
        for made in micro_batches:
            made.recorded.rng.restore()
            self.ranks.run_collective(partial(self.tap.read, made.forwarded, partial(self._recover, made)))
        founds = [made.found for made in micro_batches if made.found is not None]
        off = sum(float(found.residual.double().square().sum()) for found in founds)
        whole = sum(float(made.forwarded.norms.double().square().sum()) for made in micro_batches)
        has_rest = any(bool((found.parts[:, 2:] != 0).any()) for found in founds)
        unexplained = sum(made.unexplained for made in micro_batches)
        off, whole, rest, unexplained = self.ranks.sum([off, whole, float(has_rest), unexplained])
        self.has_rest, self.residual = rest > 0, (off / whole) ** 0.5 if whole > 0 else 0.0
        is_labelled = self.ranks.all(all(made.labels is not None for made in micro_batches))
        most = _TIMES * fits(micro_batches[0].dtype)
        is_kept = unexplained != math.inf and not unexplained > most**2 * whole
        is_formed = is_labelled and not self.residual > most
        pulls, others = (_largest([found.parts[:, part] for found in founds]) for part in (slice(0, 2), slice(2, None)))
        pulls, others = self.ranks.max([pulls, others])
        is_of_log_probs = is_formed and not (is_kept and others > pulls)  # else a z-loss, say, is the loudest
        self.form = FORMS[1] if is_of_log_probs else FORMS[2] if is_kept else FORMS[3]
        for made in micro_batches:
            self.ranks.run_local_synced(partial(self._record, made))

    def _recover(self, made: TapMicroBatch, hidden: torch.Tensor, heads: Sequence[torch.nn.Module]) -> None:
        """Recover what the loss asked of one micro-batch, inside of its forward, where a sharded head is whole."""
        self._fit(made, hidden, heads)
        self._fill_small_heads(made)
        made.biases = self._biases(made)
        made.unexplained = self._unexplained(made)

    def _fit(self, made: TapMicroBatch, hidden: torch.Tensor, heads: Sequence[torch.nn.Module]) -> None:
        """Fit its dL/dh."""
        rows, width = made.forwarded.positions
        h, pulls = (each.reshape(rows * width, -1) for each in (hidden, made.forwarded.pull.to(hidden.device)))
        made.dots = (h.float() * pulls.float()).sum(-1)
        head, small = _parted(heads)
        further = torch.cat([each.weight for each in small]) if small else None
        tolerance = fits(made.dtype)
        if head is None:
            if further is not None:
                parts, residual = fit_small(pulls, further, tolerance)
                nothing = _nothing(residual)
                made.found = nothing._replace(parts=torch.cat([nothing.parts, parts], 1), residual=residual)
            return
        weight, bias = head.weight, getattr(head, "bias", None)
        loudest = pulls.float().norm(dim=-1).nan_to_num().topk(min(_PROBED, len(pulls))).indices
        least: float | None = None
        for labels, start in self._labels(made):
            flat = labels.reshape(-1)
            trial = fit(h[loudest], weight, bias, flat[loudest], pulls[loudest], tolerance, further=further)
            has_moved = trial.labels != flat[loudest]  # a token that fits is found wherever the given one does not
            left = torch.where(has_moved, pulls[loudest].float().norm(dim=-1), trial.residual)
            off = float(left.nan_to_num().square().sum())
            if least is None or off < _BETTER * least:
                least, made.labels, made.start = off, labels, start
        assert made.labels is not None
        neighbours = torch.stack([made.labels.roll(by, 1).reshape(-1) for by in (1, -1)], -1)
        made.found = fit(h, weight, bias, made.labels.reshape(-1), pulls, tolerance, neighbours, further)
        made.labels = made.found.labels.view(rows, width)

    def _labels(self, made: TapMicroBatch) -> list[tuple[torch.Tensor, int]]:
        """What each position may have been trained to say, (B, T), and where the loop's window then begins."""
        forwarded, known = made.forwarded, made.forwarded.known
        rows, width = forwarded.positions
        if "ids" not in known:
            inputs = [each.clamp(min=0) for each in forwarded.ids()]
            found = [labels for each in inputs for labels in (each.roll(-1, 1), each)]
            found = found or [torch.zeros(rows, width, dtype=torch.long, device=forwarded.norms.device)]
            return [(labels, made.start) for labels in found]
        ids, windows = known["ids"].clamp(min=0), []
        for start in _starts(width, ids.shape[1]) if ids.shape[1] != width else [0]:
            labels = ids.new_zeros(rows, width)
            labels[:, start : start + ids.shape[1]] = ids
            windows.append((labels, start))
        return windows

    @staticmethod
    def _fill_small_heads(made: TapMicroBatch) -> None:
        """Take dL/dz of heads with few outputs from the fit, where it was not kept."""
        forwarded, first = made.forwarded, 4
        for index, (module, place) in enumerate(forwarded.head_calls):
            count = len(module.weight)  # whole, inside of the forward
            if count > SMALL or made.found is None or made.found.parts.shape[1] < first + count:
                continue
            if forwarded.head_pulls[index] is None:
                where = place.positions(made.found.parts.device)
                forwarded.head_pulls[index] = made.found.parts[:, first : first + count][where]
            first += count

    def _record(self, made: TapMicroBatch) -> None:
        """What the search is given of a micro-batch, in the loss's form."""
        forwarded = made.forwarded
        norms = forwarded.norms.view(-1)
        found = made.found = _nothing(norms) if made.found is None else made.found
        if "ids" not in forwarded.known and made.labels is not None:
            made.ids = made.shown(made.labels.reshape(-1))
        recorded = TapRecorded(forwarded.rng, backward=partial(self._backward, made))
        recorded.log_prob = made.shown(found.potentials.log_prob)
        recorded.is_entropy = not self.has_rest
        if self.form == "log_probs":
            rest = found.parts[:, 1:]
            made.sizes = rest.abs().sum(-1) if self.has_rest else rest[:, 0]
            recorded.log_prob_coefficient = made.shown(found.parts[:, 0])
            if self.has_rest or bool((rest != 0).any()):
                recorded.entropy_coefficient = made.shown(made.sizes)
            made.on_host |= {"ranks": made.shown(found.rank).cpu(), "shifted": _shifted(made, found)}
        else:
            made.sizes = norms / self.tap.unit
            if self.form == "logits":
                made.sizes = torch.zeros_like(norms)
                for pull, (_, place) in zip(forwarded.head_pulls, forwarded.head_calls, strict=True):
                    size = pull.float().abs().sum(-1) / 2  # |c| (1 - p) where the loss is a log-prob
                    made.sizes.index_add_(0, place.positions(norms.device).reshape(-1), size.reshape(-1))
            recorded.log_prob_coefficient = made.shown(made.sizes)
            dots = made.dots if self.form == "hidden" else made.dots + made.biases
            recorded.score = made.shown(dots / made.sizes.clamp(min=_TINY))
        recorded.beside_coefficient = forwarded.beside
        made.recorded = recorded
        made.on_host.setdefault("typical", made.on_host["coefficient"])
        given = forwarded.coefficient if self.form == "log_probs" else None
        made.on_host["coefficient"] = (recorded.log_prob_coefficient if given is None else given).float().cpu()

    @staticmethod
    def _unexplained(made: TapMicroBatch) -> float:
        """See :attr:`TapMicroBatch.unexplained`: more than rounding where a path to the loss leads through no head."""
        forwarded = made.forwarded
        if not forwarded.head_pulls or any(pull is None for pull in forwarded.head_pulls):
            return math.inf  # not a number is what a gradient that is not finite leaves
        assert made.dots is not None
        rest = forwarded.pull.to(made.dots.device, torch.float32, copy=True).reshape(-1, forwarded.pull.shape[-1])
        for pull, (module, place) in zip(forwarded.head_pulls, forwarded.head_calls, strict=True):
            where, weight = place.positions(rest.device).reshape(-1), module.weight
            flat = pull.reshape(len(where), -1)
            for part in chunks(len(flat), len(weight)):
                rest.index_add_(0, where[part], mixed(flat[part].float(), weight), alpha=-1.0)
        return float(rest.double().square().sum())

    def _biases(self, made: TapMicroBatch) -> torch.Tensor:
        """<dL/dz, bias> of each position, flat: a constant, by which <dL/dz, z> differs from <dL/dh, h>."""
        assert made.dots is not None
        found = torch.zeros_like(made.dots)
        for pull, (module, place) in zip(made.forwarded.head_pulls, made.forwarded.head_calls, strict=True):
            bias = getattr(module, "bias", None)
            if pull is not None and bias is not None:
                where = place.positions(found.device).reshape(-1)
                found.index_add_(0, where, pull.reshape(len(where), -1).float() @ bias.detach().float())
        return found

    def _read(
        self, made: TapMicroBatch, hidden: torch.Tensor, heads: Sequence[torch.nn.Module], needs_entropy: bool
    ) -> Outputs:
        """What a search reads of each position at the present weights, float32 (B, T')."""
        forwarded = made.forwarded
        rows, width = forwarded.positions
        flat = hidden.reshape(rows * width, -1)
        head, small = _parted(heads)
        if self.form != "log_probs" and not (needs_entropy and head is not None):
            total = flat.new_zeros(rows * width, dtype=torch.float32)
            if self.form == "hidden":
                pull = forwarded.pull.to(flat.device).reshape(rows * width, -1)
                total = (pull.float() * flat.float()).sum(-1)
            else:
                for pull, (module, place) in zip(forwarded.head_pulls, forwarded.head_calls, strict=True):
                    where = place.positions(flat.device).reshape(-1)
                    total.index_add_(0, where, _along(flat[where], module, pull.reshape(len(where), -1)))
            return Outputs(made.shown(total / made.sizes.clamp(min=_TINY)))
        known = []
        labels = made.labels.reshape(-1) if made.labels is not None else flat.new_zeros(len(flat), dtype=torch.long)
        for part in chunks(len(flat), len(head.weight)):
            logits = precise_linear(flat[part], head.weight, getattr(head, "bias", None))
            known.append(potentials(logits, labels[part].clamp(0, len(head.weight) - 1)))
        joined = Potentials(*(torch.cat(each) for each in zip(*known, strict=True)))
        if needs_entropy or not self.has_rest:
            return Outputs(made.shown(joined.log_prob), made.shown(joined.entropy))
        parts = made.found.parts
        rest = sum(parts[:, index] * joined[index] for index in (1, 2, 3))
        if small:
            further = torch.cat([precise_linear(flat, each.weight, each.bias) for each in small], 1)
            rest = rest + (further * parts[:, 4 : 4 + further.shape[1]]).sum(-1)
        return Outputs(made.shown(joined.log_prob), made.shown(rest / made.sizes.clamp(min=_TINY)))

    # ---- the gradient of a selection

    def _backward(self, made: TapMicroBatch, selected: torch.Tensor | None, graph: Graph, unit: float = 1.0) -> None:
        """Add the selected positions' part of the gradient to ``.grad``."""
        forwarded, keep = made.forwarded, None
        if selected is not None:
            keep = torch.ones(forwarded.positions, dtype=selected.dtype, device=forwarded.norms.device)
            keep[:, made.window] = selected
        roots, grads = [graph.hidden], [_kept(forwarded.pull.to(graph.hidden.device), keep, unit)]
        for output, pull, (_, place) in zip(graph.heads, forwarded.head_pulls, forwarded.head_calls, strict=True):
            if not output.requires_grad or self.form == "hidden":
                continue
            positions = place.positions(output.device)
            pull = self._head_pull(made, output, positions) if pull is None else pull
            if pull is not None:
                roots.append(output)
                grads.append(_kept(pull.to(output.dtype), None if keep is None else keep.view(-1)[positions], unit))
        if graph.beside is not None and forwarded.beside is not None and graph.beside.requires_grad:
            roots.append(graph.beside)
            grads.append((forwarded.beside / unit).to(graph.beside.dtype))
        if graph.anchors:
            roots.append(Zero.apply(*graph.anchors))
            grads.append(torch.ones_like(roots[-1]))
        torch.autograd.backward(roots, grads)

    def _head_pull(self, made: TapMicroBatch, output: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """dL/dz from the parts of the loss; None where it has not that form."""
        if self.form != "log_probs" or made.labels is None or made.found is None:
            return None
        rows = output.detach().reshape(-1, output.shape[-1])
        where, out = positions.reshape(-1), torch.empty_like(rows)
        for part in chunks(len(rows), rows.shape[-1]):
            labels = made.labels.reshape(-1)[where[part]].clamp(0, rows.shape[-1] - 1)
            out[part] = logit_gradient(rows[part], labels, made.found.parts[where[part]]).to(out.dtype)
        return out.view_as(output)

    # ---- what the driver reads

    def _settle(self) -> None:
        """Read what a healthy step is known by, once for all micro-batches: the step's only read beside the norm's."""
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
        return brief_of(masks, [self.loss_weights(index).abs() for index in range(len(masks))])

    @property
    def has_advantages(self) -> bool:
        """Whether the loop said them."""
        return all("advantages" in each.tensors for each in self.micro_batches)

    def loss_weights(self, micro_batch: int) -> torch.Tensor:
        """(B, T'), on the host: minus d loss / d log_prob; still over the number of tokens, which all ranks know."""
        return -self.micro_batches[micro_batch].on_host["coefficient"].float() * self.numerics.weight

    def all_rows(self) -> Rows:
        """Everything about the rows that an event may say, on the host: see :func:`~..loop.batch.joined`."""
        parts = []
        for index, each in enumerate(self.micro_batches):
            mask, ids, names = each.on_host["mask"], each.ids.cpu(), each.forwarded.known.get("rows")
            parts.append(
                {name: value.detach().cpu() for name, value in each.tensors.items()}
                | {"responses": ids, "attention_mask": shown(mask), "response_mask": mask.long()}
                | {"loss_weights": self.loss_weights(index), "log_probs": each.recorded.log_prob.float().cpu()}
                | {name: each.on_host[name] for name in ("ranks", "shifted") if name in each.on_host}
                | {"names": [""] * len(mask) if names is None else [str(name) for name in names]}
            )
        shared = set.intersection(*(set(part) for part in parts))
        return joined([{name: part[name] for name in part if name in shared} for part in parts])

    def _on_host(self, name: str) -> list[torch.Tensor]:
        return [each.on_host[name] for each in self.micro_batches]


def _largest(parts: Sequence[torch.Tensor]) -> float:
    """Return the largest absolute value that is finite; 0 without any."""
    return max(
        (float(each.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()) for each in parts if each.numel()),
        default=0.0,
    )


def _starts(width: int, window: int) -> list[int]:
    """Where a window of the positions may begin: at the first, before the last, at the end."""
    return sorted({start for start in (0, width - window - 1, width - window, 1) if 0 <= start <= width - window})


def _parted(heads: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the head with a vocabulary, None where there is none, and those with few outputs."""
    matrices = [head for head in heads if getattr(head, "weight", None) is not None and head.weight.dim() == 2]
    large = [head for head in matrices if len(head.weight) > SMALL]
    return max(large, key=lambda head: len(head.weight), default=None), [e for e in matrices if len(e.weight) <= SMALL]


def _kept(pull: torch.Tensor, keep: torch.Tensor | None, unit: float) -> torch.Tensor:
    """Return the pulls (..., W) of the kept positions (...), exactly 0 elsewhere."""
    pull = pull if unit == 1.0 else pull / unit
    if keep is None:
        return pull
    keep = keep.view(*pull.shape[:-1], 1)
    if keep.is_floating_point():
        return torch.where(keep != 0, pull * keep.to(pull.dtype), 0.0)
    return torch.where(keep, pull, 0.0)


def _along(flat: torch.Tensor, head: Any, pull: torch.Tensor) -> torch.Tensor:
    """<dL/dz, z> of each position, float32 (N,)."""
    found = []
    for part in chunks(len(flat), len(head.weight)):
        logits = precise_linear(flat[part], head.weight, getattr(head, "bias", None))
        found.append((logits * pull[part].float()).sum(-1))
    return torch.cat(found)


def _shifted(made: TapMicroBatch, found: Fit) -> torch.Tensor:
    """Log-probs (B, T') of the labels moved by one, in the direction that each row finds likelier; on the host."""
    moved = [made.shown(values) for values in found.neighbours.unbind(-1)]
    sums = [(values * made.mask).sum(1) for values in moved]
    return torch.where((sums[0] > sums[1]).unsqueeze(1), *moved).cpu()


def _nothing(norms: torch.Tensor) -> Fit:
    zero = torch.zeros_like(norms)
    return Fit(
        zero.long(), zero.unsqueeze(-1).expand(-1, 4), norms, Potentials(*[zero] * 4), zero.long(), zero.unsqueeze(-1)
    )
