# SPDX-License-Identifier: Apache-2.0
"""Recover the loss's derivative by each position's logits from the gradient of the last hidden state.

With logits z = W h the chain rule gives dL/dh = W' dL/dz. If the loss is made of log-probs, entropies, mean log-probs
(label smoothing) and log-sum-exps (a z-loss), dL/dz is a combination of four vectors that z alone determines, with one
number for each. Least squares find these numbers, and their residual says whether the loss has that form.

Shapes: N positions, V vocabulary, H hidden size, K = 4 + E parts, E outputs of further small heads.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..core.fp32_head import precise_linear

SMALL = 32
"""Outputs of a head up to which dL/dz is found as a whole, by the pseudo-inverse."""
_CHUNK = 2**24  # logits in float32 at a time: 64 MiB
_WEIGHT_ROWS = 4096  # rows of a head's weight that are cast to float32 at a time
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 5e-3}
"""Residual over the norm of dL/dh below which a position has the form; half precision rounds dL/dh itself."""


def rounding(dtype: torch.dtype) -> float:
    """Return the relative residual that is rounding alone, for a model that computes in this precision."""
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.float32])


class Potentials(NamedTuple):
    """The four numbers of each position that a loss of the form is made of, float32 (N,)."""

    log_prob: torch.Tensor
    """The label's log-prob."""
    entropy: torch.Tensor
    """The entropy, in nats."""
    mean_log_prob: torch.Tensor
    """Over the vocabulary."""
    log_sum_exp: torch.Tensor


def potentials(logits: torch.Tensor, labels: torch.Tensor) -> Potentials:
    """Return a loss's parts from logits (N, V) in float32 and labels (N,)."""
    log_sum_exp = logits.logsumexp(-1)
    log_probs = logits - log_sum_exp.unsqueeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    own = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return Potentials(own, entropy, log_probs.mean(-1), log_sum_exp)


