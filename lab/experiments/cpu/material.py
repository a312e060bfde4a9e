# SPDX-License-Identifier: Apache-2.0
"""Build the tokenizer, the tiny model and the data of an experiment on the CPU, without a hub.

The model gets a short supervised warm-up, so that its answers are readable; label smoothing keeps every token uncertain
enough to have a gradient. The result is kept in a folder named after the language and the recipe, and rebuilt only when
they change.
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
    """A language of exercises, each with a `question` and a `sentence` that answers it."""

    name: str
    """Prefix of the folder's name."""
    vocabulary: tuple[str, ...]
    """Every piece of the texts."""
    pieces: str
    """Regular expression that splits a text into pieces."""
    split: Callable[[int, int, int], tuple[list, list]]
    """(number of training exercises, number of validation exercises, seed) -> the exercises, none in both."""
    lessons: Callable[[int, str], list]
    """(number, seed) -> the exercises of one batch of the warm-up."""
    to_row: Callable[[int, object, str], dict]
    """(index, exercise, split) -> a row of verl's parquet format."""
    sources: tuple[str, ...]
    """The language's source files, whose content is part of the folder's name."""


@dataclass(frozen=True)
class Recipe:
    """All other settings of the result."""

    warmup_steps: int = 400
    warmup_batch: int = 128
    learning_rate: float = 4e-3
    label_smoothing: float = 0.04
    num_train: int = 512
    num_val: int = 32
    seed: int = 0

    def digest(self, language: Language) -> str:
        # an older transformers may not read the files of a newer one
        major = version("transformers").split(".")[0]
        settings = [asdict(self), language.vocabulary, language.pieces, major]
        sources = [Path(path).read_bytes() for path in (__file__, *language.sources)]
        return hashlib.sha256(json.dumps(settings).encode() + b"".join(sources)).hexdigest()[:12]


def build(language: Language, recipe: Recipe, cache: Path, report=print) -> Path:
    """Return the folder with `model/`, `train.parquet` and `val.parquet`, which is made if need be."""

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
    """Return the folder of a model and its data, which `fill` makes if need be."""
    is_there = folder.is_dir()
    if not is_there:
        environment.make_whole(folder, fill)
    report(f"model and data: {folder}{' (kept from an earlier run)' if is_there else ''}")
    return folder


def write_rows(folder: Path, split: str, exercises: list, to_row: Callable[[int, object, str], dict]) -> None:
    """Write one of the parquet files that verl reads."""
    import pyarrow
    import pyarrow.parquet

    rows = [to_row(i, exercise, split) for i, exercise in enumerate(exercises)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")


def make_tokenizer(language: Language):
    """Return a word-level tokenizer of the whole language."""
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
    """Return a random Qwen3 of about 100 thousand parameters, in float32."""
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
    """Train the model to write the sentences; return the last loss."""
    import torch

    # So small a model gains nothing from a second thread, which on a busy machine costs minutes.
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
    """Return left-padded token ids and labels, (B, T) each; the label is -100 where the model is not trained."""
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
    """Run the command `python -m MODULE --cache FOLDER`, which prints the folder that it made."""
    parser = argparse.ArgumentParser(description=f"Builds model and data of {name}.")
    parser.add_argument("--cache", type=Path, required=True, help="the folder to keep results in")
    try:
        print(build(parser.parse_args(argv).cache, lambda line: print(line, file=sys.stderr, flush=True)))
    except ExperimentError as error:
        # the caller shows the last line
        print(error)
        return error.exit_code
    return 0
