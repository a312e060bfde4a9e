# SPDX-License-Identifier: Apache-2.0
"""Use SmolLM2-135M-Instruct in place of the tests' decoder, with text for it. Needs transformers."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from lab.experiments.llm import build
from tests.toy_model import NUM_PROMPT, Batch, log_prob_of

NAME = "smollm2"


class Pretrained(torch.nn.Module):
    """A pretrained decoder with the interface of :mod:`tests.toy_model`: `blocks` with an `mlp`, a `head`, logits.

    Args:
        folder: the model's folder; loaded in float32.
    """

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        super().__init__()
        self.inner = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.train()

    @property
    def blocks(self) -> torch.nn.ModuleList:
        return self.inner.model.layers

    @property
    def head(self) -> torch.nn.Linear:
        return self.inner.lm_head

    def forward(self, tokens: torch.Tensor, num_last: int, precise: bool = False) -> torch.Tensor:
        """Return logits as :meth:`tests.toy_model.Decoder.forward` does."""
        hidden = self.inner.model(tokens, use_cache=False).last_hidden_state[:, -num_last:]
        return F.linear(hidden.float(), self.head.weight.float()) if precise else self.head(hidden)


def folder(cache: Path) -> Path:
    """Return the model's folder, which is fetched if need be."""
    return build.build(cache, lambda line: print(line, file=sys.stderr)) / "model"


def text(model: Path) -> torch.Tensor:
    """Return Python's language reference as token ids."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    return torch.tensor(AutoTokenizer.from_pretrained(model)("\n".join(topics.values()))["input_ids"])


def continued(model: Pretrained, source: torch.Tensor, rows: int, length: int, seed: int) -> Batch:
    """Return rows cut from text, each with a continuation sampled from the model.

    Args:
        model: unsharded.
        source: token ids.
        rows: R.
        length: T, the length of every continuation.
        seed: seed of everything; advantages are one standard normal number per row.
    """
    torch.manual_seed(seed)
    starts = torch.randint(len(source) - NUM_PROMPT, (rows,))
    prompts = torch.stack([source[start : start + NUM_PROMPT] for start in starts.tolist()])
    how = dict(do_sample=True, temperature=1.0, top_k=0, min_new_tokens=length, max_new_tokens=length)
    whole = model.inner.generate(prompts, attention_mask=torch.ones_like(prompts), **how)
    tokens, labels = whole[:, :-1], whole[:, NUM_PROMPT:]
    with torch.no_grad():
        log_probs = log_prob_of(model(tokens, length), labels)
    advantages = torch.randn(rows, 1).expand_as(log_probs).clone()
    return Batch(tokens, labels, torch.ones_like(labels, dtype=torch.bool), advantages, log_probs, log_probs.clone())