def logit_gradient(logits: torch.Tensor, labels: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """Return dL/dz (N, V), in float32, of a loss whose derivatives by :class:`Potentials` are ``parts`` (N, K)."""
    by_log_prob, by_entropy, by_mean, by_log_sum_exp = parts[:, :4].unsqueeze(-1).unbind(1)
    log_probs = logits.float().log_softmax(-1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs).sum(-1, keepdim=True)
    common = by_log_sum_exp - by_log_prob - by_mean - by_entropy * (log_probs + entropy)
    found = probs * common + by_mean / logits.shape[-1]
    return found.scatter_add_(-1, labels.unsqueeze(-1), by_log_prob)


def logit_gradients(logits: torch.Tensor, labels: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """Return :func:`logit_gradient` of logits (..., V), in their own shape and dtype."""
    rows = logits.reshape(-1, logits.shape[-1])
    out = torch.empty_like(rows)
    for at in chunks(len(rows), rows.shape[-1]):
        out[at] = logit_gradient(rows[at], labels[at], parts[at]).to(out.dtype)
    return out.view_as(logits)


class Fit(NamedTuple):
    """The recovered parts of the loss at each position."""

    labels: torch.Tensor
    """The given labels, and where these do not fit the token that fits best, (N,)."""
    parts: torch.Tensor
    """dL / d potential, float32 (N, K)."""
    residual: torch.Tensor
    """L2 norm of the residual of dL/dh, (N,)."""
    log_prob: torch.Tensor
    """The label's log-prob, float32 (N,)."""
    rank: torch.Tensor
    """The number of tokens that are likelier than the label, (N,)."""
    neighbours: torch.Tensor
    """Log-probs of other tokens, (N, 2)."""


def fit(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    pulls: torch.Tensor,
    tolerance: float,
    neighbours: torch.Tensor,
    further: torch.Tensor | None,
) -> Fit:
    """Recover the parts of a loss from dL/dh. Runs without a graph; takes the memory of a few times N x V numbers.

    The fewest parts that fit are taken: a log-prob alone, with an entropy, all four, all.

    Args:
        hidden: (N, H) last hidden states, as training had them.
        weight: (V, H) of the head.
        bias: (V,), or None.
        labels: (N,) token ids, as far as they are known: where they do not fit, the token that does is found.
        pulls: (N, H) dL/dh.
        tolerance: residual over the norm of dL/dh at which a position fits.
        neighbours: (N, 2) other tokens whose log-probs are wanted.
        further: (E, H) rows of heads with few outputs, whose dL/dz are the parts from the fifth on; None without any.
    """
    pull = pulls.float()
    logits = precise_linear(hidden, weight, bias)
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs).sum(-1, keepdim=True)
    expected, mean = matmul(probs, weight), weight.float().mean(0)
    tilted = matmul(probs * (log_probs + entropy), weight)

    def solved(labels: torch.Tensor, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own = weight[labels].float() - expected[rows]
        columns = torch.stack([own, -tilted[rows], mean - expected[rows], expected[rows]], -1)
        if further is not None:
            columns = torch.cat([columns, further.float().T.expand(len(columns), -1, -1)], -1)
        return _solve(columns, pull[rows], tolerance, _choices(columns.shape[2]))

    labels = labels.clamp(0, len(weight) - 1)
    parts, residual = solved(labels, slice(None))
    bad = (residual > tolerance * pull.norm(dim=-1)).nonzero().squeeze(-1)
    if len(bad):  # such as the last position, whose label the model was not given
        best = _likeliest(pull[bad], expected[bad], weight, further)
        again, left = solved(best, bad)
        better = left < residual[bad]
        rows = bad[better]
        labels = labels.clone()
        labels[rows], parts[rows], residual[rows] = best[better], again[better], left[better]
    log_prob = potentials(logits, labels).log_prob
    rank = (logits > logits.gather(-1, labels.unsqueeze(-1))).sum(-1)
    moved = log_probs.gather(-1, neighbours.clamp(0, len(weight) - 1))
    return Fit(labels, parts, residual, log_prob, rank, moved)


def _likeliest(
    pull: torch.Tensor, expected: torch.Tensor, weight: torch.Tensor, further: torch.Tensor | None
) -> torch.Tensor:
    """Return the label whose log-prob's derivative by h has the direction of dL/dh, or the opposite: (N,).

    Directions along further heads' rows count as none.
    """

    def across(rows: torch.Tensor) -> torch.Tensor:
        return rows if along is None else rows - (rows @ along) @ along.T

    along = None if further is None else torch.linalg.qr(further.float().T).Q
    best, labels = pull.new_full((len(pull),), -1.0), torch.zeros(len(pull), dtype=torch.long, device=pull.device)
    pull, expected = across(pull), across(expected)
    for first in range(0, len(weight), _WEIGHT_ROWS):
        rows = across(weight[first : first + _WEIGHT_ROWS].float())
        aligned = pull @ rows.T - (pull * expected).sum(-1, keepdim=True)
        square = rows.square().sum(-1) - 2 * expected @ rows.T + expected.square().sum(-1, keepdim=True)
        cosine, index = (aligned.abs() * square.clamp(min=1e-20).rsqrt()).nan_to_num().max(-1)
        labels = torch.where(cosine > best, index + first, labels)
        best = torch.maximum(cosine, best)
    return labels


def fit_small(pulls: torch.Tensor, rows: torch.Tensor, tolerance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dL/dz (N, E) of heads with rows (E, H) and no more outputs than H, and the residual (N,)."""
    columns = rows.float().T.expand(len(pulls), -1, -1)
    return _solve(columns, pulls.float(), tolerance, [[*range(columns.shape[2])]])


def chunks(count: int, width: int) -> Iterator[slice]:
    """Yield slices of the positions, so short that a slice's logits in float32 stay small."""
    most = max(_CHUNK // max(width, 1), 1)
    for first in range(0, max(count, 1), most):
        yield slice(first, first + most)


def typical_size(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the median norm of d log_prob / dh at these positions (N, H), of arbitrary labels: a scalar."""
    labels = torch.arange(len(hidden), device=hidden.device) % len(weight)
    expected = matmul(precise_linear(hidden, weight, bias).softmax(-1), weight)
    return (weight[labels].float() - expected).norm(dim=-1).median()


def matmul(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply (N, V) in float32 by a weight (V, H) of any precision, some rows of it at a time."""
    out = values.new_zeros(len(values), weight.shape[1])
    for first in range(0, len(weight), _WEIGHT_ROWS):
        out.addmm_(values[:, first : first + _WEIGHT_ROWS], weight[first : first + _WEIGHT_ROWS].float())
    return out


def _choices(count: int) -> list[list[int]]:
    """Return the columns to be tried, the fewest first: a log-prob and an entropy, further heads, the other two."""
    further = [*range(4, count)]
    if not further:
        return [[0], [0, 1], [0, 1, 2, 3]]
    return [[0], [0, 1], [0, *further], [0, 1, *further], [0, 1, 2, 3], [*range(count)]]


def _solve(
    columns: torch.Tensor, pull: torch.Tensor, tolerance: float, choices: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve least squares of (N, H, K) against (N, H), with the first choice of columns that fits."""
    sizes = columns.norm(dim=1, keepdim=True).clamp(min=1e-30)
    unit = (columns / sizes).double()
    target = pull.double()
    length = target.norm(dim=1)
    parts = torch.zeros(columns.shape[0], columns.shape[2], dtype=torch.float64, device=columns.device)
    residual, is_open = length.clone(), length > 0
    for chosen in choices:
        basis = unit[..., chosen]
        gram, right = basis.mT @ basis, (basis.mT @ target.unsqueeze(-1))
        solved = (torch.linalg.pinv(gram.nan_to_num(), rtol=1e-6, hermitian=True) @ right).squeeze(-1)
        left = (target - (basis @ solved.unsqueeze(-1)).squeeze(-1)).norm(dim=1)
        better = is_open & (left < residual)
        found = torch.zeros_like(parts)
        found[:, chosen] = solved / sizes.squeeze(1)[:, chosen].double()
        parts = torch.where(better.unsqueeze(1), found, parts)
        residual = torch.where(better, left, residual)
        is_open = is_open & ~(residual <= tolerance * length)
    parts[~length.isfinite()] = torch.nan
    return parts.float(), residual.float()
