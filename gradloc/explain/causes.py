# SPDX-License-Identifier: Apache-2.0
"""Classify why a token's gradient is large; the causes are in the table ``causes.ini``. Pure.

A token's gradient is a product: its loss weight, times |advantage|, times the importance ratio, times the rollout
correction weight, times the norm of the log-prob's own gradient (the Jacobian). The KL and entropy terms add their own
coefficients. Each factor is compared with what is typical in the batch; the one that is furthest above is the cause,
unless the entropy term outweighs them all. A critic's gradient has two factors: how far the value is from the return,
and the value's own gradient. Under distillation the distance to the teacher's log-prob replaces the advantage. In a
loop without advantages the token's weight in the loss does, and :mod:`.documents` looks at the whole document as well.

If no sampling can have given the log-prob that came with the rollout, every factor that rests on a log-prob is an
effect: the token was inserted or retokenized, or the row's log-probs are shifted.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..record import BatchStatistics, Cause, Culprit, Run
from .advice import ACTIONS, actions_of, is_trl, read_table
from .documents import Document, cause_in


@dataclass(frozen=True)
class CauseInfo:
    """A section of the table: a cause, or a special case. The head of the table documents its keys."""

    label: str
    title: str = ""
    means: str = ""
    means_of_batch: str = ""
    factor: str = ""
    odd: str = ""
    column: str = ""
    headline: str = ""
    figure: tuple[str, ...] = ("", "", "", "")
    named: str = ""
    do: tuple[str, ...] = ()
    cures: tuple[str, ...] = ()
    say: str = ""
    why: str = ""
    check: str = "No further event has this cause."
    causes: tuple[str, ...] = ()
    when: tuple[str, ...] = ()

    @property
    def seen(self) -> str:
        """Return the symptom as the docs name it."""
        return self.title or self.label

    def advice(self, trainer: str | None, strategy: str = "", is_distilled: bool = False) -> list[tuple[str, str]]:
        """Return pairs of an action and its config line for this trainer and search strategy.

        With ``is_distilled``, actions on the loss on rewards are left out.
        """
        more = "more_probes" if strategy == "bisect" else "more_steps"  # bisection alone counts probes
        names = [name for name in self.do if not is_distilled or not ACTIONS[name].is_of_rewards]
        return actions_of([more if name == "more_steps" else name for name in names], trainer)


def _info_from(label: str, row: Mapping[str, str]) -> CauseInfo:
    """Read a section of the table; a cause, which has a title, is by default a rule for itself."""
    found: dict[str, Any] = {"causes": label, **row} if "title" in row else {**row}
    for key in {"do", "cures", "causes", "when"} & found.keys():
        found[key] = tuple(found[key].split())
    if "figure" in found:
        found["figure"] = tuple(cell.strip() for cell in f"{found['figure']}|||".split("|")[:4])
    return CauseInfo(label, **found)


_TABLE = [_info_from(label, row) for label, row in read_table("causes.ini").items()]
CAUSE_INFO = {info.label: info for info in _TABLE if info.title}
"""Causes by label."""
RULES = tuple(info for info in _TABLE if info.why)
"""Rules of what to do; the first that applies counts."""


def cause_info(label: str) -> CauseInfo:
    """Return a cause's section; an unknown label counts as ``unknown``."""
    return CAUSE_INFO.get(label, CAUSE_INFO["unknown"])


# ---- which cause it is

