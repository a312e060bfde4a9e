# SPDX-License-Identifier: Apache-2.0
"""One optimizer step's data, as the trainer would have it after the advantages.

Shapes: R rows over all ranks and micro-batches, P prompt positions, T response positions, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch

from tests.toy_model.amplifier import Amplified, Sharpened

NUM_PROMPT = 5
_OLD_NOISE = 0.05  # of old log-probs: the policy has moved a little since the rollout

Place = tuple[int, int]
"""(row of the batch, response position)"""


@dataclass(frozen=True)
class Batch:
    """A step's rows in dispatch order: rank 0's first, each rank's micro-batches in order."""

    tokens: torch.Tensor
    """(R, P + T - 1) what the model reads."""
    labels: torch.Tensor
    """(R, T) the response tokens, sampled from the model itself at each position."""
    mask: torch.Tensor
    """bool (R, T): which of them are part of the loss."""
    advantages: torch.Tensor
    """(R, T)"""
    old_log_probs: torch.Tensor
    """(R, T) of the policy that the rollout came from."""
    reference_log_probs: torch.Tensor
    """(R, T) of the policy that a KL term holds on to."""
    amplified: Amplified | Sharpened | None = None
    """Another behaviour of the model at one token of this batch."""

    @property
    def num_tokens(self) -> int:
        return int(self.mask.sum())

    def edited(self, **changes) -> "Batch":
        return replace(self, **changes)

    def planted(self, advantages: Mapping[Place, float]) -> "Batch":
        """Return the batch with these tokens' advantages replaced."""
        changed = self.advantages.clone()
        for place, advantage in advantages.items():
            changed[place] = advantage
        return self.edited(advantages=changed)

    def part(self, rows: slice, device: torch.device) -> "Batch":
        """Some rows, on a device, as an ordinary batch: without what the model does otherwise."""
        tensors = {f.name: getattr(self, f.name)[rows].to(device) for f in fields(self) if f.name != "amplified"}
        return Batch(**tensors)

    def place(self, token, num_ranks: int, num_micro_batches: int) -> Place:
        """Where a ``gradloc.core.selection.Token`` stands in the batch that was dealt out so."""
        each = len(self.labels) // (num_ranks * num_micro_batches)
        first = (token.rank * num_micro_batches + token.micro_batch) * each
        row, position = self.mask[first : first + each].nonzero()[token.index].tolist()
        return first + row, position


def random_batch(model: torch.nn.Module, rows: int = 16, length: int = 12, seed: int = 0) -> Batch:
    """Rows of random tokens; responses of a third to the whole of ``length``, so that micro-batches differ.

    Args:
        model: unsharded.
        rows: R, a multiple of ranks times micro-batches.
        length: T.
        seed: fixes everything.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.head.out_features, (rows, NUM_PROMPT + length - 1), generator=generator)
    batch = _answered(model, tokens, length, generator)
    lengths = torch.randint(max(length // 3, 1), length + 1, (rows, 1), generator=generator)
    return batch.edited(mask=torch.arange(length) < lengths)


@torch.no_grad()
def _answered(model: torch.nn.Module, tokens: torch.Tensor, length: int, generator: torch.Generator) -> Batch:
    """The batch in which the model answers these rows.

    Every response token is drawn from the model's distribution after the text before it, so its probability is what a
    rollout's would be. Advantages are one standard normal number per row.
    """
    was_training = model.training
    model.eval()
    labels, log_probs = [], []
    device = next(model.parameters()).device
    for part in tokens.split(32):
        log_prob = model(part.to(device), length).float().log_softmax(-1).cpu()
        uniform = torch.rand(log_prob.shape, generator=generator)
        gumbel = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
        labels.append((log_prob + gumbel).argmax(-1))
        log_probs.append(log_prob.gather(-1, labels[-1][..., None]).squeeze(-1))
    model.train(was_training)
    old = torch.cat(log_probs)
    old = old + _OLD_NOISE * torch.randn(old.shape, generator=generator)
    advantages = torch.randn(len(tokens), 1, generator=generator).expand_as(old).clone()
    mask = torch.ones_like(old, dtype=torch.bool)
    return Batch(tokens, torch.cat(labels), mask, advantages, old, old.clone())
