# SPDX-License-Identifier: Apache-2.0
"""Statistics of two columns of log-probs, by token, row and batch, that separate the kinds of disagreement."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .columns import Columns, Floats

Numbers = dict[str, float]
LAGS = (-1, 1, -2, 2, -3, 3)
LEAST_Q = 0.02
"""The 1 - p below which the noise of a log-prob stops being in proportion to 1 - p."""
UNSURE = 0.1
"""Tokens with a larger 1 - p have noise that says how exact the kernels are."""
FEWEST_SURE = 50
"""Sure tokens that the slope of two columns' log-odds needs."""
EARLY = 16
"""Places of a row in which an old cache shows most."""


class Tokens:
    """Columns of N tokens in R rows, and what every look needs of them.

    Attributes:
        d: (N,) a - b, nats; 0 where one is not known.
        q: (N,) 1 - p, p the geometric mean of the two probabilities.
        z: (N,) d / q: the difference of the logits, roughly.
        scale: spread of z where q is large: 1.48 times its median size, nats.
        row: (N,) 0 to R - 1, with no number left out.
        next: (N - 1,) whether a token's successor in the columns is its successor in the row.
    """

    def __init__(self, columns: Columns):
        self.columns = columns
        self.d = np.nan_to_num(columns.difference, nan=0.0, posinf=0.0, neginf=0.0)
        self.middle = np.nan_to_num((columns.trainer + columns.rollout) / 2, nan=-1.0, posinf=0.0, neginf=-50.0)
        self.q = -np.expm1(np.minimum(self.middle, 0))
        self.z = self.d / np.maximum(self.q, LEAST_Q)
        unsure = self.q > UNSURE
        sizes = np.abs(self.z[unsure] if unsure.sum() >= 50 else self.z)
        self.scale = 1.4826 * float(np.median(sizes)) if len(sizes) else 0.0
        is_same = columns.row[1:] == columns.row[:-1]
        self.row = np.concatenate([[0], np.cumsum(~is_same)])[: len(self.d)]
        self.next = is_same & (columns.place[1:] == columns.place[:-1] + 1)

    def beyond(self, noise: float) -> NDArray:
        """Return tokens (N,) that differ by far more than logits' noise of this size, nats, explains, and by 0.2
        nats.
        """
        return (np.abs(self.z) > 8 * noise) & (np.abs(self.d) > 0.2)

    def __len__(self) -> int:
        return len(self.d)


def partners(columns: Columns, lag: int) -> NDArray:
    """Return the token (N,) that many places on in the same row; -1 where there is none, or the mask leaves it out."""
    key = columns.row * (1 << 32) + columns.place
    there = np.minimum(np.searchsorted(key, key + lag), len(key) - 1)
    return np.where(key[there] == key + lag, there, -1)


def moves(tokens: Tokens) -> tuple[NDArray, NDArray]:
    """Return the lag (N,) at which each token's stretch of its row agrees, 0 where it does unmoved, and for each row
    (R,) by how much. Ranks are compared, so that a temperature or a cut sampler on top does no harm."""
    columns, row = tokens.columns, tokens.row
    a, b = (ranks(column) / len(column) for column in (columns.trainer, columns.rollout))
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    at, most, found = np.arange(len(row)), np.zeros(len(starts)), np.zeros(len(row), int)
    for lag in LAGS:
        there = partners(columns, lag)
        heals = np.where(there >= 0, np.abs(a - b) - np.abs(a - b[there]), 0.0)
        after = np.cumsum(heals) - row * len(row)  # no row's is as large as its predecessor's
        before = after - heals
        least = np.minimum.accumulate(before)
        best = np.maximum.reduceat(after - least, starts)
        end = np.maximum.reduceat(np.where(after - least == best[row], at, -1), starts)
        begin = np.maximum.reduceat(np.where((before == least[end][row]) & (at <= end[row]), at, -1), starts)
        is_better = (best > most)[row]
        found[is_better] = np.where((at >= begin[row]) & (at <= end[row]), lag, 0)[is_better]
        most = np.maximum(most, best)
    return found, most


