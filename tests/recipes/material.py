# SPDX-License-Identifier: Apache-2.0
"""A tiny model that has learned to count, and documents that count; one of them, planted, does not.

    python -m tests.recipes.material FOLDER

Every trainer's own command can read what this makes: a transformers model with its tokenizer, and documents as prompts
and completions, as messages, and in LLaMA-Factory's form.
"""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = 64
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>"]
PROMPT, LENGTH, DOCUMENTS, ROWS = 4, 12, 32, 4
"""Words of a prompt, of a completion at least, documents in all, and in a step."""
PLANTED = 22
STEP = PLANTED // ROWS + 1
"""The step that the planted document comes in, where nothing is shuffled."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"


def words(first: int, end: int) -> str:
    return " ".join(f"w{number}" for number in range(first, end))


def documents() -> list[tuple[str, str]]:
    """Return pairs of a prompt and a completion, which counts to the last word."""
    draw = random.Random(3)
    firsts = [draw.randrange(WORDS - LENGTH - PROMPT) for _ in range(DOCUMENTS)]
    pairs = [(words(first, first + PROMPT), words(first + PROMPT, WORDS)) for first in firsts]
    damaged = [draw.randrange(WORDS) for _ in range(LENGTH)]
    pairs[PLANTED] = (pairs[PLANTED][0], " ".join(f"w{number}" for number in damaged))
    return pairs


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate([*SPECIALS, *(f"w{n}" for n in range(WORDS))])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIALS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=TEMPLATE, **names)


def trained_model() -> LlamaForCausalLM:
    """Return a model whose next word is almost always the right one."""
    torch.manual_seed(1)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    size = {"vocab_size": WORDS + len(SPECIALS), "hidden_size": 64, "intermediate_size": 128, **heads}
    model = LlamaForCausalLM(LlamaConfig(**size, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        shifts = torch.randint(-4, WORDS - LENGTH, (16, 1))  # where a document begins, behind up to four of "<s>"
        numbers = shifts + torch.arange(WORDS + 4)
        ids = torch.where(numbers < WORDS, numbers + len(SPECIALS), 2).where(numbers >= 0, 1)
        labels = ids.where(numbers.roll(1, 1) < WORDS, -100)  # up to the first "</s>"
        model(input_ids=ids, labels=labels.where(numbers > 0, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main(folder: Path) -> None:
    """Write the model to ``model``, and the documents to ``data`` and two forms beside it."""
    tokenizer().save_pretrained(folder / "model")
    trained_model().save_pretrained(folder / "model")
    (folder / "data").mkdir(exist_ok=True)
    pairs = documents()
    rows = {
        "data/train.jsonl": [{"prompt": f"{prompt} ", "completion": completion} for prompt, completion in pairs],
        "messages.jsonl": [
            {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]}
            for prompt, completion in pairs
        ],
        "alpaca.json": [{"instruction": prompt, "input": "", "output": completion} for prompt, completion in pairs],
    }
    for name, each in rows.items():
        text = json.dumps(each) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in each)
        (folder / name).write_text(text)
    (folder / "dataset_info.json").write_text(json.dumps({"counting": {"file_name": "alpaca.json"}}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
