# SPDX-License-Identifier: Apache-2.0
"""Split the gradient by the tokens' probability, as arXiv 2505.12929 does.

Assign tokens to quartiles, sample some, and make the record and its metrics of the ranks' numbers. Pure functions.

Tokens are split by pi, the probability that the policy gave them before the update, in one of two ways: ``quantile``
into four parts of equally many tokens, ``range`` into quarters of [0, 1], as panels (c) to (f) of Fig. 1 of the paper
do (its shares of 19, 10, 10 and 61 % say so).

A quartile's gradient has three measures, because each alone misleads. The *norm* of its part: what the
optimizer would get if only its tokens were updated (panel (d)); it grows with the number of tokens, and tokens may
cancel. Its *share*, ``<part, whole> / ||whole||^2``: what it contributes to the update's direction; shares add up to 1.
And the mean norm of *single tokens'* gradients, where nothing cancels.

Shapes: R rows of the batch, T response positions, S sampled tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np

from ..record import analysis

NUM_QUARTILES = 4
EMPTY = -1
"""The quartile where there is no response token."""
UPDATES: dict[str, tuple[int, ...]] = {
    "all": tuple(range(NUM_QUARTILES)),
    "lowest": (0,),
    "highest": (NUM_QUARTILES - 1,),
    "none": (),
}
"""Trial updates: name in the record -> quartiles whose gradient it takes. ``none`` shows the effect of momentum and
weight decay alone."""
NUM_BINS = 120
PERCENTS = (0, 5, 25, 50, 75, 95, 100)


def assign(log_prob: np.ndarray, mask: np.ndarray, split: str) -> np.ndarray:
    """Return the quartile of every token, 0 for the least probable ones.

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
    # the first of each quartile, then the second of each, and so on
    turns = sorted((turn, quartile) for quartile, tokens in enumerate(shuffled) for turn in range(len(tokens)))
    chosen = [shuffled[quartile][turn] for turn, quartile in turns[:count]]
    return np.array(sorted(map(tuple, chosen)), dtype=np.int64).reshape(-1, 2)


def rank_correlation(left: np.ndarray, right: np.ndarray) -> float | None:
    """Return Spearman's correlation: Pearson's of the ranks, where equal values share the mean rank.

    Returns:
        In [-1, 1]; None where either has no two different values or a value is not finite.
    """
    return _correlation(_ranks(left), _ranks(right)) if _is_finite(left, right) else None


def agreement(change: np.ndarray, reference: np.ndarray) -> analysis.Agreement:
    """Compare two updates' probability changes; both (N,), per token."""
    if not _is_finite(change, reference):
        return analysis.Agreement()
    size = float(np.abs(reference).mean()) if len(reference) else 0.0
    ratio = float(np.abs(change).mean()) / size if size > 0 else None
    return analysis.Agreement(correlation=_correlation(change, reference), ratio=ratio)


def change_edges(changes: list[np.ndarray]) -> list[float]:
    """Return the edges of the histograms' bins: symmetric about 0, out to the largest change of all updates."""
    sizes = np.abs(np.concatenate(changes))
    largest = float(sizes[np.isfinite(sizes)].max(initial=0.0))
    return np.linspace(-largest, largest, NUM_BINS + 1).tolist() if largest > 0 else [-1e-12, 1e-12]


def distribution(change: np.ndarray, advantages: np.ndarray, edges: list[float]) -> analysis.Change | None:
    """Summarize tokens' probability changes, (N,) as their advantages, whose sign they should have."""
    if not len(change):
        return None
    has_direction = advantages != 0
    follows = np.sign(change[has_direction]) == np.sign(advantages[has_direction])
    return analysis.Change(
        mean=float(change.mean()),
        mean_abs=float(np.abs(change).mean()),
        percentiles=tuple(np.percentile(change, PERCENTS).tolist()),
        counts=tuple(np.histogram(change[np.isfinite(change)], edges)[0].tolist()),
        right_way=float(follows.mean()) if len(follows) else None,
    )


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 0 on; equal values share their mean rank."""
    ordered = np.sort(values)
    first, last = (np.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    return (first + last - 1) / 2


def _is_finite(*arrays: np.ndarray) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays)


def _correlation(left: np.ndarray, right: np.ndarray) -> float | None:
    if len(left) < 2 or np.ptp(left) == 0 or np.ptp(right) == 0:
        return None
    return float(np.corrcoef(left, right)[0, 1])


# ---- the record

Sampled = tuple[analysis.SampledToken, ...]
Changes = dict[str, np.ndarray | None]
"""Update -> change of every token's probability, float64 (R, T); None where no step was taken."""


