# SPDX-License-Identifier: Apache-2.0
"""Train a small language model on the standard library, a minute: python -m lab.benchmarks.mismatch.tiny FOLDER."""

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, STEPS, ROWS, WIDTH = 1024, 260, 12, 96


def main(folder: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    texts = [
        file.read_text("utf-8", errors="replace") for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    ]
    texts = [text[:20000] for text in texts]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    ids = torch.tensor([each for text in texts[:80] for each in tokenizer(text)["input_ids"]])
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=320, num_hidden_layers=4,
                         num_attention_heads=4, max_position_embeddings=1024, tie_word_embeddings=True)  # fmt: skip
    model = LlamaForCausalLM(config)
    adam = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 4e-3, total_steps=STEPS)
    for step in range(STEPS):
        begins = torch.randint(len(ids) - WIDTH, (ROWS,))
        rows = torch.stack([ids[begin : begin + WIDTH] for begin in begins])
        loss = model(rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        schedule.step()
        adam.zero_grad()
        if step % 20 == 0:
            print(step, float(loss), flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
