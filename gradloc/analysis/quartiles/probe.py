# SPDX-License-Identifier: Apache-2.0
"""What the workers do: gradients by probability quartile, single tokens' gradients, and steps that are taken back.

One training pass over the batch, cut into training's own micro-batches, gives the whole gradient and, by hooks, the
derivative of training's loss by each log-prob and entropy. A quartile's gradient is then the backward of the sum of
its tokens' log-probs times these coefficients: nothing that goes into the loss is changed, so the four parts add up to
the whole. How far they miss it is measured (the closure).

Shapes: R rows on this rank, T response positions, S sampled tokens.
"""

from typing import Any, TypedDict

import numpy as np
import torch

from ...core.gradients import Gradient, GradientSpace
from ...core.ranks import Ranks
from ...core.step import Recorded, RngState, record
from ..actor import BUCKET_KEY, Actor, MicroBatch, Rows
from ..rows import RowProbe, Weights, add_up
from .split import NUM_QUARTILES, UPDATES
from .trial_step import trial_step

QUARTILE_KEY = "gradloc_quartile"
"""int (R, T): each token's quartile; -1 for what is no response token and for rows that only fill up the ranks."""
SAMPLE_KEY = "gradloc_sample"
"""int (R, T): the number of each sampled token, from 0 on; -1 for all others."""


class QuartileNumbers(TypedDict):
    """What a rank found: the same on each but for ``log_probs``."""

    terms: list[str]
    whole: float
    """Norm of the whole batch's gradient."""
    norms: list[float]
    """Of each quartile's part."""
    dots: list[float]
    """Inner product of each part with the whole."""
    closure: float | None
    """How far the parts' sum is from the whole, relative to it; None where that is zero."""
    tokens: list[dict[str, float]]
    """Norms of each sampled token."""
    steps: dict[str, dict[str, Any] | None]
    """By update; None without a gradient."""
    optimizer: str
    learning_rate: float
    log_probs: dict[str, np.ndarray | None]
    """Of this rank's rows, float32 (R, T): ``before`` and after each update; None without a step."""
    forwards: int
    backwards: int