def row_scales(tokens: Tokens, kept: NDArray) -> Floats:
    """Return the size of z that 70 % of a row's kept tokens stay below (R,): single tokens do not rule it."""
    label, z = tokens.row[kept], np.abs(tokens.z[kept])
    order = np.lexsort((z, label))
    counts = np.bincount(label, minlength=int(tokens.row[-1]) + 1)
    at = np.cumsum(counts) - counts + (0.7 * np.maximum(counts - 1, 0)).astype(int)
    return np.where(counts > 0, z[order][np.minimum(at, len(order) - 1)], 0.0)


def unevenness(tokens: Tokens) -> Numbers:
    """Return how much the rows' mean sizes of z around its median differ, relative to their mean, beyond the chance of
    independent tokens; and in standard errors. ``prompts``: the same between prompts, where they are known, of d less
    its mean over three other tokens of the same id or more: other weights and a sampler that cuts do to an id alike in
    all rows, another prompt does not.
    """
    found = _uneven("uneven", tokens.z - np.median(tokens.z), tokens.row)
    columns = tokens.columns
    if columns.ids is None:
        return found
    d, labels = np.clip(tokens.d, -6, 6), np.unique(columns.ids, return_inverse=True)[1]
    others = np.bincount(labels)[labels] - 1
    kept = others >= 3
    if kept.sum() < 50:
        return found
    rest = d - (np.bincount(labels, d)[labels] - d) / np.maximum(others, 1)
    prompt = tokens.row if columns.group is None else columns.group
    return found | _uneven("prompts", rest[kept], np.unique(prompt[kept], return_inverse=True)[1])


def _uneven(name: str, values: Floats, row: NDArray) -> Numbers:
    values, counts = np.abs(values), np.bincount(row)
    means, free = np.bincount(row, values) / counts, max(len(counts) - 1, 1)
    within = ((values - means[row]) ** 2).sum() / max(len(row) - len(counts), 1)
    more = (counts * (means - values.mean()) ** 2).sum() / free - within
    size = float(np.sqrt(max(more, 0.0) / counts.mean()) / max(values.mean(), 1e-30))
    return {name: size, f"{name}_sigma": float(more / max(within, 1e-30) * np.sqrt(free / 2))}


def ranks(values: Floats) -> Floats:
    """0 to N - 1 (N,), of the least first."""
    found = np.empty(len(values))
    found[np.argsort(values, kind="stable")] = np.arange(len(values))
    return found


def correlation(x: Floats, y: Floats) -> float:
    """Pearson's; 0 where one does not vary."""
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 7 and np.ptp(x) > 0 and np.ptp(y) > 0 else 0.0


