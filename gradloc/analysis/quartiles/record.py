# SPDX-License-Identifier: Apache-2.0
"""From the ranks' numbers to the record of a quartile analysis and its metrics. Pure.

Three measures of a quartile's gradient are told apart, because each alone misleads. The *norm* of its part: what the
optimizer would get if only its tokens were updated (panel (d) of Fig. 1 of arXiv 2505.12929); it grows with the number
of tokens, and tokens may cancel. Its *share*, ``<part, whole> / ||whole||^2``: what it contributes to the update's
direction; shares add up to 1. And the mean norm of *single tokens'* gradients, where nothing cancels.

Shapes: R rows of the batch, T response positions, S sampled tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...record import analysis
from .probe import QuartileNumbers
from .split import EMPTY, NUM_QUARTILES, UPDATES, agreement, change_edges, distribution, rank_correlation

Sampled = tuple[analysis.SampledToken, ...]
Changes = dict[str, np.ndarray | None]
"""By update, how every token's probability changed, float64 (R, T); None where no step was taken."""


@dataclass(frozen=True)
class _Tokens:
    """The batch's tokens, (R, T) each."""

    quartile: np.ndarray
    """``EMPTY`` for what is no response token."""
    probability: np.ndarray
    """Before the update."""
    advantage: np.ndarray
    token_id: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        return self.quartile != EMPTY


def measured(
    ranks: list[QuartileNumbers], batch: dict[str, np.ndarray], quartiles: np.ndarray, sampled: np.ndarray
) -> dict[str, Any]:
    """The fields of :class:`~...record.analysis.QuartileAnalysis` that the workers' numbers make up.

    Args:
        ranks: each rank's numbers.
        batch: ``old_log_probs``, ``advantages`` and ``responses``, each (R, T).
        quartiles: (R, T), from :func:`~.split.assign`.
        sampled: (S, 2), rows and positions.
    """
    numbers = ranks[0]
    probability = np.exp(batch["old_log_probs"].astype(np.float64))
    everything = _Tokens(quartiles, probability, batch["advantages"], batch["responses"])
    changes = _changes([rank["log_probs"] for rank in ranks], len(quartiles))
    without = changes["none"]
    own = {name: None if change is None or without is None else change - without for name, change in changes.items()}
    tokens = _sampled_tokens(numbers["tokens"], sampled, everything)

    def update(name: str, step: analysis.Update) -> analysis.Update:
        return replace(step, changes=_moved(changes, name, everything), own_changes=_moved(own, name, everything))

    return {
        "whole": analysis.Whole(norm=numbers["whole"], num_tokens=int(everything.mask.sum())),
        "closure": numbers["closure"],
        "quartiles": tuple(_quartile(number, numbers, everything, tokens) for number in range(NUM_QUARTILES)),
        "tokens": tokens,
        "rank_correlation": _relation(tokens),
        "updates": {name: None if step is None else update(name, step) for name, step in numbers["steps"].items()},
        "optimizer": analysis.Optimizer(name=numbers["optimizer"], learning_rate=numbers["learning_rate"]),
    }


def _changes(log_probs: list[Changes], num_rows: int) -> Changes:
    def probability(name: str) -> np.ndarray:
        rows = np.concatenate([one_rank[name] for one_rank in log_probs])[:num_rows]  # filling rows come last
        return np.exp(rows.astype(np.float64))

    before = probability("before")
    return {name: None if log_probs[0][name] is None else probability(name) - before for name in UPDATES}


def _sampled_tokens(norms: list[dict[str, float]], places: np.ndarray, tokens: _Tokens) -> Sampled:
    return tuple(
        analysis.SampledToken(
            row=row,
            position=position,
            token_id=int(tokens.token_id[row, position]),
            quartile=int(tokens.quartile[row, position]) + 1,
            probability=float(tokens.probability[row, position]),
            advantage=float(tokens.advantage[row, position]),
            **measured,
        )
        for (row, position), measured in zip(places.tolist(), norms, strict=True)
    )


def _relation(tokens: Sampled) -> analysis.Correlations:
    distance = np.array([1.0 - token.probability for token in tokens])
    return analysis.Correlations(
        log_prob_norm=rank_correlation(distance, np.array([token.log_prob_norm for token in tokens])),
        loss_norm=rank_correlation(distance, np.array([token.loss_norm for token in tokens])),
    )


def _quartile(number: int, numbers: QuartileNumbers, tokens: _Tokens, sampled: Sampled) -> analysis.Quartile:
    inside, num_tokens = tokens.quartile == number, int(tokens.mask.sum())
    count, norm, dot, whole = int(inside.sum()), numbers["norms"][number], numbers["dots"][number], numbers["whole"]
    probability, mine = tokens.probability[inside], [token for token in sampled if token.quartile == number + 1]
    ends = {"min": _of(np.min, probability), "mean": _of(np.mean, probability), "max": _of(np.max, probability)}
    log_prob_norms = [token.log_prob_norm for token in mine]
    return analysis.Quartile(
        name=analysis.QUARTILES[number],
        num_tokens=count,
        token_share=count / num_tokens if num_tokens else None,
        probability=analysis.Range(**ends) if count else None,
        one_minus_probability=_of(np.mean, 1.0 - probability),
        mean_abs_advantage=_of(np.mean, np.abs(tokens.advantage[inside])),
        norm=norm,
        norm_per_token=norm / count if count else None,
        gradient_share=dot / whole**2 if whole != 0 else None,
        cosine=dot / (norm * whole) if norm * whole != 0 else None,
        sampled=len(mine),
        mean_log_prob_norm=_of(np.mean, log_prob_norms),
        median_log_prob_norm=_of(np.median, log_prob_norms),
        mean_loss_norm=_of(np.mean, [token.loss_norm for token in mine]),
    )


def _of(function: Callable[..., Any], values: Sequence[float] | np.ndarray) -> float | None:
    return float(function(values)) if len(values) else None


def _moved(changes: Changes, name: str, tokens: _Tokens) -> analysis.Moved | None:
    """How the tokens moved in the update of this name; None where no step was taken."""
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
    """The record's scalars, for any tracker; what is undefined is left out."""
    at = "quartile_analysis"
    metrics: dict[str, float | None] = {
        f"{at}/all/norm": record.whole.norm,
        f"{at}/closure": record.closure,
        f"{at}/passes": record.cost.backwards,
        f"{at}/rank_correlation/log_prob_norm": record.rank_correlation.log_prob_norm,
        f"{at}/rank_correlation/loss_norm": record.rank_correlation.loss_norm,
    }
    sizes = ("token_share", "one_minus_probability", "norm", "norm_per_token")
    names = (*sizes, "gradient_share", "mean_log_prob_norm", "mean_loss_norm")
    for quartile in record.quartiles:
        metrics.update({f"{at}/{quartile.name}/{name}": getattr(quartile, name) for name in names})
    for name, update in record.updates.items():
        if update is None or update.changes is None:
            continue
        metrics[f"{at}/update_{name}/norm"] = update.update_norm
        for quartile, change in zip(record.quartiles, update.changes.quartiles, strict=True):
            if change is not None:
                metrics[f"{at}/update_{name}/change_{quartile.name}"] = change.mean_abs
        own = update.own_changes
        if name in ("lowest", "highest") and own is not None and own.agreement is not None:
            metrics[f"{at}/update_{name}/agreement"] = own.agreement.correlation
            metrics[f"{at}/update_{name}/size"] = own.agreement.ratio
    return {name: float(value) for name, value in metrics.items() if value is not None}