class QuartileNumbers(TypedDict):
    """A rank's measurements, which differ between ranks in ``log_probs`` alone."""

    terms: list[str]
    whole: float  # norm of the whole batch's gradient
    norms: list[float]  # of each quartile's part
    dots: list[float]  # inner product of each part with the whole
    closure: float | None  # distance from the parts' sum to the whole, relative to it; None where that is zero
    tokens: list[dict[str, float | None]]  # norms of each sampled token
    steps: dict[str, analysis.Update | None]  # None without a gradient
    optimizer: str
    learning_rate: float
    log_probs: dict[str, list[np.ndarray] | None]  # before, and after each step taken: float32 (B, T) by micro-batch
    rows: list[int]  # the numbers of this rank's rows, below 0 for those that only fill up the ranks
    forwards: int
    backwards: int


@dataclass(frozen=True)
class _Tokens:
    """The batch's tokens, (R, T) each."""

    quartile: np.ndarray
    """``EMPTY`` where there is no response token."""
    probability: np.ndarray
    """Probabilities before the update."""
    advantage: np.ndarray
    token_id: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        return self.quartile != EMPTY


def record_fields(
    by_rank: list[QuartileNumbers], batch: dict[str, np.ndarray], quartiles: np.ndarray, sampled: np.ndarray
) -> dict[str, Any]:
    """Return the fields of :class:`~..record.analysis.QuartileAnalysis` that come from the workers' numbers.

    Args:
        by_rank: each rank's numbers.
        batch: ``old_log_probs``, ``advantages`` and ``responses``, each (R, T).
        quartiles: (R, T), from :func:`assign`.
        sampled: (S, 2), rows and positions.
    """
    numbers = by_rank[0]
    probability = np.exp(batch["old_log_probs"].astype(np.float64))
    tokens = _Tokens(quartiles, probability, batch["advantages"], batch["responses"])
    changes = _changes(by_rank, quartiles.shape)
    without = changes["none"]
    # momentum and weight decay alone move tokens, too: the rest is the gradient's own effect
    own = {name: None if change is None or without is None else change - without for name, change in changes.items()}
    updates: dict[str, analysis.Update | None] = dict.fromkeys(numbers["steps"])
    for name, step in numbers["steps"].items():
        if step is not None:
            moved, own_moved = _moved(changes, name, tokens), _moved(own, name, tokens)
            updates[name] = replace(step, changes=moved, own_changes=own_moved)
    sampled_tokens = _sampled_tokens(numbers["tokens"], sampled, tokens)
    return {
        "whole": analysis.Whole(norm=numbers["whole"], num_tokens=int(tokens.mask.sum())),
        "closure": numbers["closure"],
        "quartiles": tuple(_quartile(number, numbers, tokens, sampled_tokens) for number in range(NUM_QUARTILES)),
        "tokens": sampled_tokens,
        "rank_correlation": _correlations(sampled_tokens),
        "updates": updates,
        "optimizer": analysis.Optimizer(name=numbers["optimizer"], learning_rate=numbers["learning_rate"]),
    }


def _changes(by_rank: list[QuartileNumbers], shape: tuple[int, ...]) -> Changes:
    before = _probabilities(by_rank, "before", shape)
    changes: Changes = {}
    for name in UPDATES:
        is_taken = by_rank[0]["log_probs"][name] is not None
        changes[name] = _probabilities(by_rank, name, shape) - before if is_taken else None
    return changes


