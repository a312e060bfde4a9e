# SPDX-License-Identifier: Apache-2.0
"""Decide which link broke, by the norms of two batches at two sets of weights.

With S the spike's norm, N an ordinary step's and J = S / N, a reference micro-batch whose norm rose by a factor j is
*loud* from j >= sqrt(J) on: the middle on a logarithmic scale, so neither side is favoured and no unit matters. Where S
is not finite, see :attr:`_Case.loud_times`.

- quiet at these weights: the **batch** is at fault, and its tokens are searched;
- loud, and quiet again with the last update undone: the **last update**;
- loud with that, too: the **weights**.

Before that the factor on the gradient between backward and step is compared with the usual one: another one, and the
fault is **after the backward**. (``..watch.replay`` and ``..search.step_causes`` compare parameters one by one.) A
quiet reference does not acquit an update that went far, see :func:`_weights_fault`. All numbers are the same on every
rank, so all decide alike.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..core.probe import Prober
from ..core.sharding import local_shard
from ..explain.faults import is_new_since_update
from ..explain.numbers import number
from ..explain.text import listed, plural
from ..record import Fault, PathEntry
from ..search.step_causes import MOST_NAMES, fault_result
from ..search.task import SearchResult, Task
from ..search.weights import MovedWeights
from ..trigger.history import UNUSUAL
from .attention import LARGE_LOGIT, AttentionLogits
from .reference import Reference
from .updates import Updates

_GROWTH = 0.75  # M micro-batches' gradients add up to between sqrt(M) and M times one: the middle of the exponents
_FACTOR = 2.1  # times the usual factor between backward and step; a loss scale that is halved makes 2 exactly
_DECAYED = 0.5  # fraction of a step's squared movement from which weight decay explains it
_LARGE_RATIO = 3.0  # m / sqrt(v), root mean square, from which second moments are too small; at most about 1 is healthy
_SPREAD = 3.0  # factor within which a mechanism explains a movement
_ELEMENT = 0.5  # of a weight's squared norm that a single element holds


@dataclass(frozen=True)
class Clues:
    """Facts about earlier steps that a trainer's process knows, by which :func:`find_broken_link` decides."""

    reference: Reference | None
    updates: Updates
    number: int
    """The trainer's number of the step that spikes."""
    factor: float | None = None
    """The factor on the gradient between backward and step; None where that is not known."""
    again: Callable[[], Any] | None = None
    """Returns the present step with a loss that follows the weights; None where the step's own loss does."""
    is_first: bool = True
    """Whether this is the first optimizer step on its rollouts; later epochs and mini-batches are not."""
    squares: Sequence[float] = ()
    """:meth:`.reference.ReferenceKeeper.squares`, summed over all shards."""


@dataclass
class _Case:
    """One spike's measurements."""

    task: Task
    clues: Clues
    evidence: dict[str, float | None] = field(default_factory=dict)
    path: list[PathEntry] = field(default_factory=list)
    attention: str = ""
    """Name of the module with the largest attention logits."""

    @property
    def usual(self) -> float:
        """N, the norm of the step that the reference is of."""
        assert self.clues.reference is not None
        return self.clues.reference.norm

    @property
    def loud_times(self) -> float:
        """The factor from which a reference is loud: sqrt(S / N). Without a finite S it is the threshold's over N, and
        no less than what is unusual: an ordinary step's norm may be near the threshold."""
        spike = self.task.spike.grad_norm
        if math.isfinite(spike):
            return math.sqrt(spike / self.usual)
        return max(self.task.reference / self.usual, UNUSUAL)

    @property
    def middle(self) -> float:
        """The norm up to which this step is healed: sqrt(N S)."""
        return self.usual * self.loud_times

    def note(self, words: str, norm: float) -> None:
        self.path.append(PathEntry("fault", verdict="measured", norm=norm, note=words))


