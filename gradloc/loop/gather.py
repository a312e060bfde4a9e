# SPDX-License-Identifier: Apache-2.0
"""What the ranks know of an event, gathered on the first process. The driver completes and writes it.

What a rank sends is bounded whatever the batch: a few numbers, one for each micro-batch, the random states (5 kB each)
of the micro-batches to keep; and of the culprits and of the sequences to shade, chosen over all ranks before anything
heavy is sent, those that are its own, one after the other.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..core.gradients import GradientSpace
from ..core.ranks import Ranks
from ..core.selection import Token, mask_without
from ..core.step import TrainingStep
from ..core.trigger import Place, Spike
from ..record import (
    Action,
    Certificate,
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
from ..search.share import ShareMap
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
    step: TrainingStep
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
    finding = context.finding
    place, spike, step, ranks, action = context.place, context.spike, context.step, context.ranks, context.action
    names, squares = context.space.names, context.squares
    result = finding.result
    evidence = _LocalEvidence(context, finding)
    wanted = _most_wanted(ranks.gather(ranks.agree(evidence.wanted)))
    mine = ranks.agree(lambda: evidence.collect(wanted, keeps_all))
    gathered = ranks.gather_first(mine.sums)
    culprits = tuple(
        ranks.sent_by(culprit.tokens[0].rank, mine.culprits.get(number))
        for number, culprit in enumerate(result.culprits)
    )
    sequences = [ranks.sent_by(row.rank, mine.sequences.get(row)) for row in wanted]
    weights = fingerprint(context.space)
    head_square = float(context.space.reduce(lambda: context.head_square * context.space.num_replicas))

    def build(gathered: list[_Sums]) -> RawEvent:
        squared = {name: math.fsum(part.term_squares[name] for part in gathered) for name in _TERMS}
        low = sorted(part.low_entropy for part in gathered if part.low_entropy is not None)
        event = Event(
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
            search=_search_record(finding, budget),
            culprits=culprits,
            certificate=finding.certificate,
            action=action,
            layers=norms_by(layer_of, names, squares),
            kinds=norms_by(kind_of, names, squares),
            layer_history=layer_history(names, squares, context.history),
            shares=_shares_record(result.shares, [part.shares for part in gathered]),
            cause=result.source,
            rerun=finding.rerun,
            first_not_finite=finding.first_not_finite,
            consequence=_consequence(action.taken, spike.grad_norm, context, culprits, finding.certificate),
            head_grad_norm=math.sqrt(head_square),
            model="critic" if step.recorded(0).is_value else None,
        )
        return RawEvent(
            event=event,
            sequences=sequences,
            residual_coefficient_norm=math.sqrt(sum(part.coefficient_square for part in gathered)),
            term_norms={name: math.sqrt(square) for name, square in squared.items()},
            low_entropy=low[len(low) // 2] if low else None,
            layout=[entry for part in gathered for entry in part.layout],
            temperature=step.temperature,
            on_policy=step.on_policy,
            fingerprint=weights,
            checkpoint=context.checkpoint,
        )

    return ranks.agree(lambda: None if gathered is None else build(gathered))


class _Row(NamedTuple):
    """A sequence of the mini-batch."""

    rank: int
    micro_batch: int
    row: int


def _most_wanted(by_rank: list[list[tuple[float, _Row]]]) -> list[_Row]:
    """The rows to keep token by token, of all ranks', the most wanted first."""
    pairs = sorted((pair for part in by_rank for pair in part), key=lambda pair: (-pair[0], pair[1]))
    return list(dict.fromkeys(row for _, row in pairs))[:_MAX_SEQUENCES]


@dataclass(frozen=True)
class _Sums:
    """What every rank sends: small, and about as long on each."""

    coefficient_square: float
    term_squares: dict[str, float]
    low_entropy: float | None
    shares: list[float]
    """Per micro-batch."""
    layout: list[RawEntry]


@dataclass(frozen=True)
class _OfRank:
    """One rank's part of the event."""

    sums: _Sums
    culprits: dict[int, Culprit]
    """Its own, by number."""
    sequences: dict[_Row, Sequence]
    """Its own of those to keep."""