NOTABLE = 3.0
"""Least multiple of its typical value at which a factor explains a gradient."""
_SPREAD = 10.0  # a layer ten times further above its history than the median layer explodes alone
_UNSCALED = 10.0
"""An advantage beyond this has a reward's unit: GRPO's are at most (n - 1) / sqrt(n), which is 8 for a group of 64."""
_LEADS = 3.0  # an entropy coefficient of this many times the log-prob's carries the gradient
_UNLIKELY = 0.01  # STAPO's bound on the probability
_TINY = 1e-30
APART = math.log(3.0)
"""Largest difference of two log-probs of a token that agree, nats."""
_FAR = 5.0  # nats between trainer and engine that no sampled token has
_TIMES_USUAL = 20.0  # a token that was not sampled is this many times as far off as the response's tokens usually are
_EXCLUDED = -20.0  # no sampling draws a token of 2e-9
_SHIFTED = 5.0  # times closer to the neighbours' log-probs than to a row's own
_LEAST_PAIRS = 5
_MIMICKED = (
    "token_mismatch",
    "sequence_mismatch",
    "is_weight",
    "low_probability",
    "spurious_token",
    "large_jacobian",
    "teacher_gap",
    "non_finite",
    "unknown",
)
"""Causes that a bad rollout log-prob can mimic."""
_LABEL_BY_FACTOR = {info.factor: label for label, info in reversed(CAUSE_INFO.items())}
"""Factor of the gradient that is furthest above typical -> cause."""
GROUPED = {"grpo": "GRPO", "grpo_mean": "GRPO without the division", "rloo": "RLOO"}
"""Estimators that take an advantage from a group's rewards, with their names in sentences."""


def classify(
    culprit: Culprit,
    batch: BatchStatistics,
    row: Sequence[tuple[float, float]] = (),
    run: Run | None = None,
    document: Document | None = None,
) -> Cause:
    """Name the cause of one culprit.

    Args:
        culprit: with log-probs, ratios, advantage, siblings, coefficients and gradient norm.
        batch: typical values.
        row: log-probs of each token of the response: the trainer's before the update, and the rollout engine's; empty
            where the engine's are not known.
        run: says how advantages are made; None where they are more than that.
        document: of a loop without advantages: what the row is like.

    Returns:
        The label, one of ``record.TOKEN_CAUSES`` or ``unknown`` where no factor is over three times its typical value,
        and the numbers behind it, mostly how many times typical each factor is.
    """
    cause = _by_factors(culprit, batch)
    if document is not None:
        return cause_in(culprit, cause, document)
    by_engine, numbers = _by_engine(culprit, row)
    is_advantage_finite = _are_finite(culprit.at("advantage"))
    label = by_engine if by_engine and cause.label in _MIMICKED and is_advantage_finite else cause.label
    if label == "unknown" and min(abs(culprit.at("advantage") or 0.0), batch.advantage) > _UNSCALED:
        label = "extreme_advantage"  # the whole batch's are, so none stands out
        numbers["batch_advantage"] = batch.advantage
    if run is not None and (label == "extreme_advantage" or not is_advantage_finite):
        numbers |= _group_numbers(culprit, run)
    return Cause(label, {**cause.numbers, **numbers})


# ---- against what is typical in the batch


def _signal(culprit: Culprit, batch: BatchStatistics) -> tuple[str, str, str, float | None]:
    """Return a token's training signal: the columns of the model's output and of what the loss pulls it to, the name of
    the factor that they make, and the factor's typical size."""
    if culprit.at("value") is not None:
        return "value", "value_target", "error", batch.value_error
    if culprit.at("teacher_log_prob") is not None:
        return "log_prob", "teacher_log_prob", "gap", batch.teacher_gap
    if batch.loss_weight is not None:
        return "log_prob", "loss_weight", "loss_weight", batch.loss_weight
    return "log_prob", "advantage", "advantage", batch.advantage


