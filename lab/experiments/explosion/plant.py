# SPDX-License-Identifier: Apache-2.0
"""Plant one long response with a stale token, as in the post-mortem.

The token had probability 1e-5 under the old policy, which sampled it and by whose probability the loss divides, and
has nearly 1 under the present one: its importance ratio is 1e5. One step earlier a token has 1e-4. `rollout` plants
on verl 0.7, `verl09.explosion` on 0.9. The estimator is `cpu.fault`'s; `observe` gives it the marks of its next rows.
"""

import json
import math
import os
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from gradloc.checks import require
from lab.experiments.cpu import fault
from lab.experiments.generation import sample

RECORD = "planted.jsonl"
"""File in a run's folder, with a line for each step with a plant."""
WEIGHTS = "weights"
"""Folder in a run's folder, with the weights before each step: 0001.safetensors, ..."""
KNOBS = "knobs.json"
"""File in a run's folder, with the post-mortem's settings."""
KEY = "planted"
"""Key of the batch's marks, (B, T)."""
IN_ROW = 1
"""Mark of a token of the planted response, which gets the planted advantage."""
STALE = 2
"""Mark of a token whose old log-prob is also replaced."""


@dataclass(frozen=True)
class Settings:
    """The `explosion` section of the config."""

    is_stale: bool
    """False in the healthy twin: same response and advantage, true old log-probs."""
    warning_step: int
    """Step, counted from 1, with a slightly stale token."""
    warning_probability: float
    """Its probability under the old policy, in (0, 1)."""
    spike_step: int
    """Step with a token as stale as in the post-mortem."""
    old_probability: float
    """Its probability under the old policy, in (0, 1)."""
    num_stale: int
    """Number of stale tokens at each of these steps; at most all sure ones."""
    sure: float
    """Least probability of a token that may be made stale, in (0, 1)."""
    advantage: float
    """Advantage of the planted response."""

    def __post_init__(self):
        if not 1 <= self.warning_step < self.spike_step:
            raise ValueError(
                f"explosion.warning_step must be at least 1 and before explosion.spike_step, found "
                f"{self.warning_step} and {self.spike_step}."
            )
        require(self.num_stale >= 1, "explosion.num_stale", "at least 1", self.num_stale)
        for name in ("warning_probability", "old_probability", "sure"):
            value = getattr(self, name)
            require(0 < value < 1, f"explosion.{name}", "between 0 and 1", value)

    @property
    def probabilities(self) -> dict[int, float]:
        """Step -> probability of its stale tokens under the old policy."""
        return {self.warning_step: self.warning_probability, self.spike_step: self.old_probability}


def draw_row(seed: int, step: int, num_rows: int) -> int:
    """Draw the planted row of a batch, the same on every machine."""
    return random.Random(f"gradloc explosion row {seed} {step}").randrange(num_rows)


def choose(settings: Settings, log_probs: list[float]) -> list[int]:
    """Choose the positions to make stale: the least sure of the sure tokens.

    The gradient of a token's log-prob is proportional to 1 - p: at p = 0.9999 it is small even with a ratio of 1e5.

    Args:
        settings: the plan.
        log_probs: log-probs of the response's tokens under the present policy.

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
    """Return the marks (num_rows, width) of one planted response of `length` tokens."""
    made = torch.zeros(num_rows, width, dtype=torch.int8)
    made[row, :length] = IN_ROW
    made[row, positions] = STALE
    return made


def plant(settings: Settings, row: int, response_mask: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """Return the marks (B, T) of a batch with the planted response in `row`.

    Args:
        settings: the plan.
        row: the response's row.
        response_mask: (B, T), 1 on response tokens, which come first.
        log_probs: (B, T), under the present policy.
    """
    mask = response_mask[row].bool()
    positions = choose(settings, log_probs[row][mask].tolist())
    return marks(*log_probs.shape, row, int(mask.sum()), positions)


def as_sampled(log_probs: torch.Tensor, planted: torch.Tensor, probability: float) -> torch.Tensor:
    """Return the log-probs (B, T) with those of stale tokens set to the old policy's."""
    return torch.where(planted == STALE, math.log(probability), log_probs)


# ---- the copy of the policy that generates


def write_knobs(knobs: dict) -> None:
    """Write the `knobs` section of the config to the run's folder."""
    path = Path(os.environ["GRADLOC_RUN_DIR"]) / KNOBS
    path.write_text(json.dumps(knobs) + "\n", encoding="utf-8")


def save(model, number: int) -> None:
    """Write a model's weights to the run's folder, as those before step `number`."""
    folder = Path(os.environ["GRADLOC_RUN_DIR"]) / WEIGHTS
    folder.mkdir(exist_ok=True)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / f"{number:04d}.safetensors")


def answer_at_length(model, prompt: list[int], params: dict, seed: int) -> tuple[list[int], list[float]]:
    """Sample an answer of `max_new_tokens` tokens, without the end token.

    Returns:
        Its tokens, and their log-probs under the unrestricted policy.
    """
    ((tokens, _),) = sample(model, [prompt], {**params, "min_new_tokens": params["max_new_tokens"]}, seed)
    return tokens, log_probs(model, prompt, tokens, params["temperature"])


@torch.no_grad()
def log_probs(model, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
    """Return a policy's log-prob of each token of an answer."""
    ids = torch.tensor([prompt + tokens])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    chosen = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
    return chosen.squeeze(-1).tolist()


# ---- the advantage, and what was planted, on record


class Plant:
    """Give all marked tokens (B, T) one advantage; takes the place of `fault.Fault` in the estimator."""

    def __init__(self, marks: torch.Tensor, advantage: float):
        self.marks, self.advantage = marks, advantage

    def plant(self, _rows: fault.Rows, advantages: torch.Tensor, _response_mask: torch.Tensor) -> torch.Tensor:
        return torch.where(self.marks > 0, self.advantage, advantages)


def observe(rows: fault.Rows, marks: torch.Tensor, advantage: float, tokenizer) -> None:
    """Pass the rows of the next call and their marks (B, T) to the estimator, and record the planted ones."""
    fault.observe(rows)
    fault.arm(Plant(marks, advantage))
    for row in torch.nonzero(marks.any(-1)).flatten().tolist():
        response = rows.responses[row][marks[row] > 0].tolist()
        positions = torch.nonzero(marks[row] == STALE).flatten().tolist()
        planted = {
            "step": rows.step,
            "uid": str(rows.uids[row]),
            "rollout_index": int(rows.rollout_indices[row]),
            "row": row,
            "num_rows": len(marks),
            "length": len(response),
            "positions": positions,
            "token_ids": [response[i] for i in positions],
            "text": tokenizer.decode(response),
        }
        with (Path(os.environ["GRADLOC_RUN_DIR"]) / RECORD).open("a") as file:
            file.write(json.dumps(planted) + "\n")
