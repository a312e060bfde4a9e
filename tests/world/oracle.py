# SPDX-License-Identifier: Apache-2.0
"""The slow obvious way: every token's gradient by its own backward, on an unsharded model.

Shares no code with the probes. The loss is verl's; its derivatives by each log-prob and entropy are
taken on leaves, then every token that is asked for gets a backward of its own through the plain model.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class MicroBatch(NamedTuple):
    """One rank's micro-batch under the plain model; tensors are (B, T)."""

    rank: int
    index: int
    mask: torch.Tensor
    log_prob: torch.Tensor
    entropy: torch.Tensor | None
    loss: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


def plain_outputs(
    model: torch.nn.Module, ids: torch.Tensor, attention_mask: torch.Tensor, length: int, **inputs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies (B, T) of the last T tokens, of the plain model alone."""
    logits = model(input_ids=ids, attention_mask=attention_mask, **inputs).logits[:, -length - 1 : -1]
    log_probs = logits.float().log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, ids[:, -length:, None]).squeeze(-1), entropy


Place = tuple[int, int, int, int]
"""Rank, micro-batch, row in it, response position."""


class Oracle:
    """Gradients of the response tokens of the first mini-batch in the step's loss, flat, averaged over ranks.

    Args:
        trainer: supplies config and loss; its sharded module is not run.
        model: an unsharded model with the same weights.
        batch: the whole batch as dispatched.
    """

    def __init__(self, trainer: Any, model: torch.nn.Module, batch: Any):
        model = copy.deepcopy(model).train()
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._num_ranks = trainer.dp_size
        self._roots: dict[Place, torch.Tensor] = {}
        for found in trainer.micro_batches(model, batch):
            leaf = found.log_prob.detach().requires_grad_()
            entropy_leaf = None if found.entropy is None else found.entropy.detach().requires_grad_()
            found.loss(leaf, entropy_leaf).backward()
            roots = found.log_prob[found.mask.bool()] * leaf.grad[found.mask.bool()]
            if found.entropy is not None and entropy_leaf.grad is not None:
                roots = roots + found.entropy[found.mask.bool()] * entropy_leaf.grad[found.mask.bool()]
            places = found.mask.nonzero().tolist()
            self._roots |= {(found.rank, found.index, *place): root for place, root in zip(places, roots, strict=True)}

    def __getitem__(self, place: Place) -> torch.Tensor:
        return self._backward(self._roots[place])

    def account(self, culprits: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an event's true values of these culprits, each of one token, by its names; and the whole ``gradient``.

        All other tokens have a backward together: of all in one, half precision would round the others away.
        """
        places = [place_of(culprit) for culprit in culprits]
        others = [root for place, root in self._roots.items() if place not in places]
        named, without = [self[place] for place in places], self._backward(torch.stack(others).sum())
        total = without + sum(named)
        return {
            "gradient": total,
            "norm": float(total.norm()),
            "norm_without": float(without.norm()),
            "shares": [float(g @ total / (total @ total)) for g in named],
            "culprit_norms": [float(g.norm()) for g in named],
        }

    def _backward(self, root: torch.Tensor) -> torch.Tensor:
        grads = torch.autograd.grad(root, self._params, retain_graph=True)
        return torch.cat([grad.flatten() for grad in grads]) / self._num_ranks


def place_of(culprit: dict[str, Any]) -> Place:
    """Return the place of an event's culprit, by its first token."""
    return culprit["rank"], culprit["micro_batch"], culprit["micro_batch_row"], culprit["positions"][0]