def layouts(tokens: Tokens, scales: Floats) -> Numbers:
    """Return how closely the rows' ``scales`` (R,) follow what padding or packing would do to them: correlations of
    logs with a row's length, its prompt's, how much shorter that is than the longest of a micro-batch, its place in a
    pack.
    """
    columns = tokens.columns
    first = np.flatnonzero(np.diff(tokens.row, prepend=-1))
    known = {"length": np.bincount(tokens.row).astype(float)}
    order = columns.order[first]
    for size in range(2, 9):
        known[f"place_in_packs_of_{size}"] = (order % size > 0).astype(float)
    if columns.prompt is not None:
        prompt = known["prompt_length"] = columns.prompt[first].astype(float)
        for size in (2, 4, 8, 16, 32):
            longest = np.zeros(order.max() // size + 1)
            np.maximum.at(longest, order // size, prompt)
            known[f"padding_in_batches_of_{size}"] = longest[order // size] - prompt
    return {name: correlation(np.log(scales), np.log1p(values)) for name, values in known.items()}


def temperature(tokens: Tokens) -> Numbers:
    """Temperatures' ratio: at sure tokens log((1 - p) / p) is in proportion to 1 / temperature.

    Returns:
        ``slope``: of the rollout's over the trainer's, by the ratio of the spreads, which noise in both leaves alone;
        ``r`` their correlation, ``error`` the slope's standard error, ``slope_tokens`` how many were used; ``along``:
        the correlation of d with the mean of the two log-probs, over all tokens: another temperature moves likely and
        unlikely tokens apart, also where no token is sure.
    """
    d = np.clip(tokens.d, *np.quantile(tokens.d, (0.01, 0.99)))
    a, b = (np.minimum(column, -1e-12) for column in (tokens.columns.trainer, tokens.columns.rollout))
    used = (tokens.q > 1e-3) & (tokens.q < 0.6) & np.isfinite(a + b)
    found = {"slope": 1.0, "r": 0.0, "error": 1.0, "slope_tokens": float(used.sum())}
    found["along"] = correlation(d, tokens.middle)
    low = tokens.middle <= np.quantile(tokens.middle, 0.1)
    spreads = [
        max(float(np.std(column[part])), 1e-12) if part.any() else np.nan for part in (low, ~low) for column in (a, b)
    ]
    found["bend"] = float(np.log(spreads[0] / spreads[1]) - np.log(spreads[2] / spreads[3]))
    if used.sum() >= FEWEST_SURE:
        x, y = (np.log(-np.expm1(column[used])) - column[used] for column in (a, b))
        found["r"], found["slope"] = correlation(x, y), float(np.std(y) / max(np.std(x), 1e-12))
        found["error"] = found["slope"] * float(np.sqrt(max(1 - found["r"] ** 2, 0) / used.sum()))
    return found


def dependence(tokens: Tokens) -> Numbers:
    """Return whether differences come from something that stays, as weights do: noise is drawn anew at each token.

    Returns:
        ``neighbours``: the correlation of z at places next to one another; ``by_id``: the share of its variance that
        the token's id explains (0 without ids); each with ``_sigma``, in standard errors under independence.
    """
    z = np.clip(tokens.z, -6 * tokens.scale, 6 * tokens.scale)
    square = max(float((z**2).mean()), 1e-30)
    neighbours = float((z[1:] * z[:-1])[tokens.next].mean() / square) if tokens.next.any() else 0.0
    found = {"neighbours": neighbours, "neighbours_sigma": neighbours * float(np.sqrt(tokens.next.sum()))}
    if tokens.columns.ids is not None:
        labels = np.unique(tokens.columns.ids, return_inverse=True)[1]
        counts = np.bincount(labels)
        often = counts >= 4
        between = float((np.bincount(labels, z)[often] ** 2 / counts[often]).sum())
        whole = float(np.bincount(labels, z**2)[often].sum())
        expected = max(whole * often.sum() / max(counts[often].sum(), 1), 1e-30)
        if often.sum() >= 10:
            found["by_id"] = (between - expected) / max(whole, 1e-30)
            found["by_id_sigma"] = (between / expected - 1) * float(np.sqrt(often.sum() / 2))
    return found


def identity(d: Floats) -> Numbers:
    """Return what holds of tokens that were sampled from the rollout's column.

    Returns:
        ``mean_ratio``: of exp(d), which is 1, with ``ratio_error``, its standard error. A ratio counts as at most e^20.
        ``kl``: the mean of exp(d) - 1 - d, the k3 estimate, nats a token.
        ``tilt``, in [-1, 1]: the mean of exp(d/2) times d, clipped at its spread, over that of its size; and
        ``tilt_sigma``, in standard errors. It is 0 where the trainer's own tokens would differ as much the other way,
        as between two sets of weights: f(-d) = exp(d) f(d) makes exp(d/2) f(d) even. It varies far less than the mean
        ratio. A sampler that cuts makes it -1.
    """
    d = np.clip(d, -50, 20)
    ratio = np.exp(d)
    spread = max(float(np.sqrt(np.mean(np.clip(d, -3, 3) ** 2))), 1e-12)
    tilted = np.exp(d / 2) * np.clip(d / spread, -1, 1)
    return {
        "mean_ratio": float(ratio.mean()),
        "ratio_error": float(ratio.std() / np.sqrt(len(ratio))),
        "kl": float(np.mean(ratio - 1 - d)),
        "tilt": float(tilted.mean() / max(np.abs(tilted).mean(), 1e-12)),
        "tilt_sigma": float(tilted.mean() / max(tilted.std() / np.sqrt(len(d)), 1e-12)),
    }
