# SPDX-License-Identifier: Apache-2.0
"""The slow obvious way: a token's gradient by a backward of its own, on the unsharded model.

Shares no code with the core's probes. Only the row that holds the token is run.
"""

from collections.abc import Iterable

import torch

from tests.toy_model.amplifier import edit_of
from tests.toy_model.batch import Batch, Place
from tests.toy_model.model import Decoder, entropy_of, log_prob_of
from tests.toy_model.step import Loss


class Oracle:
    """Exact gradients of single tokens of a batch.

    Args:
        model: unsharded, with the weights of the step.
        batch: all ranks' rows.
        loss: of the step.
    """

    def __init__(self, model: Decoder, batch: Batch, loss: Loss = Loss()):  # noqa: B008 (frozen)
        self.model = model
        self.batch = batch
        self.loss = loss

    def log_prob(self, place: Place) -> torch.Tensor:
        """The token's log-probability at this step's weights."""
        row, position = place
        with torch.no_grad():
            return log_prob_of(self._row(row), self.batch.labels[row : row + 1])[0, position]

    def logits(self, place: Place) -> torch.Tensor:
        """All logits at the place, (V,)."""
        return self.row_logits(place[0])[place[1]]

    def row_logits(self, row: int) -> torch.Tensor:
        """All logits of a row, (T, V)."""
        with torch.no_grad():
            return self._row(row)[0]

    def norm(self, place: Place) -> float:
        """L2 norm of one token's gradient in the step's loss."""
        return self.norms([place])[place]

    def norms(self, places: Iterable[Place]) -> dict[Place, float]:
        """Return the norms of many tokens; one forward per row, one backward per token."""
        return {place: self._norm(loss) for place, loss in self._losses_at(places)}

    def gradient(self, places: Iterable[Place] | None = None) -> torch.Tensor:
        """The gradient of these tokens together, or of all: float64 (number of weights,), as the model lists them."""
        if places is None:
            return sum(self._flat(self._losses(row).sum()) for row in range(len(self.batch.labels)))
        return sum(self._flat(loss) for _, loss in self._losses_at(places))

    def _losses_at(self, places: Iterable[Place]) -> Iterable[tuple[Place, torch.Tensor]]:
        wanted = sorted(set(places))
        for row in dict.fromkeys(row for row, _ in wanted):
            losses = self._losses(row)
            yield from ((place, losses[place[1]]) for place in wanted if place[0] == row)

    def _norm(self, loss: torch.Tensor) -> float:
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in self._gradients(loss)]
        return float(torch.stack(norms).norm())

    def _flat(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([gradient.double().flatten() for gradient in self._gradients(loss)])

    def _gradients(self, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(loss, list(self.model.parameters()), retain_graph=True, materialize_grads=True)

    def _losses(self, row: int) -> torch.Tensor:
        """Every token's part (T,) of the step's loss; 0 outside the mask."""
        logits = self._row(row)
        part = self.batch.part(slice(row, row + 1), logits.device)
        entropy = entropy_of(logits) if self.loss.entropy else None
        losses = self.loss.of_tokens(log_prob_of(logits, part.labels), entropy, part)
        weights = self.loss.weights(part.mask, self.batch).to(losses.dtype)
        return (torch.where(part.mask, losses, 0.0) * weights)[0]

    def _row(self, row: int) -> torch.Tensor:
        """Logits (1, T, V)."""
        tokens = self.batch.tokens[row : row + 1].to(next(self.model.parameters()).device)
        with edit_of(self.model, self.batch.amplified, [row]):
            return self.model(tokens, self.batch.labels.shape[1])