def find_broken_link(clues: Clues, task: Task) -> tuple[SearchResult | None, Fault]:
    """Find the link that broke. All ranks call this together.

    Args:
        clues: what is known of the steps before.
        task: the spike.

    Returns:
        The search's result, which names no token, or None where tokens are to be searched; and the fault.
    """
    fault, path = find_fault(task, clues)
    return (None if fault.at in ("batch", "undecided") else fault_result(task, fault, path)), fault


def find_fault(task: Task, clues: Clues) -> tuple[Fault, list[PathEntry]]:
    """Measure which link broke. All ranks call this together; weights come back bit for bit.

    Returns:
        The fault, ``undecided`` where nothing can be compared with, and the stages that found it.
    """
    case, spike, reference = _Case(task, clues), task.spike.grad_norm, clues.reference
    case.evidence["norm"] = spike
    why = _why_incomparable(case)
    if why or reference is None:
        return Fault("undecided", step=clues.number, evidence=case.evidence, reason=why), case.path
    case.evidence["usual_norm"] = case.usual
    first = _first_norm(case)
    scaled = _scaled_after_backward(case)
    if scaled is not None:
        return scaled, case.path
    with AttentionLogits(task.prober.space.module) as logits:
        norm = _run(task.prober, reference.step, range(1), logits)
    case.evidence["attention_logit"], case.attention = logits.largest(task.prober.ranks)
    times = norm / first if first > 0 else math.inf
    case.evidence |= {"reference_norm": norm, "reference_usual_norm": first, "reference_times": times}
    case.note(f"a micro-batch of step {reference.number} at these weights; {number(first, 3)} at its own", norm)
    found = _weights_fault(case, not times < case.loud_times)  # also loud where it is not finite
    if found is not None:
        return replace(found, reason=found.reason + _about_attention(case)), case.path
    why = (
        f"a micro-batch of step {reference.number} has {times:.2g} times its norm at these weights, and the spike "
        f"{number(spike / case.usual, 3)} times the usual norm{_since_update(case)}"
    )
    return Fault("batch", None, (), clues.number, case.evidence, why), case.path


def _why_incomparable(case: _Case) -> str:
    """Return why nothing can be compared with, the same on all ranks; mostly ""."""
    task, reference = case.task, case.clues.reference
    if task.spike.threshold is None:
        return "a rehearsal: nothing spiked"
    has = reference is not None
    is_fresh = reference is None or not getattr(reference.step, "is_stale", False)
    if not task.prober.ranks.all(has):
        return "no micro-batch of an earlier step is known to compare with"
    if not task.prober.ranks.all(is_fresh):
        return "the inputs of an earlier step were written over, so it cannot be run again; give the model a copy"
    assert reference is not None
    ranks = task.prober.ranks  # whose norms of one step may differ in the last bits: the first one's count
    norms = reference.norms if ranks.is_first else [0.0] * len(reference.norms)
    newest, oldest, *norms = ranks.max([float(reference.number), -float(reference.number), *norms])
    if newest != -oldest:
        return "ranks keep micro-batches of different steps, as where one was short of memory"
    reference = reference.with_norms(norms)
    case.clues = replace(case.clues, reference=reference)
    if math.isfinite(task.spike.grad_norm) and task.spike.grad_norm <= reference.norm:
        return f"step {reference.number} had as large a norm"
    return "" if task.can_afford(backwards=2) else "max_steps allows no comparison with an earlier step"


# ---- the reference


def _first_norm(case: _Case) -> float:
    """Return the norm of the reference's own gradient when its step was taken, in the unit that a probe gives it in.

    Also note the usual factor between backward and step, a median: the fault may have begun before the last reference.
    """
    reference, prober = case.clues.reference, case.task.prober
    assert reference is not None
    least = -int(prober.ranks.max([-len(reference.measured)])[0])
    if least:
        measured = reference.measured[-least:]
        squares = case.clues.squares[-2 * least :]
        factors = [each.norm / math.sqrt(last) for each, last in zip(measured, squares[1::2], strict=True) if last > 0]
        if case.clues.factor is not None and factors:
            case.evidence["usual_factor"] = statistics.median(factors)
        if squares[-2] > 0:
            return math.sqrt(squares[-2]) / reference.step.loss_scale
    return reference.norm / reference.num_micro_batches**_GROWTH / (case.clues.factor or 1.0)


