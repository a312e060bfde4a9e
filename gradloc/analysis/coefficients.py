# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""How each log-prob and entropy of the batch enters each term of the loss: the analysis's frozen coefficients.

One forward over the batch, cut into the very micro-batches that training would cut, so that each token keeps the
weight it has there; then verl's own loss on the values, whose derivatives are the coefficients. With them the
gradient of any rows' part of any term is the backward of a plain weighted sum, in whatever order the rows are run,
and the parts add up to the training gradient whatever the loss and its aggregation are.

Shapes: R rows on this rank, T response positions, K buckets, C terms of the loss.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from verl.utils.device import get_device_id

__all__ = [
    "BUCKET_KEY",
    "Forwarded",
    "Frozen",
    "MicroBatch",
    "forward",
    "freeze",
    "loss_terms",
    "micro_batches_of",
    "row_weights",
    "terms_of",
]

BUCKET_KEY = "gradloc_bucket"
"""int (R,): each row's bucket, -1 for rows that only fill up the ranks."""
_INDEX_KEY = "gradloc_analysis_row"
_BY_SEQUENCE = ("gspo", "sapo", "geo_mean")
"""Policy losses that verl averages by sequence whatever ``loss_agg_mode`` says."""


def terms_of(config: Any) -> tuple[str, ...]:
    """The terms of the actor's loss that carry gradient: task always, entropy and KL where they are on."""
    optional = {"entropy": config.entropy_coeff != 0, "kl": bool(config.use_kl_loss)}
    return ("task", *(name for name, is_on in optional.items() if is_on))


@dataclass
class MicroBatch:
    """One of training's micro-batches, without its filling rows, on the device."""

    inputs: dict[str, Any]
    rows: torch.Tensor
    """int (B,): which of this rank's rows they are; empty where the micro-batch only keeps peers company."""
    on_policy: bool


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


def forward(actor: Any, data: Any, temperature: float) -> list[Forwarded]:
    """Run the model over this rank's rows without a gradient; every rank runs the same number of micro-batches."""
    done = []
    for part in micro_batches_of(actor, data):
        with torch.no_grad():
            entropy, log_prob = actor._forward_for_loss(part.inputs, temperature)
        done.append(Forwarded(part.inputs, part.rows, part.on_policy, log_prob, entropy))
    return done


def micro_batches_of(actor: Any, data: Any) -> Iterator[MicroBatch]:
    """Cut this rank's rows as training would; every rank gets the same number of micro-batches."""
    from verl import DataProto

    # a batch that came through Ray is locked
    data = DataProto.from_dict({**data.batch, _INDEX_KEY: torch.arange(len(data))})
    micro_batches, on_policy = _cut(actor, data)
    for micro_batch in micro_batches:
        is_real = micro_batch.batch[BUCKET_KEY] >= 0
        if is_real.any():
            micro_batch = micro_batch.select_idxs(is_real)
        inputs = {**micro_batch.to(get_device_id()).batch}
        rows = inputs[_INDEX_KEY].cpu() if is_real.any() else torch.empty(0, dtype=torch.long)
        yield MicroBatch(inputs, rows, on_policy)


def _cut(actor: Any, data: Any) -> tuple[list[Any], bool]:
    """Cut as ``update_policy`` does, all mini-batches in a row; also whether training would count as on-policy."""
    config = actor.config
    mini_batches = data.split(config.ppo_mini_batch_size)
    on_policy = len(mini_batches) == 1 and config.ppo_epochs == 1
    micro_batches = []
    for mini_batch in mini_batches:
        if config.use_dynamic_bsz:
            from verl.utils.seqlen_balancing import prepare_dynamic_batch

            max_token_len = config.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size
            micro_batches += prepare_dynamic_batch(mini_batch, max_token_len=max_token_len)[0]
        else:
            micro_batches += mini_batch.split(config.ppo_micro_batch_size_per_gpu)
    return micro_batches, on_policy


