# SPDX-License-Identifier: Apache-2.0
"""The copy of the policy that generates, on every verl: its weights on disk, and an answer as long as may be."""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from experiments.generation import sample

WEIGHTS = "weights"
"""The folder, within a run's, that holds the weights before each step: 0001.safetensors, ..."""
KNOBS = "knobs.json"
"""The file, within a run's folder, with the post-mortem's settings."""


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
