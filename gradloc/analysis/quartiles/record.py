# SPDX-License-Identifier: Apache-2.0
"""From what the ranks found to the record of a quartile analysis and its metrics. Pure.

Three measures of a quartile's gradient are told apart, because each alone misleads. The *norm* of its part: what the
optimizer would get if only its tokens were updated (panel (d) of Fig. 1 of arXiv 2505.12929); it grows with the number
of tokens, and tokens may cancel. Its *share*, ``<part, whole> / ||whole||^2``: what it contributes to the update's
direction; shares add up to 1. And the mean norm of *single tokens'* gradients, which nothing cancels.

Shapes: R rows of the batch, T response positions, S sampled tokens.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...record.analysis import (
    QUARTILES,
    Change,
    Correlations,
    Moved,
    Optimizer,
    Quartile,
    QuartileAnalysis,
    Range,
    SampledToken,
    Update,
    Whole,
)
from .probe import QuartileNumbers
from .split import EMPTY, NUM_QUARTILES, UPDATES, agreement, change_edges, distribution, rank_correlation


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
    found: list[QuartileNumbers], batch: dict[str, np.ndarray], quartiles: np.ndarray, sampled: np.ndarray
) -> dict[str, Any]:
    """The fields of :class:`~...record.analysis.QuartileAnalysis` that the workers' numbers make up.

    Args:
        found: what each rank found, by rank.
        batch: ``old_log_probs``, ``advantages`` and ``responses``, each (R, T).
        quartiles: (R, T), from :func:`~.split.assign`.
        sampled: (S, 2), rows and positions.
    """
    raw = found[0]
    probability = np.exp(batch["old_log_probs"].astype(np.float64))
    everything = _Tokens(quartiles, probability, batch["advantages"], batch["responses"])
    changes = _changes([record["log_probs"] for record in found], len(quartiles))
    none = changes["none"]
    owns = {name: None if change is None or none is None else change - none for name, change in changes.items()}
    tokens = _sampled(raw["tokens"], sampled, everything)

    def update(name: str, step: dict[str, Any]) -> Update:
        return Update(**step, changes=_moved(changes, name, everything), own_changes=_moved(owns, name, everything))

    return {
        "whole": Whole(norm=raw["whole"], num_tokens=int(everything.mask.sum())),
        "closure": raw["closure"],
        "quartiles": tuple(_quartile(number, raw, everything, tokens) for number in range(NUM_QUARTILES)),
        "tokens": tokens,
        "rank_correlation": _relation(tokens),
        "updates": {name: None if step is None else update(name, step) for name, step in raw["steps"].items()},
        "optimizer": Optimizer(name=raw["optimizer"], learning_rate=raw["learning_rate"]),
    }


def _changes(log_probs: list[dict[str, np.ndarray | None]], num_rows: int) -> dict[str, np.ndarray | None]:
    """By update, how every token's probability changed, float64 (R, T); None where no step was taken."""

    def whole(name: str) -> np.ndarray:
        rows = np.concatenate([found[name] for found in log_probs])[:num_rows]  # filling rows come last
        return np.exp(rows.astype(np.float64))

    before = whole("before")
    return {name: None if log_probs[0][name] is None else whole(name) - before for name in UPDATES}


def _sampled(numbers: list[dict[str, float]], places: np.ndarray, tokens: _Tokens) -> tuple[SampledToken, ...]:
    """What is known of each sampled token."""
    return tuple(
        SampledToken(
            row=row,
            position=position,
            token_id=int(tokens.token_id[row, position]),
            quartile=int(tokens.quartile[row, position]) + 1,
            probability=float(tokens.probability[row, position]),
            advantage=float(tokens.advantage[row, position]),
            **norms,
        )
        for (row, position), norms in zip(places.tolist(), numbers, strict=True)
    )


def _relation(tokens: tuple[SampledToken, ...]) -> Correlations:
    distance = np.array([1.0 - token.probability for token in tokens])
    return Correlations(
        log_prob_norm=rank_correlation(distance, np.array([token.log_prob_norm for token in tokens])),
        loss_norm=rank_correlation(distance, np.array([token.loss_norm for token in tokens])),
    )


def _quartile(number: int, raw: QuartileNumbers, tokens: _Tokens, sampled: tuple[SampledToken, ...]) -> Quartile:
    inside, num_tokens = tokens.quartile == number, int(tokens.mask.sum())
    count, norm, dot, whole = int(inside.sum()), raw["norms"][number], raw["dots"][number], raw["whole"]
    inner, mine = tokens.probability[inside], [token for token in sampled if token.quartile == number + 1]
    return Quartile(
        name=QUARTILES[number],
        num_tokens=count,
        token_share=count / num_tokens if num_tokens else None,
        probability=_range(inner),
        one_minus_probability=float((1.0 - inner).mean()) if count else None,
        mean_abs_advantage=float(np.abs(tokens.advantage[inside]).mean()) if count else None,
        norm=norm,
        norm_per_token=norm / count if count else None,
        gradient_share=dot / whole**2 if whole != 0 else None,
        cosine=dot / (norm * whole) if norm * whole != 0 else None,
        sampled=len(mine),
        mean_log_prob_norm=_mean([token.log_prob_norm for token in mine]),
        median_log_prob_norm=_median([token.log_prob_norm for token in mine]),
        mean_loss_norm=_mean([token.loss_norm for token in mine]),
    )


def _range(values: np.ndarray) -> Range | None:
    if not len(values):
        return None
    return Range(min=float(values.min()), mean=float(values.mean()), max=float(values.max()))


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _median(values: list[float]) -> float | None:
    return float(np.median(values)) if values else None


def _moved(changes: dict[str, np.ndarray | None], name: str, tokens: _Tokens) -> Moved | None:
    """How the tokens moved in the update of this name; None where no step was taken.

    Args:
        changes: by update, (R, T).
    """
    change, mask = changes[name], tokens.mask
    if change is None:
        return None
    edges = change_edges([found[mask] for found in changes.values() if found is not None])
    whole = changes["all"]
    by_quartile = (tokens.quartile == number for number in range(NUM_QUARTILES))
    return Moved(
        edges=tuple(edges),
        quartiles=tuple(_change(change[inside], tokens.advantage[inside], edges) for inside in by_quartile),
        agreement=None if whole is None else agreement(change[mask], whole[mask]),
    )


def _change(change: np.ndarray, advantages: np.ndarray, edges: list[float]) -> Change | None:
    """How a quartile's tokens moved, both (N,); None without tokens."""
    found = distribution(change, edges)
    if found is None:
        return None
    counts = advantages != 0
    follows = np.sign(change[counts]) == np.sign(advantages[counts])
    return replace(found, right_way=float(follows.mean()) if len(follows) else None)


def quartile_metrics(record: QuartileAnalysis) -> dict[str, float]:
    """The record's scalars, for any tracker; what is undefined is left out."""
    at = "quartile_analysis"
    metrics: dict[str, float | None] = {
        f"{at}/all/norm": record.whole.norm,
        f"{at}/closure": record.closure,
        f"{at}/passes": record.cost.backwards,
        f"{at}/rank_correlation/log_prob_norm": record.rank_correlation.log_prob_norm,
        f"{at}/rank_correlation/loss_norm": record.rank_correlation.loss_norm,
    }
    names = (
        "token_share",
        "one_minus_probability",
        "norm",
        "norm_per_token",
        "gradient_share",
        "mean_log_prob_norm",
        "mean_loss_norm",
    )
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
