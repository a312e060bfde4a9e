# SPDX-License-Identifier: Apache-2.0
"""What the workers measure: gradients by probability quartile, single tokens' gradients, and trial updates.

One training pass over the batch, cut into training's own micro-batches, gives the whole gradient and, by hooks, the
derivative of training's loss by each log-prob and entropy. A quartile's gradient is then the backward of the sum of
its tokens' log-probs times these coefficients: nothing that goes into the loss is changed, so the four parts add up to
the whole. How far they miss it is measured (the closure).

A trial update is the actor's own optimizer and clipping, then everything as it was: weights, optimizer state and the
options of its parameter groups come back bit for bit.

Shapes: R rows on this rank, T response positions, S sampled tokens.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ..core.gradients import Gradient, GradientSpace
from ..core.sharding import local_shard
from ..core.step import Outputs, Recorded, RngState, record
from ..record.analysis import Update
from ..search.weights import MovedWeights
from .actor import BUCKET_KEY, Actor, ActorMicroBatch, RowProbe, Weights, add_up, only
from .quartiles import NUM_QUARTILES, UPDATES, QuartileNumbers

QUARTILE_KEY = "gradloc_quartile"
"""int (R, T): each token's quartile; -1 for what is no response token and for rows that only fill up the ranks."""
SAMPLE_KEY = "gradloc_sample"
"""int (R, T): the number of each sampled token, from 0 on; -1 for all others."""


class QuartileProbe(RowProbe):
    """One analysis on one rank. Four gradients at a time wait in host memory."""

    parts: list[Gradient]
    """Per quartile, the additive part of the gradient."""
    whole: Gradient
    """The whole batch's gradient, from a pass of its own."""

    def measure(self, num_sampled: int) -> QuartileNumbers:
        """The numbers, with S tokens sampled over all ranks; each row's bucket is 0, or -1 for a filling row."""
        weights, device = self._training_pass(), self.actor.device
        quartiles, samples = self.rows[QUARTILE_KEY].to(device), self.rows[SAMPLE_KEY].to(device)
        self.parts = [self.gradient(only(weights, quartiles == quartile)) for quartile in range(NUM_QUARTILES)]
        tokens = [self._token(weights, samples == number) for number in range(num_sampled)]
        self.actor.module.eval()
        steps: dict[str, Update | None] = {}
        log_probs: dict[str, np.ndarray | None] = {"before": self._read_log_probs()}
        for name, chosen in UPDATES.items():
            steps[name], log_probs[name] = self._try(self._gradient_of(chosen))
        whole = self.space.norm(self.whole)
        return {
            "terms": list(self.actor.terms),
            "whole": whole,
            "norms": [self.space.norm(part) for part in self.parts],
            "dots": [float(self.space.dots(part, self.whole).sum()) for part in self.parts],
            "closure": self._distance() / whole if whole != 0 else None,
            "tokens": tokens,
            "steps": steps,
            "optimizer": type(self.actor.optimizer).__name__,
            "learning_rate": max(float(group["lr"]) for group in self.actor.optimizer.param_groups),
            "log_probs": log_probs,
            "forwards": self.num_forwards,
            "backwards": self.num_backwards,
        }

    def _distance(self) -> float:
        """From the sum of the parts to the whole."""
        total: Gradient | None = None
        for part in self.parts:
            total = add_up(total, part)
        for left, right in zip(total, self.whole, strict=True):
            if left is not None and right is not None:
                left.sub_(right)
        return self.space.norm(total)

    def _training_pass(self) -> Weights:
        """Accumulate the whole batch's gradient as training does; keep every token's coefficients on the way."""
        num_rows = int(self.ranks.sum([float((self.rows[BUCKET_KEY] >= 0).sum())])[0])
        names = ("log_prob", "entropy") if "entropy" in self.actor.terms else ("log_prob",)
        weights = {name: torch.zeros(self.rows[QUARTILE_KEY].shape, device=self.actor.device) for name in names}
        self.space.clear()
        for part in self.actor.micro_batches(self.rows):
            self._train_on(part, num_rows, weights)
        self.whole = self.take()
        return weights

    def _train_on(self, part: ActorMicroBatch, num_rows: int, weights: Weights) -> None:
        self.num_forwards += 1
        self.num_backwards += 1
        recorded = Recorded(RngState(self.actor.device))
        log_prob, entropy = self.actor.forward(part.inputs)
        record(recorded, Outputs(log_prob, entropy))
        if len(part.rows):
            terms = self.actor.loss_terms(part.inputs, log_prob, entropy, part.on_policy)
            loss = sum(value * self.actor.share(part, term, num_rows) for term, value in terms.items())
            loss = loss * self.ranks.size
        else:
            loss = (log_prob * 0).sum()  # peers' collectives wait for this backward
        scale = self.actor.loss_scale
        (loss * scale).backward()
        if len(part.rows):
            for name, values in weights.items():
                values[part.rows] = getattr(recorded, f"{name}_coefficient").float() / scale

    def _token(self, weights: Weights, is_token: torch.Tensor) -> dict[str, float]:
        """The norms of one token's own gradients.

        Returns:
            ``log_prob_norm``: of its log-prob; ``loss_norm``: of its additive part of the training loss.
        """
        log_prob_norm = self.space.norm(self.gradient({"log_prob": is_token.float() * self.ranks.size}))
        if "entropy" in weights:
            return {
                "log_prob_norm": log_prob_norm,
                "loss_norm": self.space.norm(self.gradient(only(weights, is_token))),
            }
        mine = weights["log_prob"][is_token]  # empty on the ranks that do not have it
        coefficient = self.ranks.sum([float(mine.sum())])[0] / self.ranks.size
        return {"log_prob_norm": log_prob_norm, "loss_norm": abs(coefficient) * log_prob_norm}

    def _gradient_of(self, quartiles: tuple[int, ...]) -> Gradient:
        """What an update of these quartiles takes: the whole gradient, one part, or zeros."""
        if len(quartiles) == NUM_QUARTILES:
            return self.whole
        if quartiles:
            return self.parts[quartiles[0]]
        return [None if grad is None else torch.zeros_like(grad) for grad in self.whole]

    def _try(self, gradient: Gradient) -> tuple[Update | None, np.ndarray | None]:
        """Update with this gradient, read every token's log-prob, and take the update back."""
        if all(grad is None for grad in gradient):
            return None, None  # no token of the quartile has a gradient
        with trial_step(self.actor, self.space, gradient) as step:
            return step, self._read_log_probs() if step.is_taken else None

    @torch.no_grad()
    def _read_log_probs(self) -> np.ndarray:
        """Every token's log-prob at the present weights, float32 (R, T), 0 where it is not measured."""
        log_probs = torch.zeros(self.rows[QUARTILE_KEY].shape)
        for part in self.actor.micro_batches(self.rows):
            self.num_forwards += 1
            log_prob = self.actor.log_prob(part.inputs)
            if len(part.rows):
                log_probs[part.rows] = log_prob.float().cpu()
        return log_probs.numpy()


