# SPDX-License-Identifier: Apache-2.0
"""Why a token's gradient is large, from its numbers. Pure; runs where the event is written.

A token's gradient is a product: its loss weight, times |advantage|, times the importance ratio, times the rollout
correction weight, times the norm of the log-prob's own gradient (the Jacobian); the KL and entropy terms add their own
coefficients. An entropy term with a far larger coefficient is the cause by itself. Else each factor is compared with
what is typical in the batch, and the one that is furthest above, in orders of magnitude, is named as the cause,
together with all the numbers. A critic's gradient is the product of two: how far the value is from the return, and the
value's own gradient.

Where the log-prob that the rollout brought is none that sampling this token gives, every factor that rests on a
log-prob is an effect: the token was inserted or retokenized, or the row's log-probs are shifted.
"""

import math
import statistics
from collections.abc import Sequence

from ..record import BatchStatistics, Cause, Culprit, Run
from .advice import is_trl

_NOTABLE = 3.0  # a factor under three times its typical value explains nothing
_SPREAD = 10.0  # a layer ten times further above its history than the median layer explodes alone
_LEADS = 3.0  # the entropy term carries what has this many times the log-prob's coefficient
_UNLIKELY = 0.01  # STAPO's bound on the probability
_TINY = 1e-30
APART = math.log(3.0)
"""Two log-probs of one token that differ by more disagree."""
_FAR = 5.0  # nats between trainer and engine that a sampled token does not have,
_MANY = 20.0  # nor one of an engine that is usually a twentieth as far off
_EXCLUDED = -20.0  # no sampling draws a token of 2e-9
_SHIFTED = 5.0  # times closer to the neighbours' log-probs than to a row's own
_LEAST_PAIRS = 5
_OF_LOG_PROBS = (
    *("token_mismatch", "sequence_mismatch", "is_weight", "low_probability", "spurious_token", "large_jacobian"),
    *("non_finite", "unknown"),
)
"""What a wrong log-prob of the rollout looks like; beside an extreme advantage it is no cause."""
GROUPED = {"grpo": "GRPO", "grpo_mean": "GRPO without the division", "rloo": "RLOO"}
"""Estimators of an advantage from a group's rewards, and what they are called."""


def _clamped_ratio(log_new: float | None, log_old: float | None) -> float | None:
    if log_new is None or log_old is None:
        return None
    return math.exp(min(max(log_new - log_old, -20.0), 20.0))  # verl clamps the log-ratio at 20, too


def _over(value: float | None, typical: float | None) -> float:
    """value / typical; 1 where that is not known."""
    if value is None or typical is None or not math.isfinite(value) or typical <= _TINY:
        return 1.0
    return abs(value) / typical


def classify(
    culprit: Culprit, batch: BatchStatistics, row: Sequence[tuple[float, float]] = (), run: Run | None = None
) -> Cause:
    """Name the cause of one culprit.

    Args:
        culprit: with log-probs, ratios, advantage, siblings, coefficients and gradient norm.
        batch: typical values.
        row: of each token of its response what the trainer gives it now, and what the rollout's engine wrote; empty
            where there are none of the engine's.
        run: says how advantages are made; None where they are more than that.

    Returns:
        The label (one of ``record.CAUSES``) and the numbers: how many times typical each factor is, and what the
        decision rests on. ``unknown`` when no factor is over three times its typical value.
    """
    found = _by_factors(culprit, batch)
    label, numbers = _by_engine(culprit, row)
    is_advantage_finite = culprit.advantage is None or math.isfinite(culprit.advantage)
    is_effect = found.label in _OF_LOG_PROBS and is_advantage_finite
    if run is not None and (found.label == "extreme_advantage" or not is_advantage_finite):
        numbers |= _of_group(culprit, run)
    return Cause(label if label and is_effect else found.label, {**found.numbers, **numbers})


def _of_group(culprit: Culprit, run: Run) -> dict[str, float | None]:
    """What the estimator can give for the culprit's group, and what the group is like; empty where it has none."""
    siblings = culprit.siblings
    if run.estimator not in GROUPED or siblings is None or culprit.advantage is None:
        return {}
    size = len(siblings) + 1
    rollouts = max(size, run.rollouts or 1)
    if size < rollouts and is_trl(run.trainer):  # whose steps may take a part of a group each
        return {"rollouts": rollouts, "advantage_bound": _bound(run.estimator, rollouts, None)}
    rewards = [culprit.reward, *(sibling.reward for sibling in siblings)]
    known = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    spread = max(known) - min(known) if len(known) == size else None
    advantages = [culprit.advantage, *(sibling.advantage or 0.0 for sibling in siblings)]
    return {
        "rollouts": rollouts,
        "group_size": size,
        "group_spread": spread,
        "group_mean": math.fsum(advantages) / size if all(map(math.isfinite, advantages)) else None,
        "advantage_bound": _bound(run.estimator, rollouts, spread),
    }