def _run(prober: Prober, step: Any, micro_batches: Sequence[int], logits: AttentionLogits | None = None) -> float:
    """Return the norm of these micro-batches' gradient at the present weights; ``.grad`` is left holding it. The same
    read takes ``logits`` to the host."""
    other = Prober(step, prober.space, prober.ranks)
    try:
        other.compute((index, None) for index in micro_batches)
        space, bounds = prober.space, [] if logits is None else logits.bounds
        squares, found = space.reduce_all(lambda: [space.own_squares()], bounds)
        if logits is not None:
            logits.sizes = found.tolist()
        return sum(squares.tolist()) ** 0.5
    finally:
        prober.num_forwards += other.num_forwards
        prober.num_backwards += other.num_backwards


def _scaled_after_backward(case: _Case) -> Fault | None:
    """Return the fault where the whole gradient was multiplied between the backward and the step."""
    usual, factor = case.evidence.get("usual_factor"), case.clues.factor
    if usual is None or factor is None or not math.isfinite(case.task.spike.grad_norm):
        return None
    times, norm, threshold = factor / usual, case.task.spike.grad_norm, case.task.spike.threshold
    made_it = times >= math.sqrt(norm / case.usual) or (threshold is not None and norm <= times * threshold)
    if times < _FACTOR or not made_it:
        return None
    by, over = number(factor, 3), number(times, 3)
    why = f"every gradient was multiplied by {by} after the backward, {over} times as much as usual"
    evidence = case.evidence | {"factor": factor, "factor_times": times}
    return Fault("after_backward", "gradient_scaled", (), case.clues.number, evidence, why)


# ---- the weights


def _weights_fault(case: _Case, is_loud: bool) -> Fault | None:
    """Return the fault of the last update or of the weights; None where neither made the spike.

    A quiet reference does not acquit weights that moved far, since rare tokens use weights that it does not. A
    reference that is quieter than the spike, but itself a spike, does not acquit them either.
    """
    updates, ranks = case.clues.updates, case.task.prober.ranks
    ratios, outside = updates.ratios(ranks), updates.outside(ranks)
    last = case.clues.number - 1 if updates.last is None else updates.last.number
    far = [each for each in updates.far(ranks) if case.clues.is_first or each[0] < case.clues.number]
    is_far = bool(far) and far[-1][0] == last
    times = case.evidence["reference_times"] or 0.0
    spikes_too = times >= max(UNUSUAL, (case.task.spike.threshold or math.inf) / case.usual)
    is_asked = is_far or (case.clues.is_first and spikes_too)
    changed = None if outside is None else _change_fault(case, *outside)
    is_healed = changed is not None and (changed.evidence.get("norm_without_change") or math.inf) <= case.middle
    if is_healed and not is_far:
        return changed
    may_be_update = _is_quiet_before(case, unknown=is_far) if is_loud else is_asked
    if may_be_update:
        undone = _with_update(case, 0.0)
        if undone is not None:
            case.evidence["norm_without_update"] = undone
            case.note("this step with the last update undone", undone)
        if is_loud or (undone is not None and undone <= case.middle):
            return _update_fault(case, ratios, last)
    if changed is not None and (is_loud or is_healed):
        return changed
    return _growth_fault(case, is_loud) if is_loud or far else None