@contextmanager
def trial_step(actor: Actor, space: GradientSpace, gradient: Gradient) -> Iterator[Update]:
    """Context in which the actor's weights are those after a step with this gradient; as in verl, none is taken where
    its norm is not finite.

    Gradients and random state are the caller's to set aside.

    Args:
        actor: whose optimizer and clipping it is. Stabilizers are left out, for they would learn from the step.
        space: the actor's parameters; ``.grad`` is scratch space and is left empty.
        gradient: local shards in host memory; a parameter without one is not updated.
    """
    with MovedWeights(space, torch.float32) as weights, kept_optimizer(actor.optimizer):
        space.put([None if grad is None else grad.clone() for grad in gradient])  # clipped in place
        norm = float(actor.clip().detach())
        if math.isfinite(norm):
            actor.optimizer.step()
        space.clear()
        space.reshard()
        clip_factor = min(1.0, actor.grad_clip / (norm + 1e-6)) if math.isfinite(norm) else 1.0
        yield Update(
            is_taken=math.isfinite(norm), grad_norm=norm, clip_factor=clip_factor, update_norm=weights.distance()
        )


@contextmanager
def kept_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put an optimizer's state and options back bit for bit; what verl has offloaded is on the device meanwhile."""
    options = [dict(group) for group in optimizer.param_groups]
    entries = {param: dict(state) for param, state in optimizer.state.items()}
    saved = []
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            if value.dim() > 0 and value.device != param.device:
                state[key] = value.to(param.device)  # the step changes this copy
            else:
                saved.append((value, local_shard(value).to("cpu", copy=True)))
    try:
        yield
    finally:
        with torch.no_grad():
            for value, copied in saved:
                local_shard(value).copy_(copied)
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(before)
        optimizer.state.clear()
        optimizer.state.update(entries)
