# SPDX-License-Identifier: Apache-2.0
"""Measure the step's norm under other settings, to find one that would have healed it (docs/cures.md).

Coefficients alone, which cost no forward, decide which settings are tried. With s_t a token's share of the gradient G
and r_t its coefficient's ratio under a setting, the step's gradient under it, G', has <G', G> / ||G||^2 = sum of
r_t s_t, so its norm is at least that part of G's. A setting that cannot come under the threshold is not tried.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..core.certificate import CERTAIN, fullest, recompute, verdict_of
from ..core.gradients import Gradient
from ..core.host_step import HostStep, to_host
from ..core.ranks import Ranks
from ..core.step import MASK, NUM_TOKENS, Groups, Recorded
from ..explain.advice import options_of
from ..explain.cures import MILDEST_FIRST, OF_BATCH, OF_MASK, loss_settings
from ..record import Cured
from .share import ShareMap
from .task import SearchResult, Task

logger = logging.getLogger(__name__)

_VERDICTS = {"explained": "healed", "not_explained": "not_healed", "undecided": "undecided"}
_ORDER = ("healed", "undecided", "not_healed", "no_change")


@dataclass(frozen=True)
class Candidate:
    """A setting that this trainer has and the run has not."""

    name: str
    line: str
    settings: Mapping[str, Any]
    is_of_batch: bool
    num_tokens: float = 0.0
    """Tokens left in the loss, of all ranks, where the setting takes some out; else 0."""

    def records(self, step: Any, groups: Groups | None, micro_batches: Sequence[int]) -> dict[int, Recorded]:
        """Return what this rank's micro-batches would have recorded under this setting, see
        :meth:`..core.step.LossReplay.recorded_under`."""
        if not self.is_of_batch:
            return {index: step.recorded_under(index, self.settings) for index in micro_batches}
        more = {NUM_TOKENS: torch.tensor(self.num_tokens)} if self.num_tokens else {}
        tensors = ((index, step.tensors_under(self.name, index, groups)) for index in micro_batches)
        return {index: step.recorded_under(index, {}, made | more) for index, made in tensors}


def candidates(step: HostStep, ranks: Ranks, groups: Groups | None = None) -> list[Candidate]:
    """Return the settings that may be tried on this step, the mildest first; the same on every rank. All call this
    together. A trainer that cannot replay its own loss has none."""
    options = ranks.run_local_synced(lambda: _local_candidates(step, groups))
    masking = {option.name for option in options} & set(OF_MASK)
    if not masking:
        return options

    def num_left(option: Candidate) -> float:  # of this rank's tokens
        masks = [step.tensors_under(option.name, index, groups)[MASK] for index in range(step.num_micro_batches)]
        return float(sum(mask.sum() for mask in masks))

    numbers = ranks.sum(
        ranks.run_local_synced(lambda: [num_left(each) if each.name in masking else 0.0 for each in options])
    )
    found = zip(options, numbers, strict=True)  # without the settings that leave nothing
    return [replace(each, num_tokens=number) for each, number in found if number > 0 or each.name not in masking]


def _local_candidates(step: HostStep, groups: Groups | None) -> list[Candidate]:
    if not step.has_own_loss:
        return []
    found, is_critics = [], step.recorded(0).is_value
    refused = groups.refused_cures if groups else ()
    for name in (name for name in MILDEST_FIRST if step.trainer_name and name not in refused):
        for taken in options_of(name, step.trainer_name).values():
            line, settings = taken.line, loss_settings(taken)
            if line.startswith("critic.") != is_critics:
                continue
            if name in OF_BATCH:
                is_there = step.tensors_under(name, 0, groups) is not None
            else:
                is_there = step.would_change(settings)
            if is_there:
                found.append(Candidate(name, line, settings, name in OF_BATCH))
    return found


def records_under(step: HostStep, ranks: Ranks, name: str, groups: Groups | None) -> dict[int, Recorded]:
    """Return what this rank's micro-batches would have recorded under one of the :func:`candidates`, by its name. All
    ranks call this together."""
    (option,) = (option for option in candidates(step, ranks, groups) if option.name == name)
    return ranks.run_local_synced(lambda: option.records(step, groups, range(step.num_micro_batches)))


@dataclass(frozen=True)
class _Outlook:
    """A forecast from a candidate's coefficients alone, over all ranks."""

    changed: float
    """The share of tokens whose coefficient changes."""
    is_finite: bool
    left: float
    """The least part of the gradient that remains, by the shares; or by the coefficients' size."""
    surely_left: float
    """:attr:`left` less three standard errors; 0 where shares are not trusted."""