def _since_update(case: _Case) -> str:
    """Return the clause that the batch is loud only since the last update, as where ratios run away over epochs; ""
    where it is not. Runs its loudest micro-batch with the update undone, or the whole step where that is not known.
    """
    task, known = case.task, case.evidence
    if case.clues.is_first:
        return ""
    sizes = task.increments
    loudest = None if sizes is None else max(range(len(sizes)), key=sizes.__getitem__)
    norm = _with_update(case, 0.0, micro_batches=None if loudest is None else [loudest])
    if norm is None:
        return ""
    if sizes is None or loudest is None:
        known["norm_without_update"] = norm
        case.note("this step with the last update undone", norm)
    else:
        known |= {"loudest_norm": sizes[loudest], "loudest_norm_without_update": norm}
        case.note("the loudest micro-batch with the last update undone", norm)
    return "; the batch is loud only since the last update" if is_new_since_update(known) else ""


def _is_quiet_before(case: _Case, unknown: bool) -> bool:
    """Return whether the earlier micro-batch is quiet at the weights before the last update; ``unknown`` where these
    are not known.

    Its norm there is then at most the geometric mean of its norm at its own weights and at the present ones.
    """
    reference, known = case.clues.reference, case.evidence
    first, now = known["reference_usual_norm"], known["reference_norm"]
    assert reference is not None and first is not None and now is not None
    norm = _with_update(case, 0.0, step=reference.step)
    if norm is None:
        return unknown
    known["reference_norm_without_update"] = norm
    case.note(f"the micro-batch of step {reference.number} with the last update undone", norm)
    return norm <= (math.sqrt(first * now) if math.isfinite(now) else first * case.loud_times)


def _norm_at(
    case: _Case,
    weights: Callable[[int, torch.Tensor], torch.Tensor | None],
    step: Any = None,
    micro_batches: Sequence[int] | None = None,
    checks: Sequence[torch.Tensor] = (),
) -> float | None:
    """Return a step's norm at other weights; None where these are not known, or ``max_steps`` does not allow it.

    The weights come back bit for bit.

    Args:
        case: the spike.
        weights: gives this process' part of a parameter, by its number and what it is now; None where not known. It
            adds a bool scalar to ``checks`` for each that may turn out wrong: these are read together.
        step: None for the one that spikes.
        micro_batches: these alone; None for all.
        checks: filled by ``weights``.
    """
    task, prober = case.task, case.task.prober

    def assigned() -> bool:
        return moved.assign(weights) and (not checks or bool(torch.stack([*checks]).all()))

    if step is None:
        step = prober.step if case.clues.again is None else case.clues.again()
    chosen = range(step.num_micro_batches) if micro_batches is None else micro_batches
    if not task.can_afford(backwards=len(chosen)):
        return None
    prober.space.clear()
    with MovedWeights(prober.space, torch.float32) as moved:
        if not prober.ranks.all(prober.ranks.run_local_synced(assigned)):
            return None
        prober.space.publish()
        return _run(prober, step, chosen)


def _with_update(
    case: _Case,
    part: float,
    only: frozenset[int] | None = None,
    step: Any = None,
    micro_batches: Sequence[int] | None = None,
    decay: float | None = None,
) -> float | None:
    """Return a step's norm as if the last update had been another one; see :func:`_norm_at`.

    Args:
        case: the spike.
        part: the fraction of the update that is made, 0 for none.
        only: numbers of the parameters whose update changes; None for all.
        step: None for the one that spikes.
        micro_batches: these alone; None for all.
        decay: the weight decay of the update, all of which is then made; None for its own.
    """
    updates, checks, counts = case.clues.updates, list[torch.Tensor](), list[float]()

    def before(index: int, saved: torch.Tensor) -> torch.Tensor | None:
        if only is not None and index not in only:
            return saved
        if not counts:
            counts.extend(updates.num_steps())  # one read of the device, where one is needed
        there = updates.before_last(index, saved, counts[index])
        if there is None:
            return None
        checks.append(updates.is_undone(index, saved, there))
        if decay is not None:
            return updates.under_decay(index, saved, there, decay)
        return there if part == 0.0 else torch.lerp(there.float(), saved.float(), part)

    return _norm_at(case, before, step, micro_batches, checks)


