# SPDX-License-Identifier: Apache-2.0
"""docs/any-loop.md: its code runs as it is printed; and the README's three lines are those of the page."""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import gradloc
from tests.watch.test_harmless import events_in

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "any-loop.md").read_text(encoding="utf-8"), re.S)
V = 48


def block(name: str) -> str:
    return next(text for text in BLOCKS if text.startswith(f"# {name}\n"))


def test_the_first_example_names_the_token_and_takes_the_step_without_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(BLOCKS[0], {})
    (event,) = events_in(tmp_path / "runs" / "x")
    (culprit,) = event["culprits"]
    assert (event["step"]["global_step"], culprit["positions"]) == (31, [3]) and event["action"]["taken"] == "mask"
    assert event["cause"]["label"] == "loss_weight"


def check_masked(folder: Path) -> None:
    """The marked token of ``loader(48, 41)`` is named, in two micro-batches, and masked."""
    (event,) = events_in(folder)
    (culprit,) = event["culprits"]
    assert (event["step"]["global_step"], culprit["row"], culprit["positions"]) == (21, 3, [3])
    assert event["action"]["taken"] == "mask" and event["step"]["num_micro_batches"] == 2


def loader(steps: int, spoiled: int) -> list[torch.Tensor]:
    """ids (2, 9); those of one step have a token that is marked by being the last of all."""
    made = torch.randint(1, V - 1, (steps, 2, 9), generator=torch.Generator().manual_seed(1))
    made[spoiled, 1, 4] = V - 1
    return list(made)


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(V, 16), torch.nn.GELU(), torch.nn.Linear(16, V))


@contextmanager
def weighing(watch: gradloc.Watch | None, ids: torch.Tensor):
    """In here the loss weighs the marked token far too much; not yet where there is no watch."""
    marked = ids[:, 1:] == V - 1
    if watch is None or not bool(marked.any()):
        yield
        return
    inner = watch.log_probs
    watch.log_probs = lambda *given: torch.where(marked, 1e4, 1.0) * inner(*given)
    yield
    del watch.log_probs


@pytest.mark.full
def test_accelerate_s(tmp_path, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    model, data = small(), loader(48, 41)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "gradloc": gradloc}
    place = iter(data)

    def loss_of(found):
        weight = torch.where(next(place)[:, 1:] == V - 1, 1e4, 1.0)
        return -(found * weight).mean()

    def accelerator():
        return accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)

    given |= {"loss_of": loss_of, "token_log_probs": gradloc.token_log_probs, "Accelerator": accelerator}
    exec(block("accelerate"), given | {"loader": torch.utils.data.DataLoader(data, batch_size=None)})
    check_masked(tmp_path / "runs" / "accelerate")


@pytest.mark.full
def test_hugging_face_s_trainer_s(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    names = {"transformers": transformers, "gradloc": gradloc, "token_log_probs": gradloc.token_log_probs}
    exec(block("trainer"), names)

    class Weighing(names["Watched"]):
        """A loss that weighs the marked token far too much."""

        def compute_loss(self, model, inputs, *args, **given):
            with weighing(getattr(self, "watch", None), inputs["labels"]):
                return super().compute_loss(model, inputs, *args, **given)

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_grad_norm=0,
        max_steps=24,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to="none",
        use_cpu=True,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=12,
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = torch.cat(loader(48, 41))
    data = [{"input_ids": row, "labels": row} for row in rows]
    model = transformers.LlamaForCausalLM(config)
    trainer = Weighing(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[names["Clipping"]()])
    names["trainer"] = trainer
    trainer.train()
    (event,) = events_in(tmp_path)
    (culprit,) = event["culprits"]
    assert culprit["token_ids"] == [V - 1] and event["action"]["taken"] == "mask"


@pytest.mark.full
@pytest.mark.parametrize("limit", [1.0, None])
def test_lightning_s(tmp_path, monkeypatch, limit):
    lightning = pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    names = {"lightning": lightning, "gradloc": gradloc, "token_log_probs": gradloc.token_log_probs}
    exec(block("lightning"), names)

    class Weighing(names["Watched"]):
        def __init__(self):
            super().__init__()
            self.inner = small()

        def forward(self, ids):
            return self.inner(ids)

        def training_step(self, ids, index):
            with weighing(self.watch, ids):
                return super().training_step(ids, index)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=2,
        gradient_clip_val=limit,
        **dict.fromkeys(quiet, False),
    )
    trainer.fit(Weighing(), torch.utils.data.DataLoader(loader(48, 41), batch_size=None))
    check_masked(tmp_path / "runs" / "lightning")


def test_the_readme_has_the_three_lines():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for line in ("gradloc.Watch(", "watch.log_probs(", "watch.clip_grad_norm_("):
        assert line in text
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "gradloc.Watch(" in block]
    compile(example, "README.md", "exec")
