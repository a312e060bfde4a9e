# SPDX-License-Identifier: Apache-2.0
"""One optimizer step's data, as the trainer would have it after the advantages.

Shapes: R rows over all ranks and micro-batches, P prompt positions, T response positions.
"""

from dataclasses import dataclass, replace

import torch

NUM_PROMPT = 16
_OLD_NOISE = 0.05  # of old log-probs: the policy has moved a little since the rollout


@dataclass(frozen=True)
class Amplified:
    """Some layers' MLPs react ``factor`` times as strongly to their own weights at one position.

    The output at the present weights stays what it was, so no log-prob and no coefficient shows it.
    """

    layers: tuple[int, ...]
    row: int
    position: int
    factor: float


@dataclass(frozen=True)
class Batch:
    """A step's rows in dispatch order: rank 0's first, each rank's micro-batches in order."""

    tokens: torch.Tensor
    """(R, P + T - 1) what the model reads."""
    labels: torch.Tensor
    """(R, T) the response tokens, sampled from the model itself at each position."""
    advantages: torch.Tensor
    """(R, T)"""
    old_log_probs: torch.Tensor
    """(R, T)"""
    amplified: Amplified | None = None

    @property
    def num_tokens(self) -> int:
        return self.labels.numel()

    def edited(self, **changes) -> "Batch":
        return replace(self, **changes)


def shape_of(num_tokens: int) -> tuple[int, int]:
    """(rows, response length) for N tokens: at least 8 rows, responses of at most 256 tokens."""
    length = min(max(num_tokens // 16, 16), 256)
    return num_tokens // length, length


@torch.no_grad()
def healthy_batch(model: torch.nn.Module, source: torch.Tensor, num_tokens: int, seed: int) -> Batch:
    """Rows cut from text that the model was not trained on; responses sampled from the model.

    Every response token is drawn from the model's distribution after the text before it, so its
    probability is what a rollout's would be. Advantages are one standard normal number per row.

    Args:
        model: unsharded.
        source: held-out token ids.
        num_tokens: N, response tokens over all rows.
        seed: fixes everything.
    """
    rows, length = shape_of(num_tokens)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(source) - NUM_PROMPT - length, (rows,), generator=generator)
    tokens = torch.stack([source[s : s + NUM_PROMPT + length - 1] for s in starts.tolist()])
    labels, log_probs = [], []
    for part in tokens.split(32):
        log_prob = model.logits(part, length).float().log_softmax(-1)
        uniform = torch.rand(log_prob.shape, generator=generator)
        gumbel = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
        label = (log_prob + gumbel).argmax(-1)
        labels.append(label)
        log_probs.append(log_prob.gather(-1, label[..., None]).squeeze(-1))
    old = torch.cat(log_probs)
    old = old + _OLD_NOISE * torch.randn(old.shape, generator=generator)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, length).clone()
    return Batch(tokens, torch.cat(labels), advantages, old)