def _by_factors(culprit: Culprit, batch: BatchStatistics) -> Cause:
    """Return the cause whose factor of the token's gradient is furthest above what is typical."""
    output_name, target_name, factor, typical = _signal(culprit, batch)
    coefficient, norm = culprit.at("coefficient"), culprit.grad_norm
    output, target = culprit.at(output_name), culprit.at(target_name)
    numbers: dict[str, float | None] = {output_name: output, target_name: target, "coefficient": coefficient}
    for label, values in (
        ("non_finite_forward", [output]),
        ("non_finite", [coefficient, target]),
        ("non_finite_backward", [norm]),
    ):
        if not _are_finite(*values):
            return Cause(label, numbers)
    is_one_token = culprit.span == "token" or len(culprit.positions) == 1
    jacobian = norm / abs(coefficient) if is_one_token and norm is not None and coefficient else None
    size = target
    if factor in ("error", "gap"):  # the distance from the output to the target
        size = None if output is None or target is None else target - output
    excess = {factor: _over(size, typical)}
    if factor == "error":  # a critic's
        excess["jacobian"] = _over(jacobian, batch.jacobian)
        numbers |= _over_typical(excess)
        return Cause(_label_by_factor(culprit, batch, excess, numbers), numbers)
    kl, weight = culprit.at("kl_coefficient") or 0.0, abs(culprit.at("loss_weight") or 0.0)
    entropy = culprit.at("entropy_coefficient")
    excess |= {
        "ratio": _over(_clamped_ratio(culprit.at("log_prob"), culprit.at("old_log_prob_used")), 1.0),
        "is_weight": _over(culprit.at("is_weight"), 1.0),
        "jacobian": _over(jacobian, batch.jacobian),
        "kl": _over(kl, weight * batch.advantage) if kl else 0.0,
    }
    numbers = {**_over_typical(excess), "log_prob_gradient_norm": jacobian}
    if coefficient:
        numbers["kl_share_of_coefficient"] = abs(kl) / (abs(kl) + abs(coefficient - kl) + _TINY)
        if entropy:
            numbers["entropy_over_log_prob"] = abs(entropy / coefficient)
    if abs(entropy or 0.0) > _LEADS * abs(coefficient or 0.0):
        return Cause("entropy_term", numbers)
    if abs(kl) <= abs((coefficient or 0.0) - kl):
        del excess["kl"]  # the smaller part of the coefficient is not the cause
    label = _label_by_factor(culprit, batch, excess, numbers)
    if label in ("low_probability", "unknown") and _is_spurious(culprit, batch):
        label = "spurious_token"
        numbers |= {"probability": math.exp(culprit.at("log_prob") or 0.0), "entropy": culprit.at("entropy")}
    return Cause(label, numbers)


def _label_by_factor(
    culprit: Culprit, batch: BatchStatistics, excess: dict[str, float], numbers: dict[str, float | None]
) -> str:
    """Return the cause of the factor furthest above typical; add to ``numbers`` what decided it."""
    name = max(excess, key=lambda name: excess[name])
    if name == "jacobian" and (batch.layer_spread or 0.0) > _SPREAD:
        numbers["layer_spread"] = batch.layer_spread
        return "layer_heterogeneity"
    if excess[name] < NOTABLE:
        return "unknown"
    if name == "ratio":
        # the whole sequence is off when its mean log-ratio is at least half of this token's
        log_mean = math.log(max(culprit.sequence_ratio or 1.0, _TINY))
        return "sequence_mismatch" if log_mean > math.log(excess[name]) / 2 else "token_mismatch"
    if name == "jacobian" and culprit.at("value") is None:
        predicted = (1 - math.exp(min(culprit.at("log_prob") or 0.0, 0.0))) / max(batch.one_minus_prob, _TINY)
        numbers["jacobian_predicted_by_probability"] = predicted
        return "low_probability" if excess[name] <= NOTABLE * predicted else "large_jacobian"
    return _LABEL_BY_FACTOR[name]


def _is_spurious(culprit: Culprit, batch: BatchStatistics) -> bool:
    """Return whether a token was rewarded by accident, by STAPO's three signs (arXiv 2602.15620): it is unlikely, the
    model was sure of another, and the response was rewarded."""
    log_prob, entropy = culprit.at("log_prob"), culprit.at("entropy")
    if log_prob is None or entropy is None or batch.low_entropy is None:
        return False
    is_unlikely = math.exp(min(log_prob, 0.0)) < _UNLIKELY
    return is_unlikely and entropy <= batch.low_entropy and (culprit.at("advantage") or 0.0) > 0


def _are_finite(*values: float | None) -> bool:
    """Return whether all known values are finite."""
    return all(math.isfinite(value) for value in values if value is not None)


def _clamped_ratio(log_new: float | None, log_old: float | None) -> float | None:
    if log_new is None or log_old is None:
        return None
    return math.exp(min(max(log_new - log_old, -20.0), 20.0))  # verl clamps the log-ratio at 20, too


def _over(value: float | None, typical: float | None) -> float:
    """Return |value| / typical; 1 where this cannot be known."""
    if value is None or typical is None or not math.isfinite(value) or typical <= _TINY:
        return 1.0
    return abs(value) / typical