def freeze(
    actor: Any, forwarded: list[Forwarded], num_local: int, num_buckets: int, num_rows: int, dp_size: int
) -> Frozen:
    """Differentiate verl's loss by the log-probs and entropies; no model runs and no rank waits for another.

    Every micro-batch counts by its rows, as where the mini-batch is the batch: a last, smaller mini-batch or
    micro-batch is not scaled as if it were full.

    Args:
        actor: verl's actor; supplies the loss.
        forwarded: all micro-batches of this rank.
        num_local: R, rows on this rank, filling ones included.
        num_buckets: K.
        num_rows: rows of the whole batch, filling ones excluded.
        dp_size: ranks that the gradient is averaged over.
    """
    terms = terms_of(actor.config)
    width = forwarded[0].log_prob.shape[1]
    device = forwarded[0].log_prob.device
    coefficients = {term: torch.zeros(num_local, width, device=device) for term in terms}
    weights = torch.zeros(num_buckets, len(terms), dtype=torch.float64)
    losses = torch.zeros_like(weights)
    for part in forwarded:
        if not len(part.rows):
            continue
        share = len(part.rows) / num_rows
        mask = part.inputs["response_mask"]
        log_prob, entropy = part.log_prob.clone().requires_grad_(), part.entropy
        entropy = None if entropy is None else entropy.clone().requires_grad_()
        by_term = loss_terms(actor, part.inputs, log_prob, entropy, part.on_policy)
        for term in terms:
            (grad,) = torch.autograd.grad(by_term[term], entropy if term == "entropy" else log_prob, retain_graph=True)
            coefficients[term][part.rows] = (grad * (share * dp_size)).float()
        buckets = part.inputs[BUCKET_KEY]
        for bucket in buckets.unique().tolist():
            inside = buckets == bucket
            values = by_term if inside.all() else _losses_of_rows(actor, part, inside)
            for index, term in enumerate(terms):
                mode = _mode(actor.config, term)
                weight = share * float(row_weights(mode, mask)[inside].sum())
                weights[bucket, index] += weight
                # this mode divides by a constant, so a sum over fewer rows is the rows' part already
                factor = share if mode == "seq-mean-token-sum-norm" else weight
                losses[bucket, index] += values[term].item() * factor
    return Frozen(coefficients, weights, losses)


def row_weights(mode: str, mask: torch.Tensor) -> torch.Tensor:
    """Each row's share of a micro-batch's average.

    Args:
        mode: ``loss_agg_mode``.
        mask: (B, T), 1 on response tokens.

    Returns:
        float64 (B,) that sums to 1: by tokens for ``token-mean``, else by rows.
    """
    tokens = mask.sum(-1).double()
    return tokens / tokens.sum() if mode == "token-mean" else torch.full_like(tokens, 1.0 / len(tokens))


def _mode(config: Any, term: str) -> str:
    by_sequence = term == "task" and config.policy_loss.get("loss_mode", "vanilla") in _BY_SEQUENCE
    return "seq-mean-token-mean" if by_sequence else config.loss_agg_mode


def loss_terms(actor: Any, inputs: dict[str, Any], log_prob, entropy, on_policy: bool) -> dict[str, torch.Tensor]:
    """The terms of verl's loss on these values, coefficients included, without the factor of accumulation."""
    scratch, terms = {"actor/pg_loss": 0.0, "actor/kl_loss": 0.0}, {}
    total = actor._micro_batch_loss(inputs, log_prob, entropy, on_policy, scratch, {}, terms)
    terms["task"] = total - sum(terms.values())
    scale = actor._loss_scale_factor(inputs["response_mask"])
    return {name: value / scale for name, value in terms.items()}


def _losses_of_rows(actor: Any, part: Forwarded, inside: torch.Tensor) -> dict[str, torch.Tensor]:
    inputs = {key: value[inside] for key, value in part.inputs.items()}
    entropy = None if part.entropy is None else part.entropy[inside]
    with torch.no_grad():
        return loss_terms(actor, inputs, part.log_prob[inside], entropy, part.on_policy)
