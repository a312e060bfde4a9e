# SPDX-License-Identifier: Apache-2.0
"""The slow obvious way: a token's gradient by a backward of its own, on the unsharded model.

Shares no code with the core's probes. Only the row that holds the token is run.
"""

import torch

from benchmarks.batch import Batch
from benchmarks.model import Decoder
from benchmarks.step import Amplifier, policy_loss

Place = tuple[int, int]
"""(row of the batch, response position)"""


class Oracle:
    """Exact gradients of single tokens of a batch."""

    def __init__(self, model: Decoder, batch: Batch):
        self.model = model
        self.batch = batch

    def log_prob(self, place: Place) -> torch.Tensor:
        """The token's log-probability at this step's weights."""
        with torch.no_grad():
            return self._row(place[0])[place[1]]

    def logits(self, place: Place) -> torch.Tensor:
        """All logits at the place, (V,)."""
        row, position = place
        with torch.no_grad():
            tokens = self.batch.tokens[row : row + 1]
            return self.model.logits(tokens, self.batch.labels.shape[1])[0, position]

    def norm(self, place: Place) -> float:
        """L2 norm of one token's gradient in the step's loss."""
        return self.norms([place])[place]

    def norms(self, places: list[Place]) -> dict[Place, float]:
        """The same for many tokens; one forward per row, one backward per token."""
        found = {}
        for row in sorted({row for row, _ in places}):
            losses = self._losses(row)
            for place in sorted({place for place in places if place[0] == row}):
                found[place] = self._gradient_norm(losses[place[1]])
        return found

    def row_norm(self, row: int) -> float:
        """Norm of all of a row's tokens together."""
        return self._gradient_norm(self._losses(row).sum())

    def _gradient_norm(self, loss: torch.Tensor) -> float:
        params = list(self.model.parameters())
        gradients = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
        squares = [g.double().square().sum() for g in gradients if g is not None]
        return float(torch.stack(squares).sum().sqrt())

    def _losses(self, row: int) -> torch.Tensor:
        old, advantages = self.batch.old_log_probs[row], self.batch.advantages[row]
        return policy_loss(self._row(row), old, advantages) / self.batch.num_tokens

    def _row(self, row: int) -> torch.Tensor:
        tokens, labels = self.batch.tokens[row : row + 1], self.batch.labels[row : row + 1]
        amplified = self.batch.amplified
        if amplified is None or amplified.row != row:
            return self.model(tokens, labels)[0]
        with Amplifier(self.model, amplified, 0):
            return self.model(tokens, labels)[0]
