# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct with the interface of :mod:`tests.toy_model`. Needs transformers."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from lab.experiments.llm import build


class Pretrained(torch.nn.Module):
    """A pretrained decoder with the forward of :class:`tests.toy_model.Decoder`.

    Args:
        folder: the model's folder; loaded in float32.
    """

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        super().__init__()
        self.inner = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.train()

    def forward(self, tokens: torch.Tensor, num_last: int, precise: bool = False) -> torch.Tensor:
        hidden = self.inner.model(tokens, use_cache=False).last_hidden_state[:, -num_last:]
        head = self.inner.lm_head
        return F.linear(hidden.float(), head.weight.float()) if precise else head(hidden)


def folder(cache: Path) -> Path:
    """Return the model's folder, which is fetched if need be."""
    return build.build(cache, lambda line: print(line, file=sys.stderr)) / "model"
