# SPDX-License-Identifier: Apache-2.0
"""A loop in Lightning Fabric over what :mod:`tests.recipes.material` made, which `fabric run` starts.

fabric run --accelerator=cpu tests/recipes/fabric.py MATERIAL FOLDER
"""

import json
import sys
from pathlib import Path

import lightning
import torch
from transformers import AutoModelForCausalLM

import gradloc
from tests.recipes.material import ROWS, STEP, tokenizer


def main(material: Path, folder: str) -> None:
    fabric = lightning.Fabric()
    words = tokenizer()
    model = AutoModelForCausalLM.from_pretrained(material / "model")
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
    gradloc.Watch(model, optimizer, folder, trigger={"tau": 4.0})
    rows = [json.loads(line) for line in (material / "data" / "train.jsonl").read_text().splitlines()]
    for first in range(0, STEP * ROWS, ROWS):
        parts = [(words.encode(row["prompt"]), words.encode(row["completion"])) for row in rows[first:][:ROWS]]
        ids = [torch.tensor([*prompt, *completion, words.eos_token_id]) for prompt, completion in parts]
        labels = [each.clone() for each in ids]
        for each, (prompt, _) in zip(labels, parts, strict=True):
            each[: len(prompt)] = -100
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        loss = model(
            input_ids=padded, labels=torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        ).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