class _CoefficientSums(NamedTuple):
    """Sums over tokens, of one rank or of all."""

    failed: float = 0.0
    """Ranks whose loss cannot be replayed under the setting."""
    num_tokens: float = 0.0
    num_changed: float = 0.0
    num_bad: float = 0.0
    """Tokens whose coefficient under the setting is not finite."""
    square: float = 0.0
    """Sum of squared coefficients under the setting."""
    square_before: float = 0.0
    carried: float = 0.0
    """r_t <g_t, G>."""


def try_cures(task: Task, result: SearchResult, groups: Groups | None, max_cures: int) -> list[Cured] | None:
    """Measure settings, most likely first, until one heals the step. All ranks call this together.

    Returns:
        Settings that were measured, and those that their coefficients have settled; most useful first. None on a
        rehearsal, and where there is nothing to try.
    """
    spike, threshold = task.spike, task.spike.threshold
    step, was_finite = task.prober.step, math.isfinite(spike.grad_norm)
    if threshold is None and was_finite:
        return None
    options = candidates(step, task.prober.ranks, groups)
    if not options:
        return None
    limit = threshold / spike.grad_norm if threshold is not None and was_finite else 1.0
    found, likely, num_tried = [], [], 0
    for option, outlook in zip(options, _outlooks(task, options, result.shares, groups), strict=True):
        if outlook is None:
            continue
        cured = Cured(option.name, option.line, changed_tokens=outlook.changed)
        if not outlook.changed:
            found.append(replace(cured, norm_after=spike.grad_norm, error_bound=0.0, verdict="no_change"))
        elif not outlook.is_finite or outlook.surely_left > limit:
            least = outlook.left * spike.grad_norm if outlook.is_finite and was_finite else math.inf
            found.append(replace(cured, norm_after=least, verdict="not_healed"))
        else:
            likely.append((outlook.left > limit, option, cured))
    for _, option, cured in sorted(likely, key=lambda each: each[0]):
        # The first is measured late rather than never: the answer must not depend on how busy the machine is.
        cost = {"backwards": step.num_micro_batches, "is_certificate": True, "counts_time": num_tried > 0}
        if num_tried == max_cures or not task.can_afford(**cost):
            break
        num_tried += 1
        found.append(_measured(task, option, cured, result.rest, groups))
        if found[-1].verdict == "healed":
            break
    return sorted(found, key=lambda cured: (_ORDER.index(cured.verdict), cured.forwards == 0))


def _measured(task: Task, option: Candidate, cured: Cured, rest: Gradient | None, groups: Groups | None) -> Cured:
    prober, space, threshold = task.prober, task.prober.space, task.spike.threshold
    forwards, backwards = prober.num_forwards, prober.num_backwards

    def compute(micro_batches: Sequence[int]) -> None:
        prober.compute_recorded(
            prober.ranks.run_local_synced(lambda: option.records(prober.step, groups, micro_batches))
        )

    def can_afford(num_probes: int) -> bool:  # replays hold two gradients more, and the rest
        return rest is None and task.can_afford(backwards=num_probes, is_certificate=True)

    norm, bound, _ = recompute(prober, compute, lambda: fullest(prober, []), threshold, can_afford)
    verdict, _ = verdict_of(norm, bound, threshold, math.isfinite(task.spike.grad_norm))
    against = task.gradient if rest is None else rest
    dots, squares, _ = space.reduce_all(lambda: [space.own_dots(space.current(), against), space.own_squares(against)])
    dot, sizes = float(dots.sum()), norm * math.sqrt(float(squares.sum()))
    return replace(
        cured,
        norm_after=norm,
        error_bound=bound,
        verdict=_VERDICTS[verdict],
        kept=dot / sizes if 0 < sizes < math.inf else None,
        forwards=prober.num_forwards - forwards,
        backwards=prober.num_backwards - backwards,
    )