class _LocalEvidence:
    """This rank's part of the event: its own culprits, and the rows of the micro-batches to keep."""

    def __init__(self, context: SpikeContext, finding: Finding):
        self.step, self.ranks, self.names = context.step, context.ranks, context.space.names
        self.result, self.entropies = finding.result, finding.entropies

    def wanted(self) -> list[tuple[float, _Row]]:
        """This rank's sequences that hold a culprit (inf) or a notable share of the spike (its size)."""
        rank, shares = self.ranks.rank, self.result.shares
        firsts = [culprit.tokens[0] for culprit in self.result.culprits if culprit.tokens[0].rank == rank]
        found = [(math.inf, _Row(rank, first.micro_batch, self._row_of(first))) for first in firsts]
        if shares is not None and shares.is_trusted:
            for index in range(self.step.num_micro_batches):
                per_row = shares.shares(index).sum(-1).abs()
                notable = (per_row >= _NOTABLE_SHARE).nonzero().squeeze(-1).tolist()
                found += [(float(per_row[row]), _Row(rank, index, row)) for row in notable]
        return sorted(found, key=lambda pair: -pair[0])[:_MAX_SEQUENCES]

    def collect(self, wanted: list[_Row], keeps_all: bool) -> _OfRank:
        step, rank = self.step, self.ranks.rank
        kept_micro_batches = sorted({token.micro_batch for token in self.result.tokens})
        kl = {index: step.kl_coefficients(index) for index in kept_micro_batches}
        mine = {
            number: self._culprit_record(culprit, kl)
            for number, culprit in enumerate(self.result.culprits)
            if culprit.tokens[0].rank == rank
        }
        square, shares, terms = 0.0, [], dict.fromkeys(_TERMS, 0.0)
        for index in range(step.num_micro_batches):
            kept = mask_without(self.result.tokens, index, rank, step.token_mask(index)) & step.token_mask(index)
            square += step.coefficients(index)[0][kept].double().square().sum().item()
            for name, values in self._terms(index).items():
                terms[name] += values[step.token_mask(index)].double().square().sum().item()
            shares.append(0.0 if self.result.shares is None else float(self.result.shares.shares(index).sum()))
        kept_whole = range(step.num_micro_batches) if keeps_all else kept_micro_batches
        sums = _Sums(
            coefficient_square=square,
            term_squares=terms,
            low_entropy=self._low_entropy(),
            shares=shares,
            layout=[RawEntry(rank, i, step.rows(i), step.recorded(i).rng.cpu.numpy()) for i in kept_whole],
        )
        return _OfRank(sums, mine, {row: self._sequence(row) for row in wanted if row.rank == rank})

    def _terms(self, index: int) -> dict[str, torch.Tensor]:
        """d loss / d log_prob (B, T) of the policy's and the KL term, d loss / d entropy: those that there are."""
        log_prob, entropy = self.step.coefficients(index)
        kl = self.step.kl_coefficients(index)
        found = {"policy": log_prob} if kl is None else {"policy": log_prob - kl / self.ranks.size}
        found |= {} if kl is None else {"kl": kl / self.ranks.size}
        return found if entropy is None else found | {"entropy": entropy}

    def _low_entropy(self) -> float | None:
        values = [self.entropies[index][self.step.token_mask(index)] for index in self.entropies]
        flat = torch.cat(values).float() if values else torch.zeros(0)
        return float(flat.quantile(_LOW)) if len(flat) else None

    def _sequence(self, place: _Row) -> Sequence:
        """Per-token numbers of one of this rank's sequences."""
        step, shares, index, row = self.step, self.result.shares, place.micro_batch, place.row
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

    def _row_of(self, token: Token) -> int:
        mask = self.step.token_mask(token.micro_batch)
        return int(mask.flatten().nonzero()[token.index]) // mask.shape[1]

    def _culprit_record(self, culprit: CulpritSpan, kl: dict[int, torch.Tensor | None]) -> Culprit:
        step, index, shares = self.step, culprit.tokens[0].micro_batch, self.result.shares
        mask = step.token_mask(index)
        flat = mask.flatten().nonzero().squeeze(-1)[[token.index for token in culprit.tokens]].tolist()
        row, positions = flat[0] // mask.shape[1], [place % mask.shape[1] for place in flat]
        recorded, rows, old = step.recorded(index), step.rows(index), step.old_log_prob(index)
        coefficients, entropy_coefficients = step.coefficients(index)
        peak = positions[int(coefficients[row, positions].abs().nan_to_num(nan=math.inf).argmax())]

        def at(values: torch.Tensor | None, factor: float = 1.0) -> float | None:
            return None if values is None else float(values[row, peak]) * factor

        share, share_error = culprit.share, 0.0 if culprit.share is not None else None
        if share is None and shares is not None and shares.is_trusted:
            share = float(shares.shares(index)[row, positions].sum())
            share_error = float(torch.linalg.vector_norm(shares.errors[index][row, positions])) / shares.square
        if recorded.is_value:
            outputs: dict = {"value": at(recorded.log_prob), "old_value": at(old)}
        else:
            mean_log_ratio = float((recorded.log_prob - old)[row][mask[row]].mean())
            ratios = Ratios(sequence_geometric_mean=ratio(mean_log_ratio, 0.0))
            outputs = {"log_prob": at(recorded.log_prob), "old_log_prob_used": at(old), "ratios": ratios}
        return Culprit(
            **outputs,
            span=culprit.span,
            rank=culprit.tokens[0].rank,
            micro_batch=index,
            micro_batch_row=row,
            row=rows[row] if rows else None,
            positions=tuple(positions),
            peak=peak,
            entropy=at(self.entropies.get(index, recorded.entropy)),
            coefficients=Coefficients(
                log_prob=at(coefficients), kl=at(kl[index], 1.0 / self.ranks.size), entropy=at(entropy_coefficients)
            ),
            loss_weight=at(step.token_weights(index)),
            grad_norm=culprit.norm,
            is_exact=culprit.is_exact,
            threshold=culprit.threshold,
            share=share,
            share_error=share_error,
            layers={} if culprit.squares is None else norms_by(layer_of, self.names, culprit.squares),
            token_norms=self._token_norms(culprit, row, positions),
        )

    def _token_norms(self, culprit: CulpritSpan, row: int, positions: list[int]) -> tuple[float, ...] | None:
        """By Cauchy-Schwarz at least |<g, G>| / ||G|| each; exact for a token with a backward of its own."""
        shares = self.result.shares
        if len(positions) == 1:
            return (culprit.norm,)
        if shares is None or not shares.is_trusted:
            return None
        products = shares.products[culprit.tokens[0].micro_batch][row, positions]
        return tuple((products.abs() / shares.square**0.5).tolist())


