# SPDX-License-Identifier: Apache-2.0
"""A trainer that nobody has heard of localizes, with an adapter of one file: what CONTRIBUTING promises to a third."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.adapters.toy import Watch
from tests.bare import build, random_batch

PLANT, WORTH = (5, 2), 1e4
TAU = 400.0


ROWS = 2  # of a micro-batch


class ToyTrainer:
    """A batch of rows, micro-batches of two, a clipped policy loss; the lines with ``watch`` are what we add to it."""

    grad_clip = 1.0

    def __init__(self, model: torch.nn.Module, dump_dir: Path | None = None, **settings: Any):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.watch = None if dump_dir is None else Watch(self, str(dump_dir), tau=TAU, **settings)

    def logits(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(rows["input_ids"][:, :-1], rows["responses"].shape[1]).float()

    def log_prob(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.logits(rows).log_softmax(-1).gather(-1, rows["responses"][..., None]).squeeze(-1)

    def loss(self, log_prob: torch.Tensor, rows: dict[str, torch.Tensor], num_tokens: int) -> torch.Tensor:
        ratio = (log_prob - rows["old_log_probs"]).exp()
        worst = torch.max(-rows["advantages"] * ratio, -rows["advantages"] * ratio.clamp(0.8, 1.2))
        return (worst * rows["response_mask"]).sum() / num_tokens

    def step(self, batch: dict[str, torch.Tensor], number: int) -> float:
        num_tokens, watch = int(batch["response_mask"].sum()), self.watch
        self.optimizer.zero_grad()
        if watch:
            watch.begin(batch, number)
        for start in range(0, len(batch["responses"]), ROWS):
            rows = {name: values[start : start + ROWS] for name, values in batch.items()}
            if watch:
                watch.step.before_forward(rows, start)
            log_prob = self.log_prob(rows)
            if watch:
                watch.step.after_forward(log_prob)
            self.loss(log_prob, rows, num_tokens).backward()
            if watch:
                watch.localizer.after_backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        if watch:
            norm = watch.localizer.before_step(norm)
        self.optimizer.step()
        if watch:
            watch.end(batch)
        return float(norm)


def batch_of(worth: float = WORTH) -> dict[str, torch.Tensor]:
    made = random_batch(build("tiny"), rows=8)
    return {
        "input_ids": torch.cat([made.tokens, made.labels[:, -1:]], 1),
        "attention_mask": torch.ones(len(made.tokens), made.tokens.shape[1] + 1, dtype=torch.long),
        "responses": made.labels,
        "response_mask": made.mask.long(),
        "old_log_probs": made.old_log_probs,
        "advantages": made.planted({PLANT: worth}).advantages,
    }


def weights(trainer: ToyTrainer) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in trainer.model.parameters()])


def test_it_names_the_planted_token_and_writes_the_event(tmp_path):
    trainer = ToyTrainer(build("tiny"), tmp_path, mode="observe")
    trainer.step(batch_of(), 1)
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (culprit,) = event["culprits"]
    assert (culprit["row"], *culprit["positions"]) == PLANT
    assert event["certificate"]["verdict"] == "explained" and trainer.watch.metrics["gradloc/spikes"] == [1]


def test_observing_trains_as_if_nobody_looked_bit_for_bit(tmp_path):
    watched, plain = ToyTrainer(build("tiny"), tmp_path, mode="observe"), ToyTrainer(build("tiny"))
    for number in (1, 2):
        assert watched.step(batch_of(), number) == plain.step(batch_of(), number)
    assert torch.equal(weights(watched), weights(plain))


def test_masking_trains_as_without_the_token_bit_for_bit(tmp_path):
    masked = ToyTrainer(build("tiny"), tmp_path, mode="mask")
    without = ToyTrainer(build("tiny"))
    assert masked.step(batch_of(), 1) == without.step(batch_of(worth=0.0), 1)
    assert torch.equal(weights(masked), weights(without))


def test_the_adapter_is_short():
    text = (Path(__file__).parent / "toy.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
