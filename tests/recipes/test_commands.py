# SPDX-License-Identifier: Apache-2.0
"""Other trainers, started by their own commands: `gradloc run` in front, a damaged document, and it is named."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lab.experiments import environment
from lab.experiments.environment import ensure_python
from tests.conftest import ROOT
from tests.recipes import titan
from tests.recipes.material import PLANTED, ROWS, STEP

STEPS = 8
LLAMAFACTORY = {
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "dataset": "counting",
    "template": "empty",
    "cutoff_len": 128,
    "per_device_train_batch_size": ROWS,
    "learning_rate": 1e-5,
    "max_steps": STEPS,
    "disable_shuffling": True,
    "report_to": "none",
    "logging_steps": 1,
}
SWIFT = f"""--model_type llama --template dummy --torch_dtype float32 --tuner_type full --max_steps {STEPS}
--per_device_train_batch_size {ROWS} --gradient_accumulation_steps 1 --learning_rate 1e-5 --dataset_shuffle false
--train_dataloader_shuffle false --split_dataset_ratio 0 --logging_steps 1 --report_to none --save_strategy no"""
TRL = f"""--max_steps {STEPS} --per_device_train_batch_size {ROWS} --gradient_accumulation_steps 1 --learning_rate 1e-5
--train_sampling_strategy sequential --logging_steps 1 --report_to none --save_strategy no --use_cpu --dtype float32
--bf16 false"""

TITAN = """--model.name llama3 --model.flavor debugmodel --training.dataset c4_test --training.steps 14
--training.local_batch_size 4 --training.seq_len 64 --training.mixed_precision_param float32 --optimizer.lr 3e-3
--lr_scheduler.warmup_steps 5 --experimental.custom_import tests.recipes.titan.watch"""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that tests.recipes.material makes, with LLaMA-Factory's settings."""
    folder = tmp_path_factory.mktemp("material")
    run(environment.DEEPSPEED, folder, "python", "-m", "tests.recipes.material", str(folder))
    paths = {"model_name_or_path": folder / "model", "dataset_dir": folder, "output_dir": folder / "out"}
    settings = LLAMAFACTORY | {name: str(path) for name, path in paths.items()}
    (folder / "llamafactory.yaml").write_text(json.dumps(settings))
    return folder


def run(kind: Any, folder: Path, *command: str, offline: bool = True) -> None:
    """Run a command with an environment's programs first on PATH."""
    bin_folder = Path(ensure_python(kind)).parent
    first = [str(ROOT / "tests/recipes/without_gpu")] if kind is environment.TITAN else []
    absent = [str(ROOT / "tests/recipes/absent")] if kind is environment.LLAMAFACTORY else []
    own = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join([*first, str(ROOT), *absent])}
    own |= {"GRADLOC_TITAN_FOLDER": str(folder)}
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **quiet, **own}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def check_named(folder: Path, step: int = STEP, row: int = PLANTED % ROWS) -> None:
    """One event, in the planted document's step: all that is named is in its row, and it is explained."""
    (event,) = [json.loads(line) for line in (folder / "gradloc" / "events.jsonl").read_text().splitlines()]
    assert event["step"]["global_step"] == step
    assert {culprit["row"] for culprit in event["culprits"]} == {row}
    assert event["certificate"]["verdict"] == "explained"


def commands(material: Path) -> dict[str, tuple[Any, list[str]]]:
    model, out = str(material / "model"), str(material / "out")
    swift = ["swift", "sft", "--model", model, "--dataset", str(material / "messages.jsonl"), "--output_dir", out]
    trl = ["trl", "sft", "--model_name_or_path", model, "--dataset_name", str(material / "data"), "--output_dir", out]
    return {
        "LLaMA-Factory": (environment.LLAMAFACTORY, ["llamafactory-cli", "train", str(material / "llamafactory.yaml")]),
        "ms-swift": (environment.SWIFT, [*swift, *SWIFT.split()]),
        "TRL": (environment.TRL, [*trl, *TRL.split()]),
    }


def test_it_is_named_in_torchtitans_trainer(material, tmp_path):
    run(environment.TITAN, tmp_path, "python", "-m", "tests.recipes.titan", str(tmp_path / "data"))
    paths = ["--model.hf_assets_path", str(material / "model"), "--training.dataset_path", str(tmp_path / "data")]
    command = ["torchrun", "--nproc_per_node=1", "-m", "torchtitan.train", *paths, *TITAN.split()]
    run(environment.TITAN, tmp_path, *command)
    check_named(tmp_path, titan.STEP, titan.ROW)


def test_it_is_named_in_a_loop_that_fabric_runs(material, tmp_path):
    loop = str(ROOT / "tests/recipes/fabric.py")
    run(environment.DEMO, tmp_path, "fabric", "run", "--accelerator=cpu", loop, str(material), str(tmp_path))
    check_named(tmp_path)


@pytest.mark.parametrize("trainer", ["LLaMA-Factory", "ms-swift", "TRL"])
def test_the_damaged_document_is_named(material, tmp_path, trainer):
    kind, command = commands(material)[trainer]
    settings = [f"folder={tmp_path}", "trigger.tau=4"]
    run(kind, tmp_path, "python", "-m", "gradloc.command", "run", *settings, *command)
    check_named(tmp_path)