def _outlooks(
    task: Task, options: Sequence[Candidate], shares: ShareMap | None, groups: Groups | None
) -> list[_Outlook | None]:
    """Return each option's outlook; None where some rank's loss cannot be replayed under it."""
    step, ranks = task.prober.step, task.prober.ranks

    def local() -> list[float]:
        found = [_records(step, option, groups) for option in options]
        names = ("log_prob_coefficient", "entropy_coefficient")
        read = to_host([getattr(each, name) for records in found for each in records for name in names])  # all at once
        under = iter(zip(read[::2], read[1::2], strict=True))
        sums = [_sums(step, [next(under) for _ in records], shares) for records in found]
        return [number for option_sums in sums for number in option_sums]

    numbers = torch.tensor(ranks.sum(ranks.run_local_synced(local)), dtype=torch.float64).view(len(options), -1)
    return [_outlook(_CoefficientSums(*row.tolist()), shares) for row in numbers]


def _outlook(sums: _CoefficientSums, shares: ShareMap | None) -> _Outlook | None:
    if sums.failed:
        return None
    before = sums.square_before
    left = math.sqrt(sums.square / before) if before > 0 and math.isfinite(before) else 1.0
    surely = 0.0
    if shares is not None and shares.is_trusted:
        left = abs(sums.carried) / shares.square
        surely = max(left - CERTAIN * shares.closure_error, 0.0)
    return _Outlook(sums.num_changed / max(sums.num_tokens, 1), sums.num_bad == 0, left, surely)


def _records(step: HostStep, option: Candidate, groups: Groups | None) -> list[Recorded]:
    """Return the records of this rank's micro-batches; none where the loss cannot be replayed under the option."""
    try:
        return [*option.records(step, groups, range(step.num_micro_batches)).values()]
    except Exception as error:
        logger.info("gradloc: what %s would have done is not known: %s", option.line, error)
        return []


def _sums(
    step: HostStep, under: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]], shares: ShareMap | None
) -> list[float]:
    """Return this rank's :class:`_CoefficientSums`. ``under``: of each micro-batch, the coefficients of log-probs and
    entropies under the setting, (B, T)."""
    sums = torch.tensor(_CoefficientSums(failed=float(not under)), dtype=torch.float64)
    for index, coefficients in enumerate(under):
        mask, own = step.token_mask(index), step.recorded(index)
        before = (own.log_prob_coefficient, own.entropy_coefficient)
        pairs = [_pair(*both, mask) for both in zip(coefficients, before, strict=True)]
        changed = torch.stack([(new != old) & ~(new.isnan() & old.isnan()) for new, old in pairs]).any(0)
        new, old = (torch.stack(both) for both in zip(*pairs, strict=True))
        leading = old.abs().nan_to_num(nan=math.inf).argmax(0, keepdim=True)
        ratio = (new.gather(0, leading) / old.gather(0, leading)).squeeze(0).nan_to_num(0.0, 0.0, 0.0)
        left = 0.0 if shares is None else (shares.products[index][mask].double() * ratio).sum()
        bad = (~new.isfinite()).any(0)
        numbers = mask.sum(), changed.sum(), bad.sum(), new.square().sum(), old.square().sum(), left
        sums += torch.tensor(_CoefficientSums(0.0, *map(float, numbers)), dtype=torch.float64)
    return sums.tolist()


def _pair(new: torch.Tensor | None, old: torch.Tensor | None, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both on the host, float64 (tokens,); zeros where the loss does not reach the output."""
    zeros = torch.zeros(int(mask.sum()), dtype=torch.float64)
    first, second = (zeros if each is None else each[mask].double() for each in (new, old))
    return first, second
