# SPDX-License-Identifier: Apache-2.0
"""What is planted and where: one long response, and in it a token that was improbable once.

The story is the post-mortem's: a token had probability 1e-5 under the policy that sampled it (the
old one, by whose probability the loss divides), and has nearly 1 under the present one. Its
importance ratio is then 1e5. One step earlier there is one of 1e-4. Pure; no verl.
"""

import math
import random
from dataclasses import dataclass

import torch

KEY = "planted"
"""The batch's tensor of marks, (B, T)."""
IN_ROW = 1
"""The mark of a token in the planted response: it gets the planted advantage."""
STALE = 2
"""The mark of a token whose old log-prob is replaced as well."""


@dataclass(frozen=True)
class Settings:
    """The `explosion` section of the config."""

    is_stale: bool
    """False in the healthy twin: the same response and advantage, with the old log-probs it has."""
    warning_step: int
    """The step, counted from 1, at which a token is a little stale."""
    warning_probability: float
    """What it had under the old policy, in (0, 1)."""
    spike_step: int
    """The step at which a token is as stale as the post-mortem has it."""
    old_probability: float
    """What that one had under the old policy, in (0, 1)."""
    num_stale: int
    """How many tokens of the response are stale at either step; at most all that are sure."""
    sure: float
    """From which probability on a token is near enough to 1 to be made stale, in (0, 1)."""
    advantage: float
    """The planted response's advantage."""

    def __post_init__(self):
        if not 1 <= self.warning_step < self.spike_step:
            raise ValueError(
                f"explosion.warning_step must be at least 1 and before explosion.spike_step, found "
                f"{self.warning_step} and {self.spike_step}."
            )
        if self.num_stale < 1:
            raise ValueError(f"explosion.num_stale must be at least 1, found {self.num_stale}.")
        for name in ("warning_probability", "old_probability", "sure"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"explosion.{name} must be between 0 and 1, found {getattr(self, name)}.")

    @property
    def probabilities(self) -> dict[int, float]:
        """What the old policy gave a stale token, at each step at which something is planted."""
        return {self.warning_step: self.warning_probability, self.spike_step: self.old_probability}


def draw_row(seed: int, step: int, num_rows: int) -> int:
    """Which row of a batch is planted: the same on every machine."""
    return random.Random(f"gradloc explosion row {seed} {step}").randrange(num_rows)


def choose(settings: Settings, log_probs: list[float]) -> list[int]:
    """The positions that are made stale: of the sure tokens, the least sure ones.

    The gradient of a token's log-prob goes with 1 - p: a token at 0.9999 has next to none, so that
    even a ratio of 1e5 leaves little of it.

    Args:
        settings: what to plant.
        log_probs: of the response's tokens under the present policy.

    Returns:
        Positions in order; none in the healthy twin.

    Raises:
        ValueError: if no token of the response is sure.
    """
    if not settings.is_stale:
        return []
    sure = [i for i, value in enumerate(log_probs) if value >= math.log(settings.sure)]
    if not sure:
        raise ValueError(
            f"no token of the planted response has a probability of {settings.sure} or more, so "
            "none can become stale: lower explosion.sure."
        )
    return sorted(sorted(sure, key=lambda i: log_probs[i])[: settings.num_stale])


def marks(num_rows: int, width: int, row: int, length: int, positions: list[int]) -> torch.Tensor:
    """The (num_rows, width) tensor of marks for one planted response of `length` tokens."""
    made = torch.zeros(num_rows, width, dtype=torch.int8)
    made[row, :length] = IN_ROW
    made[row, positions] = STALE
    return made


def plant(settings: Settings, row: int, response_mask: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """The (B, T) marks of a batch whose planted response is in that row.

    Args:
        settings: what to plant.
        row: the response's.
        response_mask: (B, T), 1 on its tokens, which come first.
        log_probs: (B, T), what the present policy gives the tokens.
    """
    mask = response_mask[row].bool()
    positions = choose(settings, log_probs[row][mask].tolist())
    return marks(*log_probs.shape, row, int(mask.sum()), positions)


def as_sampled(log_probs: torch.Tensor, planted: torch.Tensor, probability: float) -> torch.Tensor:
    """The (B, T) log-probs with those of stale tokens replaced by what the old policy gave them."""
    return torch.where(planted == STALE, math.log(probability), log_probs)
