# SPDX-License-Identifier: Apache-2.0
"""Gather what the ranks know of an event on the first process. The driver completes and writes it.

A rank sends a bounded amount, whatever the batch: a few numbers, one for each micro-batch, two for each token of the
micro-batches to keep. Culprits and the sequences to shade are chosen over all ranks before anything heavy is sent; then
each rank sends its own, one after the other.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from ..core.gradients import GradientSpace
from ..core.host_step import HostStep
from ..core.ranks import Ranks
from ..core.selection import mask_without
from ..record import Action, BatchStatistics, Certificate, Consequence, Culprit, Event, Search, Shares, Step, Trigger
from ..record.bundle import BundleMeta, Sequence
from ..record.columns import OF_A_TOKEN, exp
from ..search.step_causes import NOTABLE_SHARE
from ..search.task import SearchResult, Span
from ..trigger import Spike
from .fingerprint import fingerprint_from
from .layers import kind_of, layer_history, layer_of, names_for_layers, norms_by

_TERMS = ("policy", "kl", "entropy")
_LOW = 0.2  # quantile of the entropies
_MAX_SEQUENCES = 16


@dataclass(frozen=True)
class SpikeContext:
    """Everything that is known of one spike when its event is gathered; the same on every rank but for the shards."""

    place: Step
    """The optimizer step, as far as the policy knows it."""
    spike: Spike
    finding: SearchResult
    step: HostStep
    space: GradientSpace
    ranks: Ranks
    squares: torch.Tensor
    """The spike's squared norm per parameter, before clipping: float64 (num_params,)."""
    weight_sums: torch.Tensor
    """:func:`.fingerprint.own_weight_sums` over all shards: float64 (num_params, 3)."""
    history: torch.Tensor | None
    """Squared norms per parameter of earlier steps: float64 (steps, num_params); None when they were not tracked."""
    action: Action
    clip_limit: float
    """The norm that the actor clips to; inf where it does not clip the whole."""
    checkpoint: str | None
    """The folder of the saved weights; None where they were not saved."""
    head_square: float
    """The squared gradient norm of the output head, before clipping; under 0 where it is not known."""
    takes_what_is_not_finite: bool = False
    """Whether the optimizer would be given a gradient that is not finite."""
    budget: int | None = None
    """The configured number of probes."""
    keeps_all: bool = False
    """Whether all micro-batches are listed for the bundle, not only those that hold culprits."""

    @property
    def certificate(self) -> Certificate:
        assert self.finding.certificate is not None  # a search ends with one
        return self.finding.certificate


class RowShare(NamedTuple):
    """A row's part of the spike."""

    row: int
    """Its number in the batch as it was dispatched."""
    share: float
    variance: float
    num_tokens: int


@dataclass(frozen=True)
class RawEntry:
    """One micro-batch of one rank, for the bundle."""

    rank: int
    micro_batch: int
    rows: list[int]
    """Their numbers in the batch as it was dispatched."""
    log_prob_coefficients: np.ndarray
    """float32 (B, T): d loss / d log_prob of the whole step's loss, unscaled; of a critic d loss / d value."""
    entropy_coefficients: np.ndarray | None = None
    """float32 (B, T): d loss / d entropy of the whole step's loss, unscaled; None if entropy is no part of the loss."""


@dataclass(frozen=True)
class RawEvent:
    """A spike as the ranks know it: small, and whole once pickled."""

    event: Event
    """The record without the driver's part: name, run, text, stored log-probs, causes."""
    sequences: list[Sequence]
    """The columns that the search fills, over all T response positions."""
    layout: list[RawEntry]
    meta: BundleMeta
    """The bundle's facts without the driver's part and its layout."""
    row_shares: tuple["RowShare", ...] = ()
    """The parts of all rows, where shares are trusted and rows have numbers."""


