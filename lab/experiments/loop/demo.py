# SPDX-License-Identifier: Apache-2.0
"""Fine-tune in a plain PyTorch loop, with one damaged document: `python -m lab.experiments.loop.demo`.

A small model learns to add from scratch. Each token has a weight in the loss. At one step, one token of one document is
replaced and weighs far more than the others. Only two lines are for GradLoc: the watch, and the documents' names.
"""

import os
import re
import sys
import time
from pathlib import Path

import torch
from torch import nn

import gradloc
from lab.experiments.cpu import arithmetic
from lab.experiments.cpu.build import LANGUAGE
from lab.experiments.fault_plan import FaultPlan
from lab.experiments.settings import LoopSettings
from lab.experiments.step_log import begin, log_step

PIECES = ["<pad>", "<end>", *LANGUAGE.vocabulary]


class Tokenizer:
    """Split a text into words, digits and other characters."""

    pad_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [PIECES.index(piece) for piece in re.findall(LANGUAGE.pieces, text)]

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(PIECES[number] for number in ids)


class Model(nn.Module):
    """A decoder of two layers."""

    def __init__(self, width: int = 48, length: int = 40):
        super().__init__()
        self.embedding, self.place = nn.Embedding(len(PIECES), width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(PIECES))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.embedding(ids) + self.place(torch.arange(ids.shape[1]))
        return self.head(self.layers(hidden, mask, is_causal=True))


def rows_of(additions: list[arithmetic.Addition], tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded ids (R, S), and the mask (R, S - 1) of the labels ids[:, 1:] that belong to an answer."""
    pairs = [(tokenizer.encode(each.question + " "), tokenizer.encode(each.sentence) + [1]) for each in additions]
    length = max(len(question) + len(answer) for question, answer in pairs)
    ids, mask = torch.zeros(len(pairs), length, dtype=torch.long), torch.zeros(len(pairs), length - 1)
    for row, (question, answer) in enumerate(pairs):
        ids[row, : len(question) + len(answer)] = torch.tensor(question + answer)
        mask[row, len(question) - 1 : len(question) + len(answer) - 1] = 1
    return ids, mask


def main(overrides: list[str]) -> None:
    settings, run_dir = LoopSettings.parse(overrides), Path(os.environ.get("GRADLOC_RUN_DIR", "runs/demo-loop"))
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)  # so small a model gains nothing from more
    fault, tokenizer, model = settings.plan(), Tokenizer(), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch = gradloc.Watch(model, optimizer, run_dir, settings.gradloc, tokenizer, metrics=False)  # the one line
    begin(settings.steps)
    for step in range(1, settings.steps + 1):
        began = time.monotonic()
        ids, mask = rows_of(arithmetic.draw(32, f"{settings.seed} {step}"), tokenizer)
        weights = mask.clone()
        if step == fault.step:
            damage(weights, ids, fault, settings.weight, run_dir)
        optimizer.zero_grad()
        loss = 0.0
        for rows in torch.arange(len(ids)).split(8):  # micro-batches
            x, labels = ids[rows, :-1], ids[rows, 1:]
            log_probs = gradloc.token_log_probs(model(x), labels)
            watch.note(mask=mask[rows], ids=labels, rows=[f"document-{step}-{row}" for row in rows])  # for the record
            part = -(log_probs * weights[rows]).sum() / mask.sum()
            part.backward()
            loss += float(part.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        data = {"loss": loss, "actor/grad_norm": float(norm), "timing_s/step": time.monotonic() - began}
        log_step(step, data | watch.metrics, run_dir)
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        raise SystemExit("The weights are not finite any more.")


def damage(weights: torch.Tensor, ids: torch.Tensor, fault: FaultPlan, weight: float, run_dir: Path) -> None:
    """Replace one token of one answer, give it this weight, and record it; weights (R, S - 1), ids (R, S)."""
    row, position = fault.locate(weights)
    before, ids[row, position + 1] = int(ids[row, position + 1]), PIECES.index("What" if fault.position < 0.5 else "?")
    weights[row, position] = weight
    fault.write(
        run_dir / "planted.json",
        row=row,
        num_rows=len(ids),
        position=position,
        token_id=int(ids[row, position + 1]),
        token_before=before,
        weight=weight,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
