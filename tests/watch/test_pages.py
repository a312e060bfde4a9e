# SPDX-License-Identifier: Apache-2.0
"""docs/any-loop.md and docs/trainers.md: their code runs as it is printed, and so does the README's line."""

import json
import re
from pathlib import Path

import pytest
import torch

import gradloc
from gradloc.adapters.hf import run
from tests.world.events import events_in

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("any-loop.md", "trainers.md")]
BLOCKS = re.findall(r"```python\n(.*?)```", "\n".join(TEXTS), re.S)
V = 48


def block(name: str) -> str:
    return next(text for text in BLOCKS if text.startswith(f"# {name}\n"))


@pytest.mark.parametrize("action", ["observe", "mask"])
def test_the_first_example_names_the_token_and_may_take_the_step_without_it(tmp_path, monkeypatch, action):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    line = 'gradloc.Watch(model, optimizer, "runs/x")'
    assert line in BLOCKS[0]
    given = line if action == "observe" else f"{line[:-1]}, {action!r})"
    exec(BLOCKS[0].replace(line, given), {})
    (event,) = events_in(tmp_path / "runs" / "x")
    (culprit,) = event["culprits"]
    assert (event["step"]["global_step"], culprit["positions"]) == (31, [3]) and event["action"]["taken"] == action
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


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean, in which the marked token weighs far too much."""
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * torch.where(labels.flatten() == V - 1, 1e4, 1.0)).mean()


@pytest.mark.full
def test_accelerate_s(tmp_path, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    model, data = small(), loader(48, 41)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "gradloc": gradloc}

    def accelerator():
        return accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)

    given |= {"loss_of": loss_of, "Accelerator": accelerator}
    exec(block("accelerate"), given | {"loader": torch.utils.data.DataLoader(data, batch_size=None)})
    check_masked(tmp_path / "runs" / "accelerate")


@pytest.mark.full
def test_hugging_face_s_trainer_s(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)

    class Weighing(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **given):
            found = super().forward(input_ids, **{k: v for k, v in given.items() if k != "num_items_in_batch"})
            found["loss"] = loss_of(found.logits[:, :-1], labels[:, 1:])
            return found

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=24,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        seed=1,
    )
    rows = torch.cat(loader(48, 41))
    data = [{"input_ids": row, "labels": row} for row in rows]
    names = {"transformers": transformers, "gradloc": gradloc, "model": Weighing(config), "args": arguments}
    exec(block("trainer"), names | {"data": data})
    (event,) = events_in(tmp_path)
    (culprit,) = event["culprits"]
    assert culprit["token_ids"] == [V - 1] and event["action"]["taken"] == "mask"


@pytest.mark.full
@pytest.mark.parametrize("limit", [1.0, None])
def test_lightning_s(tmp_path, monkeypatch, limit):
    lightning = pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    names = {"lightning": lightning, "gradloc": gradloc, "loss_of": loss_of}
    exec(block("lightning"), names)

    class Made(names["Watched"]):
        def __init__(self):
            super().__init__()
            self.model = small()

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
    trainer.fit(Made(), torch.utils.data.DataLoader(loader(48, 41), batch_size=None))
    check_masked(tmp_path / "runs" / "lightning")


def test_the_readme_has_the_one_line(tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "gradloc.Watch(" in block]
    monkeypatch.chdir(tmp_path)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(example, {"gradloc": gradloc, "model": model, "optimizer": optimizer, "tokenizer": None})
    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    optimizer.step()
    assert (tmp_path / "runs" / "x" / "metrics.jsonl").exists()


def test_a_folder_named_run_is_opened_by_its_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run.main(["-o", "page.html"]) == 2
    assert capsys.readouterr().err.strip().endswith("give the one that trains, as you call it")
    Path("run").mkdir()
    assert run.main(["-o", "page.html"]) == 2
    assert capsys.readouterr().err.strip().endswith("for a folder named run: gradloc ./run")


def test_the_notebook_runs_and_names_the_token(tmp_path, monkeypatch):
    cells = json.loads((ROOT / "examples" / "spike.ipynb").read_text(encoding="utf-8"))["cells"]
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    (event,) = events_in(tmp_path / "runs" / "notebook")
    assert [(culprit["row"], culprit["positions"]) for culprit in event["culprits"]] == [(2, [5])]