def _update_fault(case: _Case, ratios: torch.Tensor | None, last: int) -> Fault:
    """Return the fault of the last update: which parameters it moved too far, and why."""
    evidence, label, how = case.evidence, "update_too_large", f"the update of step {last} is at fault"
    if ratios is None:
        return Fault("last_update", label, (), last, evidence, how)
    order = _largest(ratios)
    names = tuple(case.clues.updates.names[index] for index in order)
    are_most = int((ratios >= UNUSUAL).sum()) * 2 > len(ratios)
    times = float(ratios.median() if are_most else ratios.max())
    evidence["moved_times"] = times
    if order:
        who = "all parameters" if are_most else listed([*names[:3]])
        how = f"the update of step {last} moved {who} {number(times, 3)} times as far as usual"
    label, more = _mechanism(case, times)
    _measure_usual_update(case, label, times)
    alone = _with_update(case, 0.0, frozenset(order)) if order and not are_most else None
    if alone is not None:
        evidence["norm_with_those_undone"] = alone
        case.note(f"this step with the last update of {listed(names[:3])} undone alone", alone)
    return Fault("last_update", label, names, last, evidence, how + more)


def _largest(times: torch.Tensor) -> list[int]:
    """Return the numbers of the parameters that moved unusually far, the furthest first, at most MOST_NAMES."""
    return [int(index) for index in times.argsort(descending=True)[:MOST_NAMES] if times[index] >= UNUSUAL]


def _measure_usual_update(case: _Case, label: str, times: float) -> None:
    """Measure the step's norm as if the last update had been made with the usual setting, or been of the usual size."""
    rate, decay = case.clues.updates.movements.usual_settings()
    if label == "learning_rate_jumped":
        name, value, part = "usual_learning_rate", rate, 1.0 / (case.evidence["learning_rate_times"] or 1.0)
    elif label == "weight_decay":
        name, value, part = "usual_weight_decay", decay, 0.0
    else:
        name, value, part = "usual_part", 1.0 / max(times, 1.0), 1.0 / max(times, 1.0)
    norm = _with_update(case, part, decay=decay if label == "weight_decay" else None)
    if norm is not None:
        case.evidence |= {name: value, "norm_under_usual_update": norm}
        case.note(f"this step with the last update under {name.replace('_', ' ')} {number(value, 3)}", norm)


def _mechanism(case: _Case, times: float) -> tuple[str, str]:
    """Return the label of what made the last update this large, and the end of the sentence that says so."""
    updates, evidence = case.clues.updates, case.evidence
    rate, (usual_rate, _) = updates.movements[-1].rate, updates.movements.usual_settings()
    rate_times = rate / usual_rate if usual_rate > 0 else 1.0
    evidence |= {"learning_rate": rate, "learning_rate_times": rate_times}
    if rate_times >= UNUSUAL and times / rate_times < _SPREAD:
        return (
            "learning_rate_jumped",
            f": the learning rate was {number(rate, 3)}, {number(rate_times, 3)} times the usual",
        )
    moments = updates.moments(case.task.prober.ranks)
    is_small = moments.ratio > _LARGE_RATIO
    evidence |= {"decay_share": moments.decay_share, "moment_over_root": moments.ratio if is_small else None}
    if moments.decay_share >= _DECAYED:
        return "weight_decay", f": weight decay made {100 * moments.decay_share:.0f} % of it"
    if moments.are_of_one_gradient:
        return "moments_lost", ": the optimizer's moments hold a single gradient, as after a resume that lost them"
    if is_small:
        return "second_moments", ": the second moments are too small for the gradients that they divide"
    return "update_too_large", ""


