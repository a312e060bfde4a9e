# SPDX-License-Identifier: Apache-2.0
"""Builds what an experiment on the CPU trains from nothing: tokenizer, tiny model, data.

The model gets a short supervised warm-up, so that what it writes can be read; label smoothing keeps
every token uncertain enough to have a gradient. The result is kept in a folder named after the
language and the recipe, and built again only when they change. No hub is asked.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from lab.experiments import environment
from lab.experiments.errors import ExperimentError

SPECIAL = ["<pad>", "<unk>", "<user>", "<assistant>", "<end>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<assistant>' }}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Language:
    """What is asked and answered: exercises with a `question` and a `sentence` to answer it."""

    name: str
    """What the folder's name begins with."""
    vocabulary: tuple[str, ...]
    """Every piece that the texts are made of."""
    pieces: str
    """The regular expression that cuts a text into pieces."""
    split: Callable[[int, int, int], tuple[list, list]]
    """Number of training and validation exercises and a seed -> the exercises, none in both."""
    lessons: Callable[[int, str], list]
    """Number and a seed -> the exercises of one batch of the warm-up."""
    to_row: Callable[[int, object, str], dict]
    """Index, exercise and split -> a row of verl's parquet format."""
    sources: tuple[str, ...]
    """The files that the language is written in: another content, another folder."""


@dataclass(frozen=True)
class Recipe:
    """Everything else that the result depends on."""

    warmup_steps: int = 400
    warmup_batch: int = 128
    learning_rate: float = 4e-3
    label_smoothing: float = 0.04
    num_train: int = 512
    num_val: int = 32
    seed: int = 0

    def digest(self, language: Language) -> str:
        # What one transformers saves, an older one may not read.
        major = version("transformers").split(".")[0]
        settings = [asdict(self), language.vocabulary, language.pieces, major]
        sources = [Path(path).read_bytes() for path in (__file__, *language.sources)]
        return hashlib.sha256(json.dumps(settings).encode() + b"".join(sources)).hexdigest()[:12]


def build(language: Language, recipe: Recipe, cache: Path, report=print) -> Path:
    """Returns the folder with `model/`, `train.parquet` and `val.parquet`, made if need be."""

    def fill(folder: Path) -> None:
        parts = language.split(recipe.num_train, recipe.num_val, recipe.seed)
        for split, exercises in zip(("train", "val"), parts, strict=True):
            write_rows(folder, split, exercises, language.to_row)
        tokenizer = make_tokenizer(language)
        model = make_model(recipe, tokenizer)
        warm_up(model, tokenizer, language, recipe, report)
        tokenizer.save_pretrained(folder / "model")
        model.save_pretrained(folder / "model")

    return kept(cache / f"{language.name}-{recipe.digest(language)}", fill, report)


def kept(folder: Path, fill: Callable[[Path], None], report) -> Path:
    """Returns the folder of a model and its data, made by `fill` if need be."""
    is_there = folder.is_dir()
    if not is_there:
        environment.make_whole(folder, fill)
    report(f"model and data: {folder}{' (kept from an earlier run)' if is_there else ''}")
    return folder


def write_rows(folder: Path, split: str, exercises: list, to_row: Callable[[int, object, str], dict]) -> None:
    """Writes one of the parquet files that verl reads."""
    import pyarrow
    import pyarrow.parquet

    rows = [to_row(i, exercise, split) for i, exercise in enumerate(exercises)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")


def make_tokenizer(language: Language):
    """A word-level tokenizer whose vocabulary is the whole language."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {piece: i for i, piece in enumerate([*SPECIAL, *language.vocabulary])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(language.pieces), behavior="isolated")
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
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
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


def warm_up(model, tokenizer, language: Language, recipe: Recipe, report) -> float:
    """Teaches the model to write the sentences; returns the last loss."""
    import torch

    # So small a model gains nothing from a second thread, and threads that wait for each other on
    # a busy machine lose minutes.
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=recipe.warmup_steps)
    start = time.perf_counter()
    for step in range(1, recipe.warmup_steps + 1):
        batch = language.lessons(recipe.warmup_batch, f"warm-up {recipe.seed} {step}")
        ids, labels = encode(tokenizer, batch)
        logits = model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id)).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=recipe.label_smoothing
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


def encode(tokenizer, exercises):
    """Token ids and labels, (B, T) each, left-padded; -100 where the model is not taught."""
    import torch

    prompts, whole = [], []
    for exercise in exercises:
        messages = [{"role": "user", "content": exercise.question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer = tokenizer.encode(exercise.sentence) + [tokenizer.eos_token_id]
        prompts.append(len(prompt))
        whole.append(prompt + answer)
    width = max(map(len, whole))
    ids = torch.full((len(whole), width), tokenizer.pad_token_id)
    labels = torch.full((len(whole), width), -100)
    for i, (num_prompt, row) in enumerate(zip(prompts, whole, strict=True)):
        ids[i, width - len(row) :] = torch.tensor(row)
        labels[i, width - len(row) + num_prompt :] = torch.tensor(row[num_prompt:])
    return ids, labels


def main(name: str, build: Callable[[Path, Callable[[str], None]], Path], argv=None) -> int:
    """The command `python -m MODULE --cache FOLDER`, which prints the folder that it made."""
    parser = argparse.ArgumentParser(description=f"Builds model and data of {name}.")
    parser.add_argument("--cache", type=Path, required=True, help="the folder to keep results in")
    try:
        print(build(parser.parse_args(argv).cache, lambda line: print(line, file=sys.stderr, flush=True)))
    except ExperimentError as error:
        # The last line is what the caller shows.
        print(error)
        return error.exit_code
    return 0
