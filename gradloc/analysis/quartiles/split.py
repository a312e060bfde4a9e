# SPDX-License-Identifier: Apache-2.0
"""Which tokens belong to which probability quartile, which are sampled, and what sums them up. Pure.

Tokens are split by pi, the probability that the policy gave them before the update, in one of two ways: ``quantile``
into four parts of equally many tokens, ``range`` into quarters of [0, 1], as panels (c) to (f) of Fig. 1 of arXiv
2505.12929 do (its shares of 19, 10, 10 and 61 % say so).

Shapes: R rows, T response positions.
"""

import numpy as np

from ...record.analysis import Agreement, Change

NUM_QUARTILES = 4
EMPTY = -1
"""The quartile of what is no response token."""
UPDATES: dict[str, tuple[int, ...]] = {
    "all": tuple(range(NUM_QUARTILES)),
    "lowest": (0,),
    "highest": (NUM_QUARTILES - 1,),
    "none": (),
}
"""The trial updates: their names in the record, and the quartiles whose gradient each takes. ``none`` shows what the
optimizer does on its own, by momentum and weight decay."""
NUM_BINS = 120
PERCENTS = (0, 5, 25, 50, 75, 95, 100)


def assign(log_prob: np.ndarray, mask: np.ndarray, split: str) -> np.ndarray:
    """The quartile of every token, 0 for the least probable ones.

    Args:
        log_prob: (R, T), of the policy before the update.
        mask: bool (R, T), the response tokens.
        split: ``quantile``: a token with k less probable ones among n goes to quartile floor(4 k / n), so that equally
            probable tokens stay together and a quartile may be empty; ``range``: (0, 1/4], (1/4, 1/2], ...

    Returns:
        int8 (R, T), ``EMPTY`` outside of the mask.

    Raises:
        ValueError: when a response token's log-prob is not finite.

    >>> assign(np.log([[0.9, 0.1, 0.5, 0.2]]), np.ones((1, 4), bool), "quantile").tolist()
    [[3, 0, 2, 1]]
    >>> assign(np.log([[0.9, 0.1, 0.5, 0.2]]), np.ones((1, 4), bool), "range").tolist()
    [[3, 0, 1, 0]]
    """
    quartiles = np.full(log_prob.shape, EMPTY, dtype=np.int8)
    values = np.asarray(log_prob, dtype=np.float64)[mask]
    num_bad = int((~np.isfinite(values)).sum())
    if num_bad:
        raise ValueError(
            f"the quartile analysis needs finite old_log_probs, found {num_bad} of {len(values)} response tokens "
            "without: look for them in the rollout or in the old policy's forward."
        )
    if split == "quantile":
        num_below = np.searchsorted(np.sort(values), values, side="left")
        quartiles[mask] = NUM_QUARTILES * num_below // max(len(values), 1)
    else:
        quarter = np.ceil(NUM_QUARTILES * np.exp(values)) - 1
        quartiles[mask] = np.clip(quarter, 0, NUM_QUARTILES - 1)
    return quartiles


def sample_tokens(quartiles: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Draw tokens without replacement, equally many of each quartile as far as it has them; all if there are fewer.

    Args:
        quartiles: (R, T), from :func:`assign`.
        count: how many to draw.
        seed: of the draw.

    Returns:
        int (S, 2): row and position of each, in their order.
    """
    generator = np.random.default_rng(seed)
    shuffled = [generator.permutation(np.argwhere(quartiles == quartile)) for quartile in range(NUM_QUARTILES)]
    # in turns: the first of each quartile, then the second of each, ...
    turns = [(turn, quartile) for quartile, tokens in enumerate(shuffled) for turn in range(len(tokens))]
    chosen = [shuffled[quartile][turn] for turn, quartile in sorted(turns)[:count]]
    return np.array(sorted(map(tuple, chosen)), dtype=np.int64).reshape(-1, 2)


def rank_correlation(left: np.ndarray, right: np.ndarray) -> float | None:
    """Spearman's: Pearson's correlation of the ranks, equal values sharing the mean of theirs.

    Returns:
        In [-1, 1]; None where either has no two different values or a value is not finite.
    """
    return _correlation(_ranks(left), _ranks(right)) if _is_finite(left, right) else None


def agreement(change: np.ndarray, reference: np.ndarray) -> Agreement:
    """How much one update's probability changes look like another's; both (N,), per token."""
    if not _is_finite(change, reference):
        return Agreement()
    size = float(np.abs(reference).mean()) if len(reference) else 0.0
    ratio = float(np.abs(change).mean()) / size if size > 0 else None
    return Agreement(correlation=_correlation(change, reference), ratio=ratio)


def change_edges(changes: list[np.ndarray]) -> list[float]:
    """Edges of the bins that all updates' changes are counted in: symmetric about 0, out to the largest change."""
    sizes = np.abs(np.concatenate(changes))
    largest = float(sizes[np.isfinite(sizes)].max(initial=0.0))
    return np.linspace(-largest, largest, NUM_BINS + 1).tolist() if largest > 0 else [-1e-12, 1e-12]


def distribution(change: np.ndarray, advantages: np.ndarray, edges: list[float]) -> Change | None:
    """What is kept of many tokens' probability changes, (N,) as their advantages, whose sign they should have."""
    if not len(change):
        return None
    counts = advantages != 0
    follows = np.sign(change[counts]) == np.sign(advantages[counts])
    return Change(
        mean=float(change.mean()),
        mean_abs=float(np.abs(change).mean()),
        percentiles=tuple(np.percentile(change, PERCENTS).tolist()),
        counts=tuple(np.histogram(change[np.isfinite(change)], edges)[0].tolist()),
        right_way=float(follows.mean()) if len(follows) else None,
    )


def _ranks(values: np.ndarray) -> np.ndarray:
    """From 0 on; equal values share their mean rank."""
    ordered = np.sort(values)
    first, last = (np.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    return (first + last - 1) / 2


def _is_finite(*arrays: np.ndarray) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays)


def _correlation(left: np.ndarray, right: np.ndarray) -> float | None:
    if len(left) < 2 or np.ptp(left) == 0 or np.ptp(right) == 0:
        return None
    return float(np.corrcoef(left, right)[0, 1])