def _probabilities(by_rank: list[QuartileNumbers], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return every token's probability before or after an update, float64 (R, T)."""
    log_prob = np.zeros(shape)
    for numbers in by_rank:
        rows = [row for micro_batch in numbers["log_probs"][name] or () for row in micro_batch]
        for number, values in zip(numbers["rows"], rows, strict=False):
            if number >= 0:  # not one that fills a batch up
                log_prob[number, : len(values)] = values
    return np.exp(log_prob)


def _sampled_tokens(norms: list[dict[str, float | None]], places: np.ndarray, tokens: _Tokens) -> Sampled:
    return tuple(
        analysis.SampledToken(
            row=row,
            position=position,
            token_id=int(tokens.token_id[row, position]),
            quartile=int(tokens.quartile[row, position]) + 1,
            probability=float(tokens.probability[row, position]),
            advantage=float(tokens.advantage[row, position]),
            **token_norms,
        )
        for (row, position), token_norms in zip(places.tolist(), norms, strict=True)
    )


def _correlations(tokens: Sampled) -> analysis.Correlations:
    """Correlate each norm of the sampled tokens with how improbable they are."""

    def correlated(name: str) -> float | None:
        pairs = [(1.0 - token.probability, getattr(token, name)) for token in tokens]
        known = [pair for pair in pairs if pair[1] is not None]
        return rank_correlation(*np.array(known).reshape(-1, 2).T)

    return analysis.Correlations(log_prob_norm=correlated("log_prob_norm"), loss_norm=correlated("loss_norm"))


def _quartile(number: int, numbers: QuartileNumbers, tokens: _Tokens, sampled: Sampled) -> analysis.Quartile:
    norm, dot, whole = numbers["norms"][number], numbers["dots"][number], numbers["whole"]
    inside, num_tokens = tokens.quartile == number, int(tokens.mask.sum())
    count, probability = int(inside.sum()), tokens.probability[inside]
    own_sample = [token for token in sampled if token.quartile == number + 1]
    log_prob_norms = [token.log_prob_norm for token in own_sample if token.log_prob_norm is not None]
    ends = {name: _or_none(getattr(np, name), probability) for name in ("min", "mean", "max")}
    return analysis.Quartile(
        name=analysis.QUARTILES[number],
        num_tokens=count,
        token_share=count / num_tokens if num_tokens else None,
        probability=analysis.Range(**ends) if count else None,
        one_minus_probability=_or_none(np.mean, 1.0 - probability),
        mean_abs_advantage=_or_none(np.mean, np.abs(tokens.advantage[inside])),
        norm=norm,
        norm_per_token=norm / count if count else None,
        gradient_share=dot / whole**2 if whole != 0 else None,
        cosine=dot / (norm * whole) if norm * whole != 0 else None,
        sampled=len(own_sample),
        mean_log_prob_norm=_or_none(np.mean, log_prob_norms),
        median_log_prob_norm=_or_none(np.median, log_prob_norms),
        mean_loss_norm=_or_none(np.mean, [token.loss_norm for token in own_sample]),
    )


def _or_none(function: Callable[..., Any], values: Sequence[float] | np.ndarray) -> float | None:
    return float(function(values)) if len(values) else None


def _moved(changes: Changes, name: str, tokens: _Tokens) -> analysis.Moved | None:
    """Return the movement of the tokens in the update of this name; None where no step was taken."""
    change, whole, mask = changes[name], changes["all"], tokens.mask
    if change is None:
        return None
    edges = change_edges([other[mask] for other in changes.values() if other is not None])
    by_quartile = (tokens.quartile == number for number in range(NUM_QUARTILES))
    return analysis.Moved(
        edges=tuple(edges),
        quartiles=tuple(distribution(change[inside], tokens.advantage[inside], edges) for inside in by_quartile),
        agreement=None if whole is None else agreement(change[mask], whole[mask]),
    )


def quartile_metrics(record: analysis.QuartileAnalysis) -> dict[str, float]:
    """Return the record's scalars, for any tracker; undefined ones are left out."""
    prefix = "quartile_analysis"
    metrics: dict[str, float | None] = {
        f"{prefix}/all/norm": record.whole.norm,
        f"{prefix}/closure": record.closure,
        f"{prefix}/passes": record.cost.backwards,
        f"{prefix}/rank_correlation/log_prob_norm": record.rank_correlation.log_prob_norm,
        f"{prefix}/rank_correlation/loss_norm": record.rank_correlation.loss_norm,
    }
    sizes = ("token_share", "one_minus_probability", "norm", "norm_per_token")
    names = (*sizes, "gradient_share", "mean_log_prob_norm", "mean_loss_norm")
    for quartile in record.quartiles:
        metrics.update({f"{prefix}/{quartile.name}/{name}": getattr(quartile, name) for name in names})
    for name, update in record.updates.items():
        if update is None or update.changes is None:
            continue
        metrics[f"{prefix}/update_{name}/norm"] = update.update_norm
        for quartile, change in zip(record.quartiles, update.changes.quartiles, strict=True):
            if change is not None:
                metrics[f"{prefix}/update_{name}/change_{quartile.name}"] = change.mean_abs
        own = update.own_changes
        if name in ("lowest", "highest") and own is not None and own.agreement is not None:
            metrics[f"{prefix}/update_{name}/agreement"] = own.agreement.correlation
            metrics[f"{prefix}/update_{name}/size"] = own.agreement.ratio
    return {name: float(value) for name, value in metrics.items() if value is not None}