def raw_event(context: SpikeContext) -> RawEvent | None:
    """Gather the event: on the first process, None on the others. All ranks call this together."""
    ranks, step, space, spans = context.ranks, context.step, context.space, context.finding.culprits
    wanted = _most_wanted(ranks.gather(ranks.run_local_synced(lambda: _notable_rows(context))))

    def own_parts() -> tuple[_Sums, dict[int, Culprit], dict[_Row, Sequence]]:
        culprits = {number: _culprit(context, span) for number, span in enumerate(spans) if span.rank == ranks.rank}
        return _sums(context), culprits, {row: _sequence(context, row) for row in wanted if row.rank == ranks.rank}

    sums, own_culprits, own_sequences = ranks.run_local_synced(own_parts)
    gathered = ranks.gather_first(sums)
    culprits = tuple(ranks.broadcast_from(span.rank, own_culprits.get(number)) for number, span in enumerate(spans))
    sequences = [ranks.broadcast_from(row.rank, own_sequences.get(row)) for row in wanted]
    weights = fingerprint_from(space, context.weight_sums)

    def build(parts: list[_Sums]) -> RawEvent:
        head_norm = None if context.head_square < 0 else math.sqrt(context.head_square)
        event = _event(context, culprits, parts, head_norm)
        meta = BundleMeta(
            temperature=step.temperature,
            dtype=str(step.dtype).removeprefix("torch."),
            loss_scale=step.loss_scale,
            has_beside=step.recorded(0).auxiliary_coefficient is not None,
            checkpoint=context.checkpoint,
            fingerprint=weights,
            layout=(),
            event=event,
        )
        layout = [entry for part in parts for entry in part.layout]
        return RawEvent(event, sequences, layout, meta, tuple(row for part in parts for row in part.row_shares))

    return ranks.run_local_synced(lambda: None if gathered is None else build(gathered))


def _event(
    context: SpikeContext, culprits: tuple[Culprit, ...], parts: list["_Sums"], head_norm: float | None
) -> Event:
    """Make the record, as far as the ranks know it; ``parts`` has one of each rank."""
    step, ranks, finding = context.step, context.ranks, context.finding
    names, squares = names_for_layers(context.space), context.squares
    history = layer_history(names, squares, context.history)
    measured, shares = finding.shares, None
    if measured is not None:
        by_micro_batch = tuple(zip(*(part.shares for part in parts), strict=True))
        shares = Shares(measured.closure, measured.closure_error, measured.is_trusted, by_micro_batch)
    return Event(
        step=replace(
            context.place,
            num_micro_batches=step.num_micro_batches,
            world_size=ranks.num_processes,
            dp_size=ranks.size,
            sp_size=ranks.replicas,
        ),
        trigger=Trigger(**vars(context.spike)),
        search=Search(
            strategy=finding.strategy,
            status=finding.status,
            stop_reason=finding.stop_reason,
            tau=finding.tau,
            budget=context.budget,
            forwards=finding.num_forwards,
            backwards=finding.num_backwards,
            seconds=finding.seconds,
            num_more=finding.num_more if finding.is_cut else None,
            more_norm=finding.more_norm,
            path=tuple(finding.path),
        ),
        culprits=culprits,
        cures=None if finding.cures is None else tuple(finding.cures),
        certificate=context.certificate,
        action=context.action,
        layers=norms_by(layer_of, names, squares),
        kinds=norms_by(kind_of, names, squares),
        layer_history=history,
        batch=_typical(parts, context.certificate.norm_after, None if history is None else history.spread),
        shares=shares,
        cause=finding.source,
        fault=finding.fault,
        rerun=finding.rerun,
        first_not_finite=finding.first_not_finite,
        consequence=_consequence(context, culprits),
        head_grad_norm=head_norm,
        model="critic" if step.recorded(0).is_value else None,
    )


