# SPDX-License-Identifier: Apache-2.0
"""Which groups of rollouts a step trains on. Pure arithmetic.

A group gets a score: how much its rewards differ, their mean, or its length. The filter keeps the best groups, by a
share of the total score (``top_p``) or by a share of their number (``top_k``).
"""

import logging
from typing import Any

import numpy as np

from .config import FilterSettings
from .groups import GroupStatistics

logger = logging.getLogger(__name__)


def kept_groups(
    groups: GroupStatistics, settings: FilterSettings, num_ranks: int, metrics: dict[str, Any]
) -> tuple[np.ndarray, dict[str, float]] | None:
    """Choose the groups to train on, and add ``rollout/*`` to the step's metrics.

    A filter that would leave nothing is not applied: a step needs rows. Where the kept rows do not divide among the
    ranks, the next best groups stay too.

    Returns:
        The groups to keep, and ``kept_count`` (groups), ``kept_ratio`` (of the rows), ``zero_count`` (groups whose
        rewards are all equal) and ``empty`` (1 where the filter would have left nothing). None while it is off.
    """
    if len(groups) and groups.sizes.max() > 1:
        metrics["rollout/zero_variance_share"] = groups.zero_variance_share
    if settings.keeps_all:
        return None
    best_first, num_candidates = rank(groups, settings)
    kept = best_run(groups, best_first[:num_candidates], settings)
    is_empty = len(kept) == 0
    if is_empty:
        logger.warning("the rollout filter would leave no group, so this step keeps all %d", len(groups))
        kept = np.arange(len(groups))
    kept = fill_up(kept, best_first, groups.sizes, num_ranks)
    counts = {
        "kept_count": len(kept),
        "kept_ratio": float(groups.sizes[kept].sum() / groups.sizes.sum()),
        "zero_count": int((groups.reward_std == 0.0).sum()),
        "empty": float(is_empty),
    }
    metrics.update({f"rollout/filter_{name}": value for name, value in counts.items()})
    return kept, counts


def rank(groups: GroupStatistics, settings: FilterSettings) -> tuple[np.ndarray, int]:
    """Return all groups, best first, ties in the order of the batch; and how many of them, from the first on, may be
    kept.

    With ``include_zero=False``, groups whose rewards are all equal may not, and come last.
    """
    scores = _scores(groups, settings)
    best_first = np.argsort(-scores if settings.type == "largest" else scores, kind="stable")
    if settings.include_zero:
        return best_first, len(best_first)
    differ = groups.reward_std[best_first] != 0.0
    return np.concatenate([best_first[differ], best_first[~differ]]), int(differ.sum())


def best_run(groups: GroupStatistics, candidates: np.ndarray, settings: FilterSettings) -> np.ndarray:
    """Return the first candidates, as many as the filter keeps.

    ``top_k`` keeps ``int(value * G)`` groups, at least one. ``top_p`` keeps the shortest run whose mass reaches
    ``value`` of the total. A group's mass is ``linear``, its score (for ``smallest`` mirrored: largest + smallest -
    score; scores below 0 are lifted to 0 together), or the ``softmax`` of the scores.

    Returns:
        Empty without candidates; all of them where every mass is 0 or one is not finite.
    """
    if settings.strategy == "top_k":
        return candidates[: max(int(settings.value * len(groups)), 1)]
    mass = _mass(_scores(groups, settings)[candidates], settings)
    total = mass.sum()
    if not np.isfinite(total) or total <= 0.0:
        return candidates
    # the margin absorbs the rounding of the running sum, so that value 1 means "all that carries mass"
    reached = np.cumsum(mass) >= settings.value * total * (1.0 - 1e-9)
    return candidates[: int(np.argmax(reached)) + 1]


def _scores(groups: GroupStatistics, settings: FilterSettings) -> np.ndarray:
    scores = {"reward_variance": groups.reward_std, "reward": groups.reward_mean, "length": groups.length_mean}
    return scores[settings.metric]


def _mass(scores: np.ndarray, settings: FilterSettings) -> np.ndarray:
    if not len(scores):
        return scores
    is_largest_first = settings.type == "largest"
    if settings.top_p_prob_mode == "softmax":
        logits = scores if is_largest_first else -scores
        return np.exp(logits - logits.max())
    lifted = scores - min(float(scores.min()), 0.0)
    return lifted if is_largest_first else lifted.max() + lifted.min() - lifted


def fill_up(kept: np.ndarray, best_first: np.ndarray, sizes: np.ndarray, divisor: int) -> np.ndarray:
    """Add the next best groups until the number of rows, by ``sizes`` (G,), is a multiple of ``divisor``, or all."""
    chosen = list(kept)
    rest = [group for group in best_first if group not in set(kept.tolist())]
    while sizes[chosen].sum() % divisor and rest:
        chosen.append(rest.pop(0))
    return np.array(chosen, dtype=np.int64)


def advantage_scale(scaling: str, kept_ratio: float) -> float:
    """Return the factor on advantages, so that a step on a small share of the rows is a smaller step."""
    return {"none": 1.0, "linear": kept_ratio, "sqrt": kept_ratio**0.5}[scaling]
