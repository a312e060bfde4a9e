# SPDX-License-Identifier: Apache-2.0
"""What is planted and where: one long response, and in it a token that was improbable once.

The story is the post-mortem's: a token had probability 1e-5 under the policy that sampled it (the old one, by whose
probability the loss divides), and has nearly 1 under the present one. Its importance ratio is then 1e5. One step
earlier there is one of 1e-4. What is here serves every verl: `rollout` plants on 0.7, `verl09.explosion` on 0.9.
`cpu.fault` has the estimator; what sees the same rows in the same order, just before and in the same
process, tells it which are planted.
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
"""The file, within a run's folder, with one line for each step at which something was planted."""
WEIGHTS = "weights"
"""The folder, within a run's, that holds the weights before each step: 0001.safetensors, ..."""
KNOBS = "knobs.json"
"""The file, within a run's folder, with the post-mortem's settings."""
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
        require(self.num_stale >= 1, "explosion.num_stale", "at least 1", self.num_stale)
        for name in ("warning_probability", "old_probability", "sure"):
            value = getattr(self, name)
            require(0 < value < 1, f"explosion.{name}", "between 0 and 1", value)

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


# ---- the copy of the policy that generates


def write_knobs(knobs: dict) -> None:
    """Writes the `knobs` section of the config to the run's folder."""
    path = Path(os.environ["GRADLOC_RUN_DIR"]) / KNOBS
    path.write_text(json.dumps(knobs) + "\n", encoding="utf-8")


def save(model, number: int) -> None:
    """Writes a model's weights to the run's folder, as those before step `number`."""
    folder = Path(os.environ["GRADLOC_RUN_DIR"]) / WEIGHTS
    folder.mkdir(exist_ok=True)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / f"{number:04d}.safetensors")


def answer_at_length(model, prompt: list[int], params: dict, seed: int) -> tuple[list[int], list[float]]:
    """An answer of `max_new_tokens` tokens: the end token is not sampled, though the policy might have.

    Returns:
        Its tokens, and the policy's own log-probs of them, in which the end token is possible.
    """
    ((tokens, _),) = sample(model, [prompt], {**params, "min_new_tokens": params["max_new_tokens"]}, seed)
    return tokens, log_probs(model, prompt, tokens, params["temperature"])


@torch.no_grad()
def log_probs(model, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
    """What a policy gives each token of an answer."""
    ids = torch.tensor([prompt + tokens])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    chosen = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
    return chosen.squeeze(-1).tolist()


# ---- the advantage, and what was planted, on record


class Plant:
    """What the estimator plants, in the place of a `fault.Fault`: an advantage on all tokens with a mark, (B, T)."""

    def __init__(self, marks: torch.Tensor, advantage: float):
        self.marks, self.advantage = marks, advantage

    def plant(self, _rows: fault.Rows, advantages: torch.Tensor, _response_mask: torch.Tensor) -> torch.Tensor:
        return torch.where(self.marks > 0, self.advantage, advantages)


def observe(rows: fault.Rows, marks: torch.Tensor, advantage: float, tokenizer) -> None:
    """Tells the estimator the rows of its next call and their (B, T) marks, and writes down what is planted."""
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
