# SPDX-License-Identifier: Apache-2.0
"""How each log-prob and entropy of the batch enters each term of the loss.

The batch is cut into the very micro-batches that training would cut, so that each token keeps the weight it has there,
and training's own loss is differentiated by the log-probs and entropies. With these coefficients the gradient of any
rows' part of any term is the backward of a plain weighted sum, and the parts add up to the training gradient whatever
the loss and its aggregation are.

Shapes: R rows on this rank, T response positions, K buckets, C terms of the loss.
"""

import torch

from ..actor import BUCKET_KEY, Actor, ActorMicroBatch, Rows
from ..rows import Weights


class BucketCoefficients:
    """Of this rank's rows, gathered micro-batch by micro-batch.

    Args:
        actor: supplies the loss.
        rows: this rank's.
        num_buckets: K.
        num_rows: rows of the whole batch, without filling ones.
        dp_size: ranks that the gradient is averaged over.
    """

    def __init__(self, actor: Actor, rows: Rows, num_buckets: int, num_rows: int, dp_size: int):
        self._actor, self._num_rows, self._dp_size = actor, num_rows, dp_size
        shape = rows["response_mask"].shape
        self._coefficients = {term: torch.zeros(shape, device=actor.device) for term in actor.terms}
        """Per term, (R, T): d (whole batch's loss) / d log_prob, or d entropy for its term, times ``dp_size``."""
        self.weights = torch.zeros(num_buckets, len(actor.terms), dtype=torch.float64)
        """(K, C): the buckets' shares of the terms' averages; over all ranks they sum to 1 for each term."""
        self.losses = torch.zeros_like(self.weights)
        """(K, C): the buckets' parts of the terms' values; over all ranks they sum to the batch's loss."""

    def of(self, term: str) -> Weights:
        """The weights whose sum has the term's gradient."""
        return {"entropy" if term == "entropy" else "log_prob": self._coefficients[term]}

    def add(self, part: ActorMicroBatch, log_prob: torch.Tensor, entropy: torch.Tensor | None) -> None:
        """Differentiate a micro-batch's loss by its log-probs and entropies; no model runs, no rank waits for another.

        It counts as where the mini-batch is the batch: a last, smaller mini-batch or micro-batch is not scaled as if
        it were full.
        """
        if not len(part.rows):
            return
        actor = self._actor
        shares = {term: actor.share(part, term, self._num_rows) for term in actor.terms}
        leaf = log_prob.clone().requires_grad_()
        entropy_leaf = None if entropy is None else entropy.clone().requires_grad_()
        by_term = actor.loss_terms(part.inputs, leaf, entropy_leaf, part.on_policy)
        for term, share in shares.items():
            by = entropy_leaf if term == "entropy" else leaf
            (grad,) = torch.autograd.grad(by_term[term], by, retain_graph=True)
            self._coefficients[term][part.rows] = (grad * (share * self._dp_size)).float()
        buckets, tokens = part.inputs[BUCKET_KEY], part.inputs["response_mask"].sum(-1).double()
        for bucket in buckets.unique().tolist():
            inside = buckets == bucket
            values = by_term
            if not inside.all():
                inputs = {key: value[inside] for key, value in part.inputs.items()}
                with torch.no_grad():
                    inner = None if entropy is None else entropy[inside]
                    values = actor.loss_terms(inputs, log_prob[inside], inner, part.on_policy)
            by_tokens = float(tokens[inside].sum() / tokens.sum().clamp(min=1))
            by_rows = float(inside.double().mean())
            for index, (term, share) in enumerate(shares.items()):
                mode = actor.aggregation(term)
                weight = share * (by_tokens if mode == "token-mean" else by_rows)
                self.weights[bucket, index] += weight
                # this mode divides by a constant, so a sum over fewer rows is the rows' part already
                factor = share if mode == "seq-mean-token-sum-norm" else weight
                self.losses[bucket, index] += values[term].item() * factor
