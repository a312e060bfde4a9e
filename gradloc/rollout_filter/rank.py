# SPDX-License-Identifier: Apache-2.0
"""Which groups of rollouts are worth training on. Pure.

A group gets a score (how much its rewards differ, their mean, or its length); the filter keeps the best of them, by a
share of the total score (``top_p``) or by a share of their number (``top_k``).
"""

import numpy as np

from .groups import Groups

STRATEGIES = ("top_p", "top_k")
METRICS = ("reward_variance", "reward", "length")
TYPES = ("largest", "smallest")
PROB_MODES = ("linear", "softmax")
SCALINGS = ("none", "linear", "sqrt")


def rank(groups: Groups, metric: str, order: str, include_zero: bool) -> tuple[np.ndarray, np.ndarray]:
    """Score the groups and put the candidates in order.

    Args:
        groups: of the whole batch.
        metric: ``reward_variance`` (the standard deviation), ``reward`` (the mean) or ``length`` (mean tokens).
        order: ``largest`` or ``smallest`` first; ties keep their order in the batch.
        include_zero: whether groups whose rewards are all equal are candidates at all.

    Returns:
        The scores of all groups (G,), and the candidates, best first.
    """
    scores = {
        "reward_variance": groups.reward_std,
        "reward": groups.reward_mean,
        "length": groups.length_mean,
    }[metric]
    keys = -scores if order == "largest" else scores
    best_first = np.argsort(keys, kind="stable")
    return scores, best_first if include_zero else best_first[groups.reward_std[best_first] != 0.0]


def select(
    scores: np.ndarray, best_first: np.ndarray, strategy: str, value: float, order: str, prob_mode: str
) -> np.ndarray:
    """The candidates that the filter keeps, best first.

    Args:
        scores: (G,) of all groups.
        best_first: the candidates.
        strategy: ``top_k`` keeps ``int(value * G)`` groups, at least one; ``top_p`` the shortest run of candidates
            whose mass reaches ``value`` of the candidates' total.
        value: in (0, 1].
        order: ``largest`` or ``smallest``.
        prob_mode: what a candidate's mass is: ``linear``, its score (for ``smallest`` mirrored, largest + smallest -
            score; scores below 0 are lifted to 0 together), or ``softmax`` of the scores.

    Returns:
        A prefix of ``best_first``: empty without candidates, all of them where every mass is 0 or one is not finite.
    """
    if strategy == "top_k":
        return best_first[: max(int(value * len(scores)), 1)]
    mass = _mass(scores[best_first], order, prob_mode)
    total = mass.sum() if len(mass) else 0.0
    if not np.isfinite(total) or total <= 0.0:
        return best_first
    # the margin absorbs the rounding of the running sum, so that value 1 means "all that carries mass"
    reached = np.cumsum(mass) >= value * total * (1.0 - 1e-9)
    return best_first[: int(np.argmax(reached)) + 1]


def _mass(scores: np.ndarray, order: str, prob_mode: str) -> np.ndarray:
    if not len(scores):
        return scores
    if prob_mode == "softmax":
        logits = scores if order == "largest" else -scores
        return np.exp(logits - logits.max())
    lifted = scores - min(float(scores.min()), 0.0)
    return lifted if order == "largest" else lifted.max() + lifted.min() - lifted


def fill_up(kept: np.ndarray, best_first: np.ndarray, sizes: np.ndarray, divisor: int) -> np.ndarray:
    """Add the next best groups until the rows can be dealt out evenly.

    Args:
        kept: groups that the filter keeps, at least one.
        best_first: all groups, candidates first.
        sizes: (G,) rows per group.
        divisor: the number of rows has to be a multiple of it: data-parallel ranks.

    Returns:
        The groups to train on; all of them where no smaller number of rows fits.
    """
    chosen = list(kept)
    rest = [group for group in best_first if group not in set(kept.tolist())]
    while sizes[chosen].sum() % divisor and rest:
        chosen.append(rest.pop(0))
    return np.array(chosen, dtype=np.int64)


def advantage_scale(scaling: str, kept_ratio: float) -> float:
    """What ``filter_loss_scaling`` multiplies advantages with, so that a step on few groups is a smaller step.

    Args:
        scaling: ``none``, ``linear`` or ``sqrt``.
        kept_ratio: share of the rows kept, in (0, 1].
    """
    return {"none": 1.0, "linear": kept_ratio, "sqrt": kept_ratio**0.5}[scaling]
