# SPDX-License-Identifier: Apache-2.0
"""Address tokens over micro-batches and ranks, and mask the ones that a probe lets through.

A token's address is (micro_batch, rank, index). ``index`` counts the response tokens of that rank's micro-batch row by
row. So half of an interval of indices is half of its tokens, however long the rows are.

Shapes: B rows of the micro-batch, T response positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, order=True)
class Token:
    """One response token of the mini-batch."""

    micro_batch: int
    rank: int
    index: int


@dataclass(frozen=True)
class Part:
    """A part of one micro-batch: an interval of ranks or, once a single rank is left, an interval of its tokens."""

    micro_batch: int
    first_rank: int
    end_rank: int
    first_token: int = 0
    end_token: int | None = None
    """Exclusive; None for all tokens of every rank in the interval."""

    @property
    def num_ranks(self) -> int:
        return self.end_rank - self.first_rank

    def halves(self, num_tokens: int) -> tuple["Part", "Part"]:
        """Split the ranks in two, or the ``num_tokens`` tokens of the last one.

        Raises:
            ValueError: when there is one token or none to split.
        """
        if self.num_ranks > 1:
            middle = (self.first_rank + self.end_rank) // 2
            return replace(self, end_rank=middle), replace(self, first_rank=middle)
        if num_tokens < 2:
            raise ValueError(f"a part of {num_tokens} tokens on one rank cannot be halved: {self}")
        end = self.first_token + num_tokens
        middle = (self.first_token + end) // 2
        return replace(self, end_token=middle), replace(self, first_token=middle, end_token=end)


def mask_of(part: Part, rank: int, token_mask_BT: torch.Tensor) -> torch.Tensor:
    """Return which positions of one rank's micro-batch are in a part, bool (B, T): none on a rank outside of it.

    Args:
        part: of this micro-batch.
        rank: the rank.
        token_mask_BT: which positions are response tokens.
    """
    selected = torch.zeros_like(token_mask_BT)
    if part.first_rank <= rank < part.end_rank:
        positions = token_mask_BT.flatten().nonzero().squeeze(-1)[part.first_token : part.end_token]
        selected.view(-1)[positions] = True
    return selected


def mask_without(tokens: Sequence[Token], micro_batch: int, rank: int, token_mask_BT: torch.Tensor) -> torch.Tensor:
    """Return all positions of one rank's micro-batch except these tokens, bool (B, T).

    Padding is among them: training lets it through, so a replay without the culprits has to.
    """
    kept = torch.ones_like(token_mask_BT)
    indices = [token.index for token in tokens if token.micro_batch == micro_batch and token.rank == rank]
    if indices:
        positions = token_mask_BT.flatten().nonzero().squeeze(-1)[indices]
        kept.view(-1)[positions] = False
    return kept
