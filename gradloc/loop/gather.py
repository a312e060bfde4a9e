# SPDX-License-Identifier: Apache-2.0
"""What the ranks know of an event, gathered on the first process. The driver completes and writes it.

What a rank sends is bounded whatever the batch: a few numbers, one for each micro-batch, the random states (5 kB each)
of the micro-batches to keep; and of the culprits and of the sequences to shade, chosen over all ranks before anything
heavy is sent, those that are its own, one after the other.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..core.gradients import GradientSpace
from ..core.ranks import Ranks
from ..core.selection import Token, mask_without
from ..core.step import HostStep
from ..core.trigger import Place, Spike
from ..record import (
    Action,
    Coefficients,
    Consequence,
    Culprit,
    Event,
    History,
    Ratios,
    Search,
    Sequence,
    Shares,
    Step,
    Trigger,
)
from ..search.find import Finding
from ..search.task import CulpritSpan
from .fingerprint import fingerprint
from .layers import kind_of, layer_history, layer_of, norms_by
from .wire import RawEntry, RawEvent

_TERMS = ("policy", "kl", "entropy")
_LOW = 0.2  # quantile of the entropies
_NOTABLE_SHARE = 0.05  # of the spike: sequences from here on are kept token by token
_MAX_SEQUENCES = 16


@dataclass(frozen=True)
class SpikeContext:
    """Everything that is known of one spike when its event is gathered; the same on every rank but for the shards."""

    place: Place
    spike: Spike
    finding: Finding
    step: HostStep
    space: GradientSpace
    ranks: Ranks
    squares: torch.Tensor
    """The spike's squared norm per parameter, before clipping: float64 (num_params,)."""
    history: torch.Tensor | None
    """The same of earlier steps: float64 (steps, num_params); None when it was not tracked."""
    action: Action
    clip_limit: float
    """The norm that the actor clips to; inf where it does not clip the whole."""
    checkpoint: str | None
    """Where the weights were saved."""
    head_square: torch.Tensor
    """This process' part of the squared gradient norm of the output head, before clipping."""
    takes_what_is_not_finite: bool = False
    """Whether the optimizer would be given a gradient that is not finite."""