class QuartileProbe(RowProbe):
    """One analysis on one rank; every rank makes the same calls in the same order.

    Gradients that have to be kept, four at a time, wait in host memory.
    """

    def __init__(self, actor: Actor, ranks: Ranks, space: GradientSpace):
        super().__init__(actor, ranks, space)
        self.parts: list[Gradient] = []
        """Per quartile, the additive part of the gradient."""
        self.whole: Gradient = []
        """The whole batch's gradient, from a pass of its own."""
        self.tokens: list[dict[str, float]] = []
        self.steps: dict[str, dict[str, Any] | None] = {}
        self.log_probs: dict[str, torch.Tensor | None] = {}

    def measure(self, rows: Rows, num_sampled: int) -> None:
        """Fill in everything that :meth:`record` reports.

        Args:
            rows: this rank's, with ``BUCKET_KEY`` (-1 for filling rows, else 0), ``QUARTILE_KEY`` and ``SAMPLE_KEY``.
            num_sampled: S, over all ranks.
        """
        self._hold(rows)
        weights = self._training_pass()
        quartiles = rows[QUARTILE_KEY].to(weights.log_prob.device)
        for quartile in range(NUM_QUARTILES):
            self.parts.append(self._part(_only(weights, quartiles == quartile)))
        samples = rows[SAMPLE_KEY].to(weights.log_prob.device)
        for number in range(num_sampled):
            self.tokens.append(self._token(weights, samples == number))
        self.actor.module.eval()
        self.log_probs["before"] = self._read_log_probs()
        for name, quartiles in UPDATES.items():
            self._try(name, self._gradient_of(quartiles))

    def record(self) -> QuartileNumbers:
        """What this rank found."""
        whole = self.space.norm(self.whole)
        total: Gradient | None = None
        for part in self.parts:
            total = add_up(total, part)
        for left, right in zip(total, self.whole, strict=True):
            if left is not None and right is not None:
                left.sub_(right)
        return {
            "terms": list(self.actor.terms),
            "whole": whole,
            "norms": [self.space.norm(part) for part in self.parts],
            "dots": [float(self.space.dots(part, self.whole).sum()) for part in self.parts],
            "closure": self.space.norm(total) / whole if whole != 0 else None,
            "tokens": self.tokens,
            "steps": self.steps,
            "optimizer": type(self.actor.optimizer).__name__,
            "learning_rate": max(float(group["lr"]) for group in self.actor.optimizer.param_groups),
            "log_probs": {name: None if found is None else found.numpy() for name, found in self.log_probs.items()},
            "forwards": self.num_forwards,
            "backwards": self.num_backwards,
        }

    # ---- inside

    def _training_pass(self) -> Weights:
        """Accumulate the whole batch's gradient as training does; keep every token's coefficients on the way."""
        rows, device = self._rows, self.actor.device
        num_rows = int(self.ranks.sum([float((rows[BUCKET_KEY] >= 0).sum())])[0])
        shape = rows[QUARTILE_KEY].shape
        weights = Weights(log_prob=torch.zeros(shape, device=device))
        if "entropy" in self.actor.terms:
            weights.entropy = torch.zeros(shape, device=device)
        self.space.clear()
        for part in self.actor.micro_batches(rows):
            self._train_on(part, num_rows, weights)
        self.whole = self._take()
        return weights

    def _train_on(self, part: MicroBatch, num_rows: int, weights: Weights) -> None:
        self.num_forwards += 1
        self.num_backwards += 1
        kept = Recorded(RngState(self.actor.device))
        log_prob, entropy = self.actor.forward(part.inputs)
        record(kept, log_prob, entropy)
        if len(part.rows):
            terms = self.actor.loss_terms(part.inputs, log_prob, entropy, part.on_policy)
            loss = sum(value * self.actor.share(part, term, num_rows) for term, value in terms.items())
            loss = loss * self.ranks.size
        else:
            loss = (log_prob * 0).sum()  # peers' collectives wait for this backward
        scale = self.actor.loss_scale
        (loss * scale).backward()
        if len(part.rows):
            weights.log_prob[part.rows] = kept.log_prob_coefficient.float() / scale
            if weights.entropy is not None:
                weights.entropy[part.rows] = kept.entropy_coefficient.float() / scale

    def _part(self, weights: Weights) -> Gradient:
        """The gradient of the weighted sum, over the rows of every rank that it says something of."""

        def cut() -> list[list[int]]:
            counts = (weights.log_prob != 0).any(-1)  # NaN counts
            if weights.entropy is not None:
                counts |= (weights.entropy != 0).any(-1)
            return self._chunks(counts.cpu())

        chunks = self.ranks.agree(cut)
        return self._gradient(weights, chunks, int(self.ranks.max([len(chunks)])[0]))

    def _token(self, weights: Weights, is_token: torch.Tensor) -> dict[str, float]:
        """One token's own gradients, each from a backward of its own.

        Returns:
            ``log_prob_norm``: of its log-prob; ``loss_norm``: of its additive part of the training loss.
        """
        alone = Weights(log_prob=is_token.float() * self.ranks.size)
        log_prob_norm = self.space.norm(self._part(alone))
        if weights.entropy is not None:
            return {"log_prob_norm": log_prob_norm, "loss_norm": self.space.norm(self._part(_only(weights, is_token)))}
        mine = weights.log_prob[is_token]
        coefficient = self.ranks.sum([float(mine.sum()) if len(mine) else 0.0])[0] / self.ranks.size
        return {"log_prob_norm": log_prob_norm, "loss_norm": abs(coefficient) * log_prob_norm}

    def _gradient_of(self, quartiles: tuple[int, ...]) -> Gradient:
        """What an update of these quartiles takes: the whole gradient, one part, or zeros."""
        if len(quartiles) == NUM_QUARTILES:
            return self.whole
        if quartiles:
            return self.parts[quartiles[0]]
        return [None if grad is None else torch.zeros_like(grad) for grad in self.whole]

    def _try(self, name: str, gradient: Gradient) -> None:
        """Update with this gradient, read every token's log-prob, and take the update back."""
        self.steps[name] = self.log_probs[name] = None
        if all(grad is None for grad in gradient):
            return  # no token of the quartile has a gradient
        with trial_step(self.actor, self.space, gradient) as step:
            self.steps[name] = {**vars(step)}
            if step.is_taken:
                self.log_probs[name] = self._read_log_probs()

    @torch.no_grad()
    def _read_log_probs(self) -> torch.Tensor:
        """Every token's log-prob at the present weights, float32 (R, T), 0 where it is not measured."""
        found = torch.zeros(self._rows[QUARTILE_KEY].shape)
        for part in self.actor.micro_batches(self._rows):
            self.num_forwards += 1
            log_prob = self.actor.log_prob(part.inputs)
            if len(part.rows):
                found[part.rows] = log_prob.float().cpu()
        return found


def _only(weights: Weights, chosen: torch.Tensor) -> Weights:
    """The weights of the chosen tokens, 0 for all others, even where theirs is not finite."""
    keep = [None if given is None else given.where(chosen, 0.0) for given in (weights.log_prob, weights.entropy)]
    return Weights(*keep)
