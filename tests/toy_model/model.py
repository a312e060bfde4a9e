# SPDX-License-Identifier: Apache-2.0
"""A small decoder of today's kind (RMSNorm, rotary positions, SwiGLU, untied head), in plain torch.

Shapes: B rows, S positions, H heads, D head width, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from tests.world import DEVICE


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    dropout: float = 0.0
    """After every MLP, in training mode; in [0, 1)."""


SIZES = {
    "tiny": ModelSize(vocabulary=96, width=32, layers=2, heads=4),
    "S": ModelSize(vocabulary=2048, width=96, layers=4, heads=4),
}


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return normed.to(x.dtype) * self.weight


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention: all of (B, H, S, D)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    attend = staticmethod(_attend)

    def __init__(self, size: ModelSize):
        super().__init__()
        self.heads = size.heads
        self.norm_in = RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.norm_mlp = RMSNorm(size.width)
        self.mlp = MLP(size.width)
        self.dropout = size.dropout

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm_in(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, S, D)
        mixed = self.attend(_rotate(q, rotation), _rotate(k, rotation), v)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + F.dropout(self.mlp(self.norm_mlp(x)), self.dropout, self.training)


class Decoder(nn.Module):
    """Reads tokens, gives logits."""

    def __init__(self, size: ModelSize):
        super().__init__()
        self.head_width = size.width // size.heads
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm_out = RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.05)

    def forward(self, tokens: torch.Tensor, num_last: int, precise: bool = False) -> torch.Tensor:
        """Logits at the last ``num_last`` positions, (B, num_last, V).

        Args:
            tokens: (B, S) token ids.
            num_last: how many positions to read out.
            precise: compute the read-out in float32 whatever the model computes in.
        """
        x = self.embedding(tokens)
        rotation = _rotation(tokens.shape[1], self.head_width, x)
        for block in self.blocks:
            x = block(x, rotation)
        hidden = self.norm_out(x[:, -num_last:])
        if precise:
            return F.linear(hidden.float(), self.head.weight.float())
        return self.head(hidden)


def log_prob_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probability (B, T) of ``labels`` (B, T) under ``logits`` (B, T, V)."""
    return logits.log_softmax(-1).gather(-1, labels[..., None]).sum(-1)


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    """Entropy (B, T) in nats of the distributions that ``logits`` (B, T, V) mean."""
    log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def build(name: str, seed: int = 0, dropout: float = 0.0) -> Decoder:
    """A model of the size of that name in ``SIZES``, float32, with the initialisation of that seed."""
    torch.manual_seed(seed)
    return Decoder(replace(SIZES[name], dropout=dropout)).to(DEVICE)


def _rotation(length: int, width: int, like: torch.Tensor) -> torch.Tensor:
    frequency = 10000.0 ** (-torch.arange(0, width, 2, device=like.device) / width)
    angle = torch.arange(length, device=like.device)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()]).to(like.dtype)  # (2, S, D / 2)


def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)