def _change_fault(case: _Case, since: int, changed: dict[str, float]) -> Fault:
    """Return the fault of weights that something else than the optimizer changed; verified by taking it back."""
    order = sorted(changed, key=lambda name: -abs(math.log(max(changed[name], 1e-60))))
    names = tuple(order[:MOST_NAMES])
    factor, evidence = changed[names[0]], case.evidence
    evidence |= {"norm_times": factor, "parameters": float(len(changed))}
    element = _loudest_element(case, names[0])
    what = f"its norm is {number(factor, 3)} times what the optimizer left"
    if element is not None:
        what += f", and one element, {element[0]}, is {number(element[1], 4)}"
        evidence["element_value"] = element[1]
    healed = _with_changed(case, changed, names[0] if element is not None else "")
    if healed is not None:
        evidence["norm_without_change"] = healed
        case.note("this step with that change taken back", healed)
    more = f" and {plural(len(changed) - 1, 'other parameter')}" if len(changed) > 1 else ""
    why = f"{names[0]}{more} changed after step {since}, outside of the optimizer: {what}"
    return Fault("weights", "weights_changed", names, since, evidence, why)


def _loudest_element(case: _Case, name: str) -> tuple[list[int], float] | None:
    """Return where and how large one element is that holds most of this parameter's squared norm; None without one.

    Of sharded parameters nothing is said.
    """
    space = case.task.prober.space
    param = space.params[space.names.index(name)]
    if local_shard(param) is not param and local_shard(param).shape != param.shape:
        return None
    shard = local_shard(param.detach()).double()
    if shard.numel() < 2 or not float(shard.square().max()) >= _ELEMENT * float(shard.square().sum()):
        return None
    place = int(shard.flatten().abs().argmax())
    return [int(each) for each in torch.unravel_index(torch.tensor(place), shard.shape)], float(shard.flatten()[place])


def _with_changed(case: _Case, changed: dict[str, float], element_in: str) -> float | None:
    """Return the step's norm with those weights scaled back, or their loudest element set to 0."""
    names = case.task.prober.space.names

    def before(index: int, saved: torch.Tensor) -> torch.Tensor:
        name = names[index]
        if name not in changed:
            return saved
        if name == element_in:
            there = saved.clone().flatten()
            there[int(there.abs().argmax())] = 0.0
            return there.view_as(saved)
        return saved / max(changed[name], 1e-60)

    return _norm_at(case, before)


def _growth_fault(case: _Case, is_loud: bool) -> Fault:
    """Return the fault of weights that several steps moved away: since when, and which moved furthest."""
    updates, reference, ranks = case.clues.updates, case.clues.reference, case.task.prober.ranks
    assert reference is not None
    since, names = reference.number, tuple[str, ...]()
    far, usual = updates.far(ranks, since if is_loud else 0), updates.movements.usual()
    why = f"at these weights any batch spikes; at step {since} it did not, and undoing the last update is not enough"
    if far:
        since, times = far[0][0], max(times for _, times in far)
        who = "any batch" if is_loud else "this batch, unlike an earlier one,"
        which = f"the update of step {since}" if len(far) == 1 else f"{plural(len(far), 'update')} since step {since}"
        why = f"{who} spikes at the weights that {which} left, up to {number(times, 3)} times as far as usual"
        case.evidence["moved_times"] = times
    steps = [each.relative for each in updates.movements if each.number >= since]
    if usual is not None and steps:
        times_usual = torch.stack(steps).mean(0) / usual.clamp(min=1e-60)
        names = tuple(updates.names[index] for index in _largest(times_usual))
    return Fault("weights", "weights_grown", ranks.broadcast_from(0, names), since, case.evidence, why)


def _about_attention(case: _Case) -> str:
    """Return the end of a sentence on attention logits that are out of bounds; mostly ""."""
    logit = case.evidence["attention_logit"] or 0.0
    return f"; attention logits reach up to {number(logit, 3)} in {case.attention}" if logit > LARGE_LOGIT else ""