def _bound(estimator: str | None, num: int, spread: float | None) -> float | None:
    """The largest |advantage| among so many responses whose rewards differ by up to ``spread``.

    It belongs to a reward unlike all others, which are equal. The standard deviation is a sample's, over num - 1.
    """
    if estimator == "grpo":
        return (num - 1) / math.sqrt(num)
    return None if spread is None else spread * (num - 1) / num if estimator == "grpo_mean" else spread


def _by_engine(culprit: Culprit, row: Sequence[tuple[float, float]]) -> tuple[str, dict[str, float | None]]:
    """What the engine's log-prob says, beside the trainer's before the update and now; "" where it may be sampled."""
    written, now, old = culprit.rollout_log_prob, culprit.log_prob, culprit.old_log_prob_stored
    if written is None or now is None or not math.isfinite(now):
        return "", {}
    is_old_known = old is not None and old != written  # bypass keeps the engine's as the old one
    before = old if old is not None and is_old_known else now
    gap, drift = written - before, now - before
    of_response = _distances(row, 0)
    usual = statistics.median(of_response) if of_response else None
    numbers: dict[str, float | None] = {"engine_gap": gap, "engine_gap_of_response": usual, "drift": drift}
    shift = _shift(row)
    if shift and abs(gap) > APART:
        return "shifted_log_probs", {**numbers, "shift": shift}
    is_filled_in = written == 0.0
    least = APART if is_filled_in and is_old_known else _FAR
    is_unlike = is_filled_in or (abs(drift) <= APART and (written < _EXCLUDED or (gap > 0 and is_old_known)))
    return ("not_sampled" if is_unlike and abs(gap) > max(least, _MANY * (usual or 0.0)) else ""), numbers


def _shift(row: Sequence[tuple[float, float]]) -> int:
    """By how many positions the trainer's log-probs are the engine's: 1 where those are the next token's; else 0."""
    for shift, engines in ((1, row[:-1]), (-1, row[1:])):  # an end that the shift leaves out may be what is odd
        own, shifted = _distances(engines, 0), _distances(row, shift)
        if len(shifted) >= _LEAST_PAIRS and _SHIFTED * statistics.fmean(shifted) < statistics.fmean(own):
            return shift
    return 0


def _distances(row: Sequence[tuple[float, float]], shift: int) -> list[float]:
    """|trainer's - engine's| log-prob, the trainer's from so many positions further on; those that are finite."""
    ours = [now for now, _ in row][max(shift, 0) :]
    engines = [written for _, written in row][max(-shift, 0) :]
    found = (abs(a - b) for a, b in zip(ours, engines, strict=False))
    return [distance for distance in found if math.isfinite(distance)]


def _by_factors(culprit: Culprit, batch: BatchStatistics) -> Cause:
    coefficient = culprit.coefficients.log_prob
    kl = culprit.coefficients.kl or 0.0
    norm = culprit.grad_norm
    if culprit.value is not None:
        return _classify_value(culprit, culprit.value, batch)
    if culprit.log_prob is not None and not math.isfinite(culprit.log_prob):
        return Cause("non_finite_forward", {"coefficient": coefficient, "log_prob": culprit.log_prob})
    if any(not math.isfinite(value) for value in (coefficient, culprit.advantage) if value is not None):
        return Cause("non_finite", {"coefficient": coefficient, "advantage": culprit.advantage})
    if norm is not None and not math.isfinite(norm):
        return Cause("non_finite_backward", {"coefficient": coefficient, "log_prob": culprit.log_prob})

    weight = abs(culprit.loss_weight) if culprit.loss_weight else None
    jacobian = norm / abs(coefficient) if culprit.span == "token" and norm is not None and coefficient else None
    excess = {
        "advantage": _over(culprit.advantage, batch.advantage),
        "ratio": _over(_clamped_ratio(culprit.log_prob, culprit.old_log_prob_used), 1.0),
        "is_weight": _over(culprit.is_weight, 1.0),
        "jacobian": _over(jacobian, batch.jacobian),
        "kl": _over(kl, weight * batch.advantage if weight else None) if kl else 0.0,
    }
    numbers: dict[str, float | None] = {f"{name}_over_typical": value for name, value in excess.items()}
    numbers["log_prob_gradient_norm"] = jacobian
    numbers["kl_share_of_coefficient"] = abs(kl) / (abs(kl) + abs(coefficient - kl) + _TINY) if coefficient else None
    if coefficient and culprit.coefficients.entropy:
        numbers["entropy_over_log_prob"] = abs(culprit.coefficients.entropy / coefficient)
    label = _label(culprit, batch, excess, numbers, kl)
    if label in ("low_probability", "unknown") and _is_spurious(culprit, batch):
        label = "spurious_token"
        numbers |= {"probability": math.exp(culprit.log_prob or 0.0), "entropy": culprit.entropy}
    return Cause(label, numbers)


