# SPDX-License-Identifier: Apache-2.0
"""Builds what the demo trains from nothing: tokenizer, tiny model, data. No hub is asked.

The model gets a short supervised warm-up, so that what it writes can be read; label smoothing keeps
every token uncertain enough to have a gradient. The result is kept in a folder named after the
settings below, and built again only when they change.

    python -m experiments.cpu.build --cache .gradloc
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.cpu import arithmetic

SPECIAL = ["<pad>", "<unk>", "<user>", "<assistant>", "<end>"]
WORDS = ["What", " is", " so", " the", " answer", " "]
CHARACTERS = list("0123456789+=,.?")
# A word with the space before it, or one digit, or one other character.
PIECES = r" ?[A-Za-z]+|\d|\s|[^\sA-Za-z\d]"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<assistant>' }}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """Everything the result depends on."""

    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    warmup_steps: int = 400
    warmup_batch: int = 128
    learning_rate: float = 4e-3
    label_smoothing: float = 0.04
    num_train: int = 512
    num_val: int = 32
    seed: int = 0

    @property
    def digest(self) -> str:
        text = json.dumps([asdict(self), SPECIAL, WORDS, CHARACTERS, PIECES, CHAT_TEMPLATE])
        source = Path(__file__).read_bytes() + Path(arithmetic.__file__).read_bytes()
        return hashlib.sha256(text.encode() + source).hexdigest()[:12]


def build(cache: Path, recipe: Recipe | None = None, report=print) -> Path:
    """Returns the folder with `model/`, `train.parquet` and `val.parquet`, made if need be."""
    recipe = recipe or Recipe()
    target = cache / f"demo-{recipe.digest}"
    if target.is_dir():
        report(f"model and data: {target} (kept from an earlier run)")
        return target
    cache.mkdir(parents=True, exist_ok=True)
    # Another folder first: a build that was interrupted must not be taken for a whole one.
    work = Path(tempfile.mkdtemp(prefix="demo-", dir=cache))
    try:
        write_data(work, recipe)
        tokenizer = make_tokenizer()
        model = make_model(recipe, tokenizer)
        warm_up(model, tokenizer, recipe, report)
        tokenizer.save_pretrained(work / "model")
        model.save_pretrained(work / "model")
        os.chmod(work, 0o755)
        work.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        # Two demos built at once; the other one was faster.
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report(f"model and data: {target}")
    return target


def write_data(folder: Path, recipe: Recipe) -> None:
    """Writes the two parquet files that verl reads."""
    import pyarrow
    import pyarrow.parquet

    additions = arithmetic.draw(recipe.num_train + recipe.num_val, f"data {recipe.seed}")
    splits = {"train": additions[: recipe.num_train], "val": additions[recipe.num_train :]}
    for split, part in splits.items():
        rows = [arithmetic.to_row(i, addition, split) for i, addition in enumerate(part)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")


def make_tokenizer():
    """A word-level tokenizer whose vocabulary is the demo's whole language."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {piece: i for i, piece in enumerate(SPECIAL + CHARACTERS + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def make_model(recipe: Recipe, tokenizer):
    """A random Qwen3 of about 100 thousand parameters, in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=2 * recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads // 2,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def warm_up(model, tokenizer, recipe: Recipe, report) -> float:
    """Teaches the model to write the sentences; returns the last loss."""
    import torch

    # So small a model gains nothing from a second thread, and threads that wait for each other on
    # a busy machine lose minutes.
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.warmup_steps
    )
    start = time.perf_counter()
    for step in range(1, recipe.warmup_steps + 1):
        batch = arithmetic.draw(recipe.warmup_batch, f"warm-up {recipe.seed} {step}")
        ids, labels = encode(tokenizer, batch)
        logits = model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id)).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1),
            labels[:, 1:].flatten(),
            label_smoothing=recipe.label_smoothing,
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            seconds = time.perf_counter() - start
            report(f"  warm-up {step}/{recipe.warmup_steps} loss {loss.item():.3f} {seconds:.0f} s")
    return loss.item()


def encode(tokenizer, additions):
    """Token ids and labels, (B, T) each, left-padded; -100 where the model is not taught."""
    import torch

    prompts, whole = [], []
    for addition in additions:
        messages = [{"role": "user", "content": addition.question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        answer = tokenizer.encode(addition.sentence) + [tokenizer.eos_token_id]
        prompts.append(len(prompt))
        whole.append(prompt + answer)
    width = max(map(len, whole))
    ids = torch.full((len(whole), width), tokenizer.pad_token_id)
    labels = torch.full((len(whole), width), -100)
    for i, (num_prompt, row) in enumerate(zip(prompts, whole, strict=True)):
        ids[i, width - len(row) :] = torch.tensor(row)
        labels[i, width - len(row) + num_prompt :] = torch.tensor(row[num_prompt:])
    return ids, labels


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="the folder to keep results in")
    parser.add_argument("--quiet", action="store_true", help="print only the resulting folder")
    args = parser.parse_args(argv)

    def report(line):
        if not args.quiet:
            print(line, file=sys.stderr, flush=True)

    print(build(args.cache, report=report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