def _over_typical(excess: dict[str, float]) -> dict[str, float | None]:
    return {f"{name}_over_typical": value for name, value in excess.items()}


# ---- against its group


def _group_numbers(culprit: Culprit, run: Run) -> dict[str, float | None]:
    """Return the group's size, spread and mean, and the largest advantage that its estimator can give."""
    siblings, advantage = culprit.siblings, culprit.at("advantage")
    if run.estimator not in GROUPED or siblings is None or advantage is None:
        return {}
    size = len(siblings) + 1
    rollouts = max(size, run.rollouts or 1)
    if size < rollouts and is_trl(run.trainer):  # whose steps may take a part of a group each
        return {"rollouts": rollouts, "advantage_bound": _bound(run.estimator, rollouts, None)}
    rewards = [culprit.reward, *(sibling.reward for sibling in siblings)]
    known = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    spread = max(known) - min(known) if len(known) == size else None
    advantages = [advantage, *(sibling.advantage or 0.0 for sibling in siblings)]
    return {
        "rollouts": rollouts,
        "group_size": size,
        "group_spread": spread,
        "group_mean": math.fsum(advantages) / size if _are_finite(*advantages) else None,
        "advantage_bound": _bound(run.estimator, rollouts, spread),
    }


def _bound(estimator: str | None, num: int, spread: float | None) -> float | None:
    """Return the largest possible |advantage| among ``num`` responses whose rewards differ by up to ``spread``.

    It belongs to a reward unlike all others, which are equal. The standard deviation is a sample's, over num - 1.
    """
    if estimator == "grpo":
        return (num - 1) / math.sqrt(num)
    return None if spread is None else spread * (num - 1) / num if estimator == "grpo_mean" else spread


# ---- against the engine that wrote the token


def _by_engine(culprit: Culprit, row: Sequence[tuple[float, float]]) -> tuple[str, dict[str, float | None]]:
    """Compare the engine's log-prob with the trainer's: a cause, "" where the token may be sampled, and the numbers."""
    engines, now, old = (culprit.at(name) for name in ("rollout_log_prob", "log_prob", "old_log_prob"))
    if engines is None or now is None or not math.isfinite(now):
        return "", {}
    is_old_known = old is not None and old != engines  # bypass mode stores the engine's as the old one
    before = old if old is not None and is_old_known else now
    gap, drift = engines - before, now - before
    distances = _distances(row, 0)
    usual = statistics.median(distances) if distances else None
    numbers: dict[str, float | None] = {"engine_gap": gap, "engine_gap_of_response": usual, "drift": drift}
    shift = _shift(row)
    if shift and abs(gap) > APART:
        return "shifted_log_probs", {**numbers, "shift": shift}
    is_filled_in = engines == 0.0
    least = APART if is_filled_in and is_old_known else _FAR
    is_unlike = is_filled_in or (abs(drift) <= APART and (engines < _EXCLUDED or (gap > 0 and is_old_known)))
    is_not_sampled = is_unlike and abs(gap) > max(least, _TIMES_USUAL * (usual or 0.0))
    return ("not_sampled" if is_not_sampled else ""), numbers


def _shift(row: Sequence[tuple[float, float]]) -> int:
    """Return the shift between both sides' log-probs: 1 or -1 where one is a position off, else 0."""
    for shift, unshifted in ((1, row[:-1]), (-1, row[1:])):  # an end that the shift leaves out may be what is odd
        own, shifted = _distances(unshifted, 0), _distances(row, shift)
        if len(shifted) >= _LEAST_PAIRS and _SHIFTED * statistics.fmean(shifted) < statistics.fmean(own):
            return shift
    return 0


def _distances(row: Sequence[tuple[float, float]], shift: int) -> list[float]:
    """Return the finite |trainer - engine| differences, with the trainer's log-probs moved by ``shift`` positions."""
    trainers = [now for now, _ in row][max(shift, 0) :]
    engines = [written for _, written in row][max(-shift, 0) :]
    distances = (abs(a - b) for a, b in zip(trainers, engines, strict=False))
    return [distance for distance in distances if math.isfinite(distance)]
