# SPDX-License-Identifier: Apache-2.0
"""A trainer that nobody has heard of: rows, micro-batches of two, a clipped policy loss, and three lines of ours."""

from pathlib import Path
from typing import Any

import torch

import gradloc
from tests.bare import build, random_batch
from tests.world import DEVICE

PLANT, WORTH = (5, 2), 1e4
TAU = 400.0
ROWS = 2  # of a micro-batch


class ToyTrainer:
    """One optimizer step for each batch."""

    def __init__(self, model: torch.nn.Module, folder: Path | None = None, **settings: Any):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.watch = gradloc.Watch(
            model, self.optimizer, folder or ".", "off" if folder is None else settings.pop("action"), **settings
        )

    def log_prob(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.model(rows["input_ids"][:, :-1], rows["responses"].shape[1])
        return gradloc.token_log_probs(logits, rows["responses"])

    def loss(self, log_prob: torch.Tensor, rows: dict[str, torch.Tensor], num_tokens: int) -> torch.Tensor:
        ratio = (log_prob - rows["old_log_probs"]).exp()
        worst = torch.max(-rows["advantages"] * ratio, -rows["advantages"] * ratio.clamp(0.8, 1.2))
        return (worst * rows["response_mask"]).sum() / num_tokens

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        num_tokens = int(batch["response_mask"].sum())
        self.optimizer.zero_grad()
        for start in range(0, len(batch["responses"]), ROWS):
            rows = {name: values[start : start + ROWS] for name, values in batch.items()}
            of_policy = {name: rows[name] for name in ("old_log_probs", "advantages")}
            log_prob = self.watch.log_probs(
                lambda: self.log_prob(rows),  # noqa: B023 (as people write it)
                rows["response_mask"],
                rows["responses"],
                **of_policy,
            )
            self.loss(log_prob, rows, num_tokens).backward()
        norm = self.watch.clip_grad_norm_(1.0)
        self.optimizer.step()
        return float(norm)


def batch_of(worth: float = WORTH, seed: int = 0, plant: tuple[int, int] = PLANT) -> dict[str, torch.Tensor]:
    made = random_batch(build("tiny", seed), rows=8, seed=seed)
    batch = {
        "input_ids": torch.cat([made.tokens, made.labels[:, -1:]], 1),
        "responses": made.labels,
        "response_mask": made.mask.long(),
        "old_log_probs": made.old_log_probs,
        "advantages": made.planted({plant: worth}).advantages,
    }
    return {name: values.to(DEVICE) for name, values in batch.items()}
