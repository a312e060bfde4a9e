# SPDX-License-Identifier: Apache-2.0
"""How each log-prob and entropy of the batch enters each term of the loss: the analysis's frozen coefficients.

One forward over the batch, cut into the very micro-batches that training would cut, so that each token keeps the
weight it has there; then training's own loss on the values, whose derivatives are the coefficients. With them the
gradient of any rows' part of any term is the backward of a plain weighted sum, in whatever order the rows are run,
and the parts add up to the training gradient whatever the loss and its aggregation are.

Shapes: R rows on this rank, T response positions, K buckets, C terms of the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .actor import BUCKET_KEY, Actor, MicroBatch, Rows


@dataclass
class Forwarded(MicroBatch):
    """What the model says of a micro-batch."""

    log_prob: torch.Tensor
    entropy: torch.Tensor | None


@dataclass
class Frozen:
    """What is known of this rank's rows once the model has run over them."""

    coefficients: dict[str, torch.Tensor]
    """Per term, (R, T): d (whole batch's loss) / d log_prob, or d entropy for the entropy term, times the ranks that
    the gradient is averaged over."""
    weights: torch.Tensor
    """float64 (K, C): the buckets' shares of the terms' averages; over all ranks they sum to 1 for each term."""
    losses: torch.Tensor
    """float64 (K, C): the buckets' parts of the terms' values; over all ranks they sum to the batch's loss."""


def forward(actor: Actor, rows: Rows) -> list[Forwarded]:
    """Run the model over this rank's rows without a gradient; every rank runs the same number of micro-batches."""
    done = []
    for part in actor.micro_batches(rows):
        with torch.no_grad():
            log_prob, entropy = actor.forward(part.inputs)
        done.append(Forwarded(part.inputs, part.rows, part.on_policy, log_prob, entropy))
    return done


def freeze(
    actor: Actor, forwarded: Sequence[Forwarded], *, num_local: int, num_buckets: int, num_rows: int, dp_size: int
) -> Frozen:
    """Differentiate the loss by the log-probs and entropies; no model runs and no rank waits for another.

    Every micro-batch counts as where the mini-batch is the batch: a last, smaller mini-batch or micro-batch is not
    scaled as if it were full.

    Args:
        actor: supplies the loss.
        forwarded: all micro-batches of this rank.
        num_local: R, rows on this rank, filling ones included.
        num_buckets: K.
        num_rows: rows of the whole batch, filling ones excluded.
        dp_size: ranks that the gradient is averaged over.
    """
    terms = actor.terms
    width = forwarded[0].log_prob.shape[1]
    device = forwarded[0].log_prob.device
    coefficients = {term: torch.zeros(num_local, width, device=device) for term in terms}
    weights = torch.zeros(num_buckets, len(terms), dtype=torch.float64)
    losses = torch.zeros_like(weights)
    for part in forwarded:
        if not len(part.rows):
            continue
        shares = {term: actor.share(part, term, num_rows) for term in terms}
        mask = part.inputs["response_mask"]
        log_prob, entropy = part.log_prob.clone().requires_grad_(), part.entropy
        entropy = None if entropy is None else entropy.clone().requires_grad_()
        by_term = actor.loss_terms(part.inputs, log_prob, entropy, part.on_policy)
        for term in terms:
            (grad,) = torch.autograd.grad(by_term[term], entropy if term == "entropy" else log_prob, retain_graph=True)
            coefficients[term][part.rows] = (grad * (shares[term] * dp_size)).float()
        buckets = part.inputs[BUCKET_KEY]
        for bucket in buckets.unique().tolist():
            inside = buckets == bucket
            values = by_term if inside.all() else _losses_of_rows(actor, part, inside)
            for index, term in enumerate(terms):
                mode, share = actor.aggregation(term), shares[term]
                weight = share * float(row_weights(mode, mask)[inside].sum())
                weights[bucket, index] += weight
                # this mode divides by a constant, so a sum over fewer rows is the rows' part already
                factor = share if mode == "seq-mean-token-sum-norm" else weight
                losses[bucket, index] += values[term].item() * factor
    return Frozen(coefficients, weights, losses)


def row_weights(mode: str, mask: torch.Tensor) -> torch.Tensor:
    """Each row's share of a micro-batch's average.

    Args:
        mode: how the loss is averaged, by verl's name.
        mask: (B, T), 1 on response tokens.

    Returns:
        float64 (B,) that sums to 1: by tokens for ``token-mean``, else by rows.
    """
    tokens = mask.sum(-1).double()
    return tokens / tokens.sum().clamp(min=1) if mode == "token-mean" else torch.full_like(tokens, 1.0 / len(tokens))


def _losses_of_rows(actor: Actor, part: Forwarded, inside: torch.Tensor) -> dict[str, torch.Tensor]:
    inputs = {key: value[inside] for key, value in part.inputs.items()}
    entropy = None if part.entropy is None else part.entropy[inside]
    with torch.no_grad():
        return actor.loss_terms(inputs, part.log_prob[inside], entropy, part.on_policy)
