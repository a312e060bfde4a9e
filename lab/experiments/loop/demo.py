# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning in a plain PyTorch loop, one document damaged: `python -m lab.experiments.loop.demo`.

A small model learns to add, from nothing. Each token has a weight in the loss. At one step a token of one document is
another one, and weighs far more than the others. GradLoc needs the one line that says so; a second one gives it the
documents' names. The rest is what any loop has.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

import torch
from torch import nn

import gradloc
from lab.experiments.cpu import arithmetic
from lab.experiments.settings import FaultPlan, LoopSettings, draw

PIECES = ["<pad>", "<end>", *"0123456789+=,.?", "What", " is", " so", " the", " answer", " "]


class Tokenizer:
    """A word, a digit or another character is a token."""

    pad_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [PIECES.index(piece) for piece in re.findall(r" ?[A-Za-z]+|\d|\s|[^\sA-Za-z\d]", text)]

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
    """ids (R, S), padded on the right, and the mask of the labels ids[:, 1:] that are of an answer (R, S - 1)."""
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
    torch.set_num_threads(1)  # more cost more than they gain, of a model of this size
    fault, tokenizer, model = draw(settings.seed, settings.first_step, settings.last_step), Tokenizer(), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch = gradloc.Watch(model, optimizer, run_dir, settings.gradloc, tokenizer, metrics=False)  # the one line
    print(f"Total training steps: {settings.steps}", flush=True)
    for step in range(1, settings.steps + 1):
        began = time.monotonic()
        ids, mask = rows_of(arithmetic.draw(32, f"{settings.seed} {step}"), tokenizer)
        weights = mask.clone()
        if step == fault.step:
            damage(weights, ids, fault, settings, run_dir)
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
        log(
            step,
            {"loss": loss, "actor/grad_norm": float(norm), "timing_s/step": time.monotonic() - began},
            watch,
            run_dir,
        )
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        raise SystemExit("The weights are not finite any more.")


def damage(weights: torch.Tensor, ids: torch.Tensor, fault: FaultPlan, settings: LoopSettings, run_dir: Path) -> None:
    """Make one token of one answer another one, with another weight, and write down which."""
    row = int(fault.sequence * len(ids))
    places = weights[row].nonzero().flatten().tolist()
    position = places[int(fault.position * len(places))]
    weights[row, position], before = settings.weight, int(ids[row, position + 1])
    ids[row, position + 1] = PIECES.index("What" if fault.position < 0.5 else "?")
    planted = {
        "seed": settings.seed,
        "step": fault.step,
        "row": row,
        "num_rows": len(ids),
        "position": position,
        "token_id": int(ids[row, position + 1]),
        "token_before": before,
        "weight": settings.weight,
    }
    (run_dir / "planted.json").write_text(json.dumps(planted, indent=2) + "\n", encoding="utf-8")


def log(step: int, data: dict[str, float], watch: gradloc.Watch, run_dir: Path) -> None:
    """A line of the console, as verl's logger writes it, and one of metrics.jsonl."""
    data = data | watch.metrics
    said = " - ".join(f"{name}:{value:.6g}" for name, value in data.items())
    print(f"step:{step} - {said}", flush=True)
    with (run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "data": data}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
