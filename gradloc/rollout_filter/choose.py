# SPDX-License-Identifier: Apache-2.0
"""Which of a batch's groups are trained on, and what the filter did in numbers."""

import logging
from typing import Any

import numpy as np

from .config import FilterSettings
from .groups import Groups
from .rank import fill_up, rank, select

logger = logging.getLogger(__name__)


def choose(groups: Groups, settings: FilterSettings, num_ranks: int) -> tuple[np.ndarray, dict[str, float]]:
    """Keep the groups that the settings ask for.

    A filter that leaves nothing is not applied: a step needs rows. Where the rows kept cannot be dealt out to the
    ranks evenly, the next best groups stay, too.

    Args:
        groups: of the whole batch.
        settings: score, order and share.
        num_ranks: the number of rows kept is a multiple of it.

    Returns:
        The groups to keep, and for the trackers ``kept_count`` (groups), ``kept_ratio`` (of the rows), ``zero_count``
        (groups whose rewards are all equal) and ``empty`` (1 where the filter would have left nothing).
    """
    scores, candidates = rank(groups, settings.metric, settings.type, settings.include_zero)
    kept = select(scores, candidates, settings.strategy, settings.value, settings.type, settings.top_p_prob_mode)
    is_empty = len(kept) == 0
    if is_empty:
        logger.warning("the rollout filter would leave no group, so this step keeps all %d", len(groups))
        kept = np.arange(len(groups))
    _, everyone = rank(groups, settings.metric, settings.type, include_zero=True)
    rest = [group for group in everyone if group not in set(candidates.tolist())]
    kept = fill_up(kept, np.concatenate([candidates, rest]).astype(int), groups.sizes, num_ranks)
    return kept, {
        "kept_count": len(kept),
        "kept_ratio": float(groups.sizes[kept].sum() / groups.sizes.sum()),
        "zero_count": int((groups.reward_std == 0.0).sum()),
        "empty": float(is_empty),
    }


def kept_groups(
    groups: Groups, settings: FilterSettings, num_ranks: int, metrics: dict[str, Any]
) -> tuple[np.ndarray, dict[str, float]] | None:
    """:func:`choose` as a trainer's step asks for it; None while the filter is off.

    Args:
        groups: of the whole batch.
        settings: see above.
        num_ranks: likewise.
        metrics: of the step; ``rollout/*`` is added.
    """
    metrics["rollout/zero_variance_share"] = groups.zero_variance_share
    if settings.keeps_all:
        return None
    kept, counts = choose(groups, settings, num_ranks)
    metrics.update({f"rollout/filter_{name}": value for name, value in counts.items()})
    return kept, counts