def _classify_value(culprit: Culprit, value: float, batch: BatchStatistics) -> Cause:
    """Of a critic: its gradient is the error of the value times the value's own gradient (the Jacobian)."""
    coefficient, norm, target = culprit.coefficients.log_prob, culprit.grad_norm, culprit.value_target
    numbers: dict[str, float | None] = {"value": value, "value_target": target, "coefficient": coefficient}
    if not math.isfinite(value):
        return Cause("non_finite_forward", numbers)
    if any(not math.isfinite(number) for number in (coefficient, norm, target) if number is not None):
        return Cause("non_finite", numbers)
    jacobian = norm / abs(coefficient) if culprit.span == "token" and norm is not None and coefficient else None
    excess = {
        "error": _over(None if target is None else target - value, batch.value_error),
        "jacobian": _over(jacobian, batch.jacobian),
    }
    numbers |= {f"{name}_over_typical": times for name, times in excess.items()}
    name = max(excess, key=lambda name: excess[name])
    if name == "jacobian" and (batch.layer_spread or 0.0) > _SPREAD:
        return Cause("layer_heterogeneity", {**numbers, "layer_spread": batch.layer_spread})
    if excess[name] < _NOTABLE:
        return Cause("unknown", numbers)
    return Cause("value_outlier" if name == "error" else "large_jacobian", numbers)


def _is_spurious(culprit: Culprit, batch: BatchStatistics) -> bool:
    """STAPO's three signs of a token that is rewarded by accident (arXiv 2602.15620): an unlikely token where the model
    was sure of another, in a response that was rewarded."""
    if culprit.log_prob is None or culprit.entropy is None or batch.low_entropy is None:
        return False
    is_unlikely = math.exp(min(culprit.log_prob, 0.0)) < _UNLIKELY
    return is_unlikely and culprit.entropy <= batch.low_entropy and (culprit.advantage or 0.0) > 0


def _label(
    culprit: Culprit, batch: BatchStatistics, excess: dict[str, float], numbers: dict[str, float | None], kl: float
) -> str:
    coefficient = culprit.coefficients.log_prob or 0.0
    if abs(culprit.coefficients.entropy or 0.0) > _LEADS * abs(coefficient):
        return "entropy_term"
    if abs(kl) <= abs(coefficient - kl):
        excess = {**excess, "kl": 0.0}  # the KL term is the smaller part of the coefficient: it is not the cause
    name, value = max(excess.items(), key=lambda item: item[1])
    if name == "jacobian" and (batch.layer_spread or 0.0) > _SPREAD:
        numbers["layer_spread"] = batch.layer_spread
        return "layer_heterogeneity"
    if value < _NOTABLE:
        return "unknown"
    if name == "advantage":
        return "extreme_advantage"
    if name == "kl":
        return "kl_term"
    if name == "is_weight":
        return "is_weight"
    if name == "ratio":
        log_ratio = math.log(value)
        log_mean = math.log(max(culprit.ratios.sequence_geometric_mean or 1.0, _TINY))
        # the whole sequence is off when its mean log-ratio is at least half of this token's
        return "sequence_mismatch" if log_mean > log_ratio / 2 else "token_mismatch"
    predicted = (1 - math.exp(min(culprit.log_prob or 0.0, 0.0))) / max(batch.one_minus_prob, _TINY)
    numbers["jacobian_predicted_by_probability"] = predicted
    return "low_probability" if value <= _NOTABLE * predicted else "large_jacobian"