def raw_event(context: SpikeContext, budget: int, keeps_all: bool) -> RawEvent | None:
    """Gather the event; all ranks call this together.

    Args:
        context: what the localizer knows of the spike.
        budget: the configured number of probes.
        keeps_all: list all micro-batches for the bundle, not only those that hold culprits.

    Returns:
        The event on the first process, None on the others.
    """
    ranks, step, space = context.ranks, context.step, context.space
    wanted = _most_wanted(ranks.gather(ranks.agree(lambda: _notable_rows(context))))
    mine = [row for row in wanted if row.rank == ranks.rank]
    sums, records, rows = ranks.agree(
        lambda: (_sums(context, keeps_all), _culprit_records(context), {row: _sequence(context, row) for row in mine})
    )
    gathered = ranks.gather_first(sums)
    culprits = tuple(
        ranks.sent_by(culprit.tokens[0].rank, records.get(number))
        for number, culprit in enumerate(context.finding.result.culprits)
    )
    sequences = [ranks.sent_by(row.rank, rows.get(row)) for row in wanted]
    weights = fingerprint(space)
    head_square = float(space.reduce(lambda: context.head_square * space.num_replicas))

    def build(parts: list[_Sums]) -> RawEvent:
        low = sorted(part.low_entropy for part in parts if part.low_entropy is not None)
        return RawEvent(
            event=_event(context, budget, culprits, [part.shares for part in parts], math.sqrt(head_square)),
            sequences=sequences,
            residual_coefficient_norm=math.sqrt(sum(part.coefficient_square for part in parts)),
            term_norms={name: math.fsum(part.term_squares[name] for part in parts) ** 0.5 for name in _TERMS},
            low_entropy=low[len(low) // 2] if low else None,
            layout=[entry for part in parts for entry in part.layout],
            temperature=step.numerics.temperature,
            on_policy=step.details(0).on_policy,
            fingerprint=weights,
            checkpoint=context.checkpoint,
        )

    return ranks.agree(lambda: None if gathered is None else build(gathered))


def _event(
    context: SpikeContext, budget: int, culprits: tuple[Culprit, ...], shares: list[list[float]], head_norm: float
) -> Event:
    """The record, as far as the ranks know it; ``shares`` has a list of each rank's, one share per micro-batch."""
    place, spike, step, ranks = context.place, context.spike, context.step, context.ranks
    finding, names, squares = context.finding, context.space.names, context.squares
    result, measured, shared = finding.result, finding.result.shares, None
    if measured is not None:
        by_micro_batch = tuple(zip(*shares, strict=True))
        shared = Shares(measured.closure, measured.closure_error, measured.is_trusted, by_micro_batch)
    return Event(
        step=Step(
            global_step=place.global_step,
            epoch=place.epoch,
            mini_batch=place.mini_batch,
            num_mini_batches=place.num_mini_batches,
            num_micro_batches=step.num_micro_batches,
            world_size=ranks.num_processes,
            dp_size=ranks.size,
            sp_size=ranks.replicas,
            stage=place.stage,
        ),
        trigger=Trigger(**vars(spike), history=History(**place.history) if place.history else None),
        search=Search(
            strategy=finding.strategy,
            status=finding.status,
            stop_reason=result.stop_reason,
            tau=finding.tau,
            budget=budget,
            forwards=finding.num_forwards,
            backwards=finding.num_backwards,
            seconds=finding.seconds,
            num_more=result.num_more if result.is_cut else None,
            more_norm=result.more_norm,
            path=tuple(result.path),
        ),
        culprits=culprits,
        certificate=finding.certificate,
        action=context.action,
        layers=norms_by(layer_of, names, squares),
        kinds=norms_by(kind_of, names, squares),
        layer_history=layer_history(names, squares, context.history),
        shares=shared,
        cause=result.source,
        rerun=finding.rerun,
        first_not_finite=finding.first_not_finite,
        consequence=_consequence(context, culprits),
        head_grad_norm=head_norm,
        model="critic" if step.recorded(0).is_value else None,
    )


# ---- which sequences to keep


class _Row(NamedTuple):
    """A sequence of the mini-batch."""

    rank: int
    micro_batch: int
    row: int


def _notable_rows(context: SpikeContext) -> list[tuple[float, _Row]]:
    """This rank's sequences that hold a culprit (inf) or a notable share of the spike (its size)."""
    step, rank, result = context.step, context.ranks.rank, context.finding.result
    firsts = [culprit.tokens[0] for culprit in result.culprits if culprit.tokens[0].rank == rank]
    pairs = [(math.inf, _Row(rank, first.micro_batch, _places(step, [first])[0][0])) for first in firsts]
    if result.shares is not None and result.shares.is_trusted:
        for index in range(step.num_micro_batches):
            sizes = result.shares.shares(index).sum(-1).abs().tolist()
            pairs += [(size, _Row(rank, index, row)) for row, size in enumerate(sizes) if size >= _NOTABLE_SHARE]
    return sorted(pairs, key=lambda pair: -pair[0])[:_MAX_SEQUENCES]


def _most_wanted(by_rank: list[list[tuple[float, _Row]]]) -> list[_Row]:
    """The rows to keep token by token, of all ranks', the most wanted first."""
    pairs = sorted((pair for part in by_rank for pair in part), key=lambda pair: (-pair[0], pair[1]))
    return list(dict.fromkeys(row for _, row in pairs))[:_MAX_SEQUENCES]


# ---- one rank's part


@dataclass(frozen=True)
class _Sums:
    """What every rank sends: small, and about as long on each."""

    coefficient_square: float
    term_squares: dict[str, float]
    low_entropy: float | None
    shares: list[float]
    """Per micro-batch."""
    layout: list[RawEntry]


def _sums(context: SpikeContext, keeps_all: bool) -> _Sums:
    step, rank, result = context.step, context.ranks.rank, context.finding.result
    square, shares, terms = 0.0, [], dict.fromkeys(_TERMS, 0.0)
    for index in range(step.num_micro_batches):
        mask = step.token_mask(index)
        others = mask_without(result.tokens, index, rank, mask) & mask
        square += step.coefficients(index)[0][others].double().square().sum().item()
        for name, values in _terms(context, index).items():
            terms[name] += values[mask].double().square().sum().item()
        shares.append(0.0 if result.shares is None else float(result.shares.shares(index).sum()))
    entropies = [values[step.token_mask(index)].float() for index, values in context.finding.entropies.items()]
    flat = torch.cat(entropies) if entropies else torch.zeros(0)
    kept = range(step.num_micro_batches) if keeps_all else sorted({token.micro_batch for token in result.tokens})
    return _Sums(
        coefficient_square=square,
        term_squares=terms,
        low_entropy=float(flat.quantile(_LOW)) if len(flat) else None,
        shares=shares,
        layout=[RawEntry(rank, index, step.rows(index), step.recorded(index).rng.cpu.numpy()) for index in kept],
    )


def _terms(context: SpikeContext, index: int) -> dict[str, torch.Tensor]:
    """d loss / d log_prob (B, T) of the policy's and the KL term, d loss / d entropy: those that there are."""
    log_prob, entropy = context.step.coefficients(index)
    kl = context.step.kl_coefficients(index)
    terms = {"policy": log_prob}
    if kl is not None:
        kl = kl / context.ranks.size
        terms = {"policy": log_prob - kl, "kl": kl}
    return terms if entropy is None else {**terms, "entropy": entropy}


def _sequence(context: SpikeContext, place: _Row) -> Sequence:
    """Per-token numbers of one of this rank's sequences."""
    step, shares, index, row = context.step, context.finding.result.shares, place.micro_batch, place.row
    recorded, rows = step.recorded(index), step.rows(index)

    def of(values: torch.Tensor | None) -> tuple[float, ...] | None:
        return None if values is None else tuple(values[row].float().tolist())

    outputs: dict = {"value" if recorded.is_value else "log_prob": of(recorded.log_prob)}
    return Sequence(
        **outputs,
        rank=place.rank,
        micro_batch=index,
        micro_batch_row=row,
        row=rows[row] if rows else None,
        entropy=of(recorded.entropy),
        coefficient=of(step.coefficients(index)[0]),
        share=None if shares is None else of(shares.shares(index)),
        share_error=None if shares is None else of(shares.errors[index] / shares.square),
    )


def _places(step: HostStep, tokens: Iterable[Token]) -> list[tuple[int, int]]:
    """Row and response position in their micro-batch of tokens that share one."""
    tokens = list(tokens)
    mask = step.token_mask(tokens[0].micro_batch)
    flat = mask.flatten().nonzero().squeeze(-1)[[token.index for token in tokens]].tolist()
    return [divmod(place, mask.shape[1]) for place in flat]


def _culprit_records(context: SpikeContext) -> dict[int, Culprit]:
    """This rank's culprits, by number."""
    culprits = enumerate(context.finding.result.culprits)
    return {
        number: _culprit_record(context, culprit)
        for number, culprit in culprits
        if culprit.tokens[0].rank == context.ranks.rank
    }


def _culprit_record(context: SpikeContext, culprit: CulpritSpan) -> Culprit:
    step, index, shares = context.step, culprit.tokens[0].micro_batch, context.finding.result.shares
    places = _places(step, culprit.tokens)
    row, positions = places[0][0], [position for _, position in places]
    recorded, rows, old = step.recorded(index), step.rows(index), step.details(index).old_log_prob
    coefficients, entropy_coefficients = step.coefficients(index)
    peak = positions[int(coefficients[row, positions].abs().nan_to_num(nan=math.inf).argmax())]

    def at(values: torch.Tensor | None, factor: float = 1.0) -> float | None:
        return None if values is None else float(values[row, peak]) * factor

    share, share_error = culprit.share, 0.0 if culprit.share is not None else None
    token_norms = (culprit.norm,) if len(positions) == 1 else None
    if shares is not None and shares.is_trusted:
        products, errors = shares.products[index][row, positions], shares.errors[index][row, positions]
        if token_norms is None:  # by Cauchy-Schwarz at least |<g, G>| / ||G|| each
            token_norms = tuple((products.abs() / shares.square**0.5).tolist())
        if share is None:
            share = float(shares.shares(index)[row, positions].sum())
            share_error = float(torch.linalg.vector_norm(errors)) / shares.square
    if recorded.is_value:
        outputs: dict = {"value": at(recorded.log_prob), "old_value": at(old)}
    else:
        outputs = {"log_prob": at(recorded.log_prob), "old_log_prob_used": at(old)}
        if old is not None:
            mean_log_ratio = float((recorded.log_prob - old)[row][step.token_mask(index)[row]].mean())
            outputs["ratios"] = Ratios(sequence_geometric_mean=ratio(mean_log_ratio, 0.0))
    return Culprit(
        **outputs,
        span=culprit.span,
        rank=culprit.tokens[0].rank,
        micro_batch=index,
        micro_batch_row=row,
        row=rows[row] if rows else None,
        positions=tuple(positions),
        peak=peak,
        entropy=at(context.finding.entropies.get(index, recorded.entropy)),
        coefficients=Coefficients(
            log_prob=at(coefficients),
            kl=at(step.kl_coefficients(index), 1.0 / context.ranks.size),
            entropy=at(entropy_coefficients),
        ),
        loss_weight=at(step.details(index).weights),
        grad_norm=culprit.norm,
        is_exact=culprit.is_exact,
        threshold=culprit.threshold,
        share=share,
        share_error=share_error,
        layers={} if culprit.squares is None else norms_by(layer_of, context.space.names, culprit.squares),
        token_norms=token_norms,
    )


def _consequence(context: SpikeContext, culprits: tuple[Culprit, ...]) -> Consequence:
    """What the optimizer was given: nothing, the spike clipped, or the rest clipped."""
    taken, after, clip_limit = context.action.taken, context.finding.certificate.norm_after, context.clip_limit
    limit = clip_limit if math.isfinite(clip_limit) else None
    given = after if taken == "mask" else context.spike.grad_norm
    if taken in ("skip", "abort") or given is None:
        return Consequence(grad_clip=limit, is_taken=False)
    if not math.isfinite(given):
        return Consequence(grad_clip=limit, is_taken=context.takes_what_is_not_finite)
    scale = min(1.0, clip_limit / (given + 1e-6))
    known = [culprit.share for culprit in culprits if culprit.share is not None]
    share = math.fsum(known) if culprits and len(known) == len(culprits) else None
    healthy = after * scale if culprits and after is not None and math.isfinite(after) else None
    return Consequence(
        grad_clip=limit,
        is_taken=True,
        clip_scale=None if limit is None else scale,
        culprit_share=0.0 if taken == "mask" else share,
        healthy_norm=None if limit is None else healthy,
    )


def ratio(log_new: float | None, log_old: float | None) -> float | None:
    """Of two probabilities by their logarithms; None where one is not known."""
    if log_new is None or log_old is None:
        return None
    difference = log_new - log_old
    return math.exp(difference) if difference < 700 else math.inf