def _typical(parts: list["_Sums"], norm_after: float | None, layer_spread: float | None) -> BatchStatistics:
    """Describe the batch by the coefficients and entropies of all ranks."""
    low = sorted(part.low_entropy for part in parts if part.low_entropy is not None)
    residual = math.sqrt(sum(part.coefficient_square for part in parts))
    has_jacobian = norm_after is not None and math.isfinite(norm_after) and 0 < residual < math.inf
    norms = {name: math.fsum(part.term_squares[name] for part in parts) ** 0.5 for name in _TERMS}

    def over_policy(term: str) -> float | None:
        policy, other = norms["policy"], norms[term]
        return other / policy if policy > 0 and other > 0 and math.isfinite(policy + other) else None

    return BatchStatistics(
        jacobian=norm_after / residual if norm_after is not None and has_jacobian else None,
        layer_spread=layer_spread,
        low_entropy=low[len(low) // 2] if low else None,
        entropy_over_policy=over_policy("entropy"),
        kl_over_policy=over_policy("kl"),
    )


# ---- which sequences to keep


class _Row(NamedTuple):
    """A sequence of the mini-batch."""

    rank: int
    micro_batch: int
    row: int


def _notable_rows(context: SpikeContext) -> list[tuple[float, _Row]]:
    """Return this rank's sequences that hold a culprit (inf) or a notable share of the spike (its size)."""
    step, rank, result = context.step, context.ranks.rank, context.finding
    own = [culprit for culprit in result.culprits if culprit.rank == rank]
    pairs = [(math.inf, _Row(rank, culprit.micro_batch, _places(step, culprit)[0][0])) for culprit in own]
    if result.shares is not None and result.shares.is_trusted:
        for index in range(step.num_micro_batches):
            sizes = result.shares.shares(index).sum(-1).abs().tolist()
            pairs += [(size, _Row(rank, index, row)) for row, size in enumerate(sizes) if size >= NOTABLE_SHARE]
    return sorted(pairs, key=lambda pair: -pair[0])[:_MAX_SEQUENCES]


def _most_wanted(by_rank: list[list[tuple[float, _Row]]]) -> list[_Row]:
    """Choose the rows to keep token by token, from all ranks', the most wanted first."""
    pairs = sorted((pair for part in by_rank for pair in part), key=lambda pair: (-pair[0], pair[1]))
    return list(dict.fromkeys(row for _, row in pairs))[:_MAX_SEQUENCES]


# ---- one rank's part


@dataclass(frozen=True)
class _Sums:
    """The numbers that every rank sends: few, about as many on each. `_sums` fills it, `_event` joins all ranks'."""

    coefficient_square: float
    """Squared norm of d loss / d log_prob, over all tokens but the culprits."""
    term_squares: dict[str, float]
    """Squared norm over all tokens by term: ``policy`` (without the KL term), ``kl`` and ``entropy``."""
    low_entropy: float | None
    """Entropy that a fifth of the tokens of the culprits' micro-batches are under."""
    shares: list[float]
    """Per micro-batch."""
    row_shares: list[RowShare]
    layout: list[RawEntry]


def _sums(context: SpikeContext) -> _Sums:
    step, rank, result = context.step, context.ranks.rank, context.finding
    square, terms = 0.0, dict.fromkeys(_TERMS, 0.0)
    shares = []
    for index in range(step.num_micro_batches):
        mask = step.token_mask(index)
        others = mask_without(result.tokens, index, rank, mask) & mask
        square += step.coefficients(index)[0][others].double().square().sum().item()
        for name, values in _terms(context, index).items():
            terms[name] += values[mask].double().square().sum().item()
        shares.append(0.0 if result.shares is None else float(result.shares.shares(index).sum()))
    entropies = [values[step.token_mask(index)].float() for index, values in context.finding.entropies.items()]
    flat = torch.cat(entropies) if entropies else torch.zeros(0)
    kept = sorted({token.micro_batch for token in result.tokens})
    if context.keeps_all:
        kept = list(range(step.num_micro_batches))
    return _Sums(
        coefficient_square=square,
        term_squares=terms,
        low_entropy=float(flat.quantile(_LOW)) if len(flat) else None,
        shares=shares,
        row_shares=_row_shares(context),
        layout=[_entry(step, rank, index) for index in kept],
    )


def _row_shares(context: SpikeContext) -> list[RowShare]:
    step, shares = context.step, context.finding.shares
    if shares is None or not shares.is_trusted:
        return []
    found = []
    for index in range(step.num_micro_batches):
        sums = shares.shares(index).sum(-1).tolist()
        variances = (shares.errors[index] / shares.square).square().sum(-1).tolist()
        counts = step.token_mask(index).sum(-1).tolist()
        # a loop's rows may have no numbers, and are left out then
        found += [RowShare(*row) for row in zip(step.rows(index), sums, variances, counts, strict=False)]
    return found


def _entry(step: HostStep, rank: int, index: int) -> RawEntry:
    log_prob, entropy = step.coefficients(index)[0], _entropy_coefficients(step, index)
    entropies = None if entropy is None else entropy.float().numpy()
    return RawEntry(rank, index, step.rows(index), log_prob.float().numpy(), entropies)


def _entropy_coefficients(step: HostStep, index: int) -> torch.Tensor | None:
    """Return d loss / d entropy (B, T); None where the loss has no entropy, or another part of it has that place."""
    return step.coefficients(index)[1] if step.recorded(index).is_entropy else None


def _terms(context: SpikeContext, index: int) -> dict[str, torch.Tensor]:
    """Return d loss / d log_prob (B, T) of the policy's and the KL term, and d loss / d entropy, by name if known."""
    log_prob, entropy = context.step.coefficients(index)[0], _entropy_coefficients(context.step, index)
    kl = context.step.kl_coefficients(index)
    terms = {"policy": log_prob}
    if kl is not None:
        kl = kl / context.ranks.size
        terms = {"policy": log_prob - kl, "kl": kl}
    return terms if entropy is None else {**terms, "entropy": entropy}


def _columns(context: SpikeContext, index: int) -> dict[str, torch.Tensor]:
    """Return the columns of the table of tokens that the search fills: (B, T) each, those that are known."""
    step, shares = context.step, context.finding.shares
    recorded, details, kl = step.recorded(index), step.details(index), step.kl_coefficients(index)
    output, before = ("value", "old_value") if recorded.is_value else ("log_prob", "old_log_prob_used")
    found = {
        output: recorded.log_prob if recorded.is_known else None,
        before: details.old_log_prob,
        "entropy": context.finding.entropies.get(index, recorded.entropy),
        "coefficient": step.coefficients(index)[0],
        "kl_coefficient": None if kl is None else kl / context.ranks.size,
        "entropy_coefficient": _entropy_coefficients(step, index),
        "loss_weight": details.weights,
        "share": None if shares is None else shares.shares(index),
        "share_error": None if shares is None else shares.errors[index] / shares.square,
    }
    return {name: values for name, values in found.items() if values is not None}


def _sequence(context: SpikeContext, place: _Row) -> Sequence:
    """Return one of this rank's sequences, token by token."""
    rows, columns = context.step.rows(place.micro_batch), _columns(context, place.micro_batch)
    return Sequence(
        rank=place.rank,
        micro_batch=place.micro_batch,
        micro_batch_row=place.row,
        row=rows[place.row] if rows else None,
        columns={name: tuple(values[place.row].float().tolist()) for name, values in columns.items()},
    )


def _places(step: HostStep, culprit: Span) -> list[tuple[int, int]]:
    """Row and response position of its tokens in their micro-batch."""
    places = step.token_mask(culprit.micro_batch).nonzero()[culprit.start : culprit.end]
    return [(row, position) for row, position in places.tolist()]


def _culprit(context: SpikeContext, culprit: Span) -> Culprit:
    """Return the record of one of this rank's culprits."""
    step, index, shares = context.step, culprit.micro_batch, context.finding.shares
    places = _places(step, culprit)
    row, positions = places[0][0], [position for _, position in places]
    rows, columns = step.rows(index), _columns(context, index)
    peak = positions[int(columns["coefficient"][row, positions].abs().nan_to_num(nan=math.inf).argmax())]
    share, share_error = culprit.share, 0.0 if culprit.share is not None else None
    token_norms = (culprit.norm,) if len(positions) == 1 else None
    if shares is not None and shares.is_trusted:
        products, errors = shares.products[index][row, positions], shares.errors[index][row, positions]
        if token_norms is None:  # by Cauchy-Schwarz at least |<g, G>| / ||G|| each
            token_norms = tuple((products.abs() / shares.square**0.5).tolist())
        if share is None:
            share = float(shares.shares(index)[row, positions].sum())
            share_error = float(torch.linalg.vector_norm(errors)) / shares.square
    log_prob, old = columns.get("log_prob"), columns.get("old_log_prob_used")
    log_ratio = None if log_prob is None or old is None else (log_prob - old)[row][step.token_mask(index)[row]].mean()
    return Culprit(
        span=culprit.span,
        rank=culprit.rank,
        micro_batch=index,
        micro_batch_row=row,
        row=rows[row] if rows else None,
        positions=tuple(positions),
        peak=peak,
        values={name: float(columns[name][row, peak]) for name in columns if name in OF_A_TOKEN},
        sequence_ratio=None if log_ratio is None else exp(float(log_ratio)),
        grad_norm=culprit.norm,
        is_exact=culprit.is_exact,
        threshold=culprit.threshold,
        share=share,
        share_error=share_error,
        layers={} if culprit.squares is None else norms_by(layer_of, names_for_layers(context.space), culprit.squares),
        token_norms=token_norms,
    )


def _consequence(context: SpikeContext, culprits: tuple[Culprit, ...]) -> Consequence:
    """Describe the gradient that the optimizer was given: nothing, the spike clipped, or the rest clipped."""
    taken, after, clip_limit = context.action.taken, context.certificate.norm_after, context.clip_limit
    limit = clip_limit if math.isfinite(clip_limit) else None
    given = after if taken == "mask" else context.spike.grad_norm
    if taken == "heal":
        given = next(cured.norm_after for cured in context.finding.cures or () if cured.verdict == "healed")
    if taken in ("skip", "abort") or given is None:
        return Consequence(grad_clip=limit, is_taken=False)
    if not math.isfinite(given):
        return Consequence(grad_clip=limit, is_taken=context.takes_what_is_not_finite)
    scale = min(1.0, clip_limit / (given + 1e-6))
    known = [culprit.share for culprit in culprits if culprit.share is not None]
    share = math.fsum(known) if culprits and len(known) == len(culprits) and taken != "heal" else None
    healthy = after * scale if culprits and taken != "heal" and after is not None and math.isfinite(after) else None
    return Consequence(
        grad_clip=limit,
        is_taken=True,
        clip_scale=None if limit is None else scale,
        culprit_share=0.0 if taken == "mask" else share,
        healthy_norm=None if limit is None else healthy,
    )
