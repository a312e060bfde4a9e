# SPDX-License-Identifier: Apache-2.0
"""Sample from a plain transformers model, for the rollouts on every verl."""

import numpy as np
import torch


@torch.no_grad()
def sample(model, prompt_ids: list[list[int]], params: dict, seed: int) -> list[tuple[list[int], list[float]]]:
    """Answer a batch of prompts; torch's global generator is not changed.

    Args:
        model: a causal language model that has its end token in `generation_config`.
        prompt_ids: one list of token ids per prompt.
        params: `temperature`, `top_p`, `do_sample`, `max_new_tokens`, `pad_token_id`.
        seed: seed of this call's random numbers.

    Returns:
        One `(token_ids, log_probs)` per prompt, both up to and including the end token.
    """
    params = dict(params)
    pad = params["pad_token_id"]
    if not params["do_sample"]:
        params.update(temperature=1.0, top_p=1.0)
    inputs = left_pad(prompt_ids, pad)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        output = model.generate(**inputs, **params, top_k=0, return_dict_in_generate=True, output_scores=True)
    tokens = output.sequences[:, inputs["input_ids"].shape[1] :]
    log_probs = torch.stack(output.scores, dim=1).float().log_softmax(-1)
    chosen = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    eos = model.generation_config.eos_token_id
    return [cut_at(eos, *row) for row in zip(tokens.tolist(), chosen.tolist(), strict=True)]


def call_seed(seed: int, step: int, rank: int) -> int:
    """Return a 32-bit seed, in effect different for any two calls of a run."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])


def cut_at(eos: int, tokens: list[int], log_probs: list[float]) -> tuple[list[int], list[float]]:
    """Drop the tokens after the first end token."""
    end = tokens.index(eos) + 1 if eos in tokens else len(tokens)
    return tokens[:end], log_probs[:end]


def left_pad(rows: list[list[int]], pad: int, width: int | None = None) -> dict[str, torch.Tensor]:
    """Stack prompts with padding on the left: `input_ids` and `attention_mask`, (B, T) each."""
    width = width or max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}