def _consequence(
    taken: str, norm: float, context: SpikeContext, culprits: tuple[Culprit, ...], certificate: Certificate
) -> Consequence:
    """What the optimizer was given: nothing, the spike clipped, or the rest clipped."""
    clip_limit = context.clip_limit
    limit = clip_limit if math.isfinite(clip_limit) else None
    after = certificate.norm_after
    given = after if taken == "mask" else norm
    if taken in ("skip", "abort") or given is None:
        return Consequence(grad_clip=limit, is_taken=False)
    if not math.isfinite(given):
        return Consequence(grad_clip=limit, is_taken=context.takes_what_is_not_finite)
    scale = min(1.0, clip_limit / (given + 1e-6))
    shares = [culprit.share for culprit in culprits]
    known = [share for share in shares if share is not None]
    share = math.fsum(known) if culprits and len(known) == len(shares) else None
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


def _shares_record(shares: ShareMap | None, by_rank: list[list[float]]) -> Shares | None:
    """The share of every micro-batch of every rank; None when they were not measured."""
    if shares is None:
        return None
    return Shares(shares.closure, shares.closure_error, shares.is_trusted, tuple(zip(*by_rank, strict=True)))


def _search_record(finding: Finding, budget: int) -> Search:
    result = finding.result
    return Search(
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
    )
