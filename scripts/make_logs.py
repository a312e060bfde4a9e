# SPDX-License-Identifier: Apache-2.0
"""Write the logs in tests/data/logs with the tools themselves: a run of 60 steps that explodes at step 47.

Consoles, tables and the lines of trainers that do not install on a laptop are edited by hand, as is `answers.json`,
which states what was planted in each file for a test. Each part has its environment:

    python scripts/make_logs.py verl tests/data/logs            # once with each verl: PYTHONPATH names it
    python scripts/make_logs.py trainer tests/data/logs         # transformers, torch, tensorboard
    python scripts/make_logs.py trackers tests/data/logs        # wandb, mlflow-skinny, sqlalchemy, swanlab, trackio
"""

import io
import lzma
import math
import os
import random
import shutil
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

NORM, BOOM = "actor/grad_norm", 47
RUNS = {"bad": "explodes", "good": "calm"}
QUIET_WANDB = dict.fromkeys(
    ("WANDB_SILENT", "WANDB_DISABLE_GIT", "WANDB_X_DISABLE_META", "WANDB_X_DISABLE_MACHINE_INFO"), "true"
)
QUIET_WANDB |= {"WANDB_MODE": "offline", "WANDB_CONSOLE": "off"}


def row(step: int, boom: int | None, rng: random.Random) -> dict[str, float]:
    """Return a step's metrics by verl's names; from ``boom`` on the policy breaks."""
    since = step - boom if boom is not None and step > boom else 0
    return {
        NORM: 903.0 if step == boom else round(0.488 * math.exp(rng.gauss(0, 0.12)), 5),
        "actor/entropy": round(0.31 * (1 + rng.gauss(0, 0.02)) + min(0.21 * since, 1.9), 5),
        "critic/score/mean": round(max(0.61 * (1 + rng.gauss(0, 0.02)) - 0.07 * since, 0.02), 5),
        "response_length/mean": round(240 * (1 + rng.gauss(0, 0.02)), 3),
    }


def story(kind: str = "explodes") -> list[tuple[int, dict[str, float]]]:
    """Return the logged rows of a run that ``explodes``, stays ``calm`` or is ``resumed`` before its explosion."""
    rng = random.Random(kind)
    if kind == "resumed":
        return [(s, row(s, BOOM, rng)) for s in range(1, 53)] + [(s, row(s, None, rng)) for s in range(41, 61)]
    return [(s, row(s, BOOM if kind == "explodes" else None, rng)) for s in range(1, 61)]


def verl(out: Path) -> None:
    """Log the same steps with every logger of the imported verl, through its ``Tracking``."""
    from importlib.metadata import version as installed

    from verl import __file__ as where

    stated = Path(where).parent / "version" / "version"
    version = stated.read_text().strip() if stated.is_file() else installed("verl")
    folder = out / f"verl-{version}"
    folder.mkdir(parents=True)
    os.environ.update(QUIET_WANDB, WANDB_DIR=str(folder), TENSORBOARD_DIR=str(folder / "tensorboard"))
    os.environ["VERL_FILE_LOGGER_PATH"] = str(folder / "file.jsonl")
    from verl.utils.tracking import Tracking

    settings = {"trainer": {"project_name": "p"}, "data": {"seed": 1}}
    printed = io.StringIO()
    with redirect_stdout(printed):
        tracking = Tracking("p", "e", ["console", "file", "tensorboard", "wandb"], config=settings)
        for step, values in story():
            tracking.log(values, step)
        del tracking
    (folder / "console.log").write_text(printed.getvalue())
    _thin(folder)


def trainer(out: Path) -> None:
    """Run a Hugging Face Trainer with the run's gradient norms: the loss is norm x weight, with a single weight."""
    import torch
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return {"loss": (x * self.weight).mean()}

    class InOrder(Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    folder = out / "trainer"
    args = TrainingArguments(
        str(folder / "output"),
        per_device_train_batch_size=1,
        logging_steps=1,
        save_steps=20,
        num_train_epochs=1,
        report_to=["tensorboard"],
        logging_dir=str(folder / "output" / "runs"),
        save_only_model=False,
        use_cpu=True,
        save_safetensors=False,
    )
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        made = InOrder(Model(), args, train_dataset=[{"x": values[NORM]} for _, values in story()])
        made.train()
        made.save_state()
    (folder / "stdout.log").write_text(printed.getvalue())
    shutil.copy(folder / "output" / "trainer_state.json", folder / "trainer_state.json")
    shutil.copytree(folder / "output" / "runs", folder / "tensorboard")
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix in (".bin", ".pt", ".pth", ".safetensors"):
            path.unlink()
    (folder / "trainer_state.json.xz").write_bytes(lzma.compress((folder / "trainer_state.json").read_bytes()))
    boards(out)


def boards(out: Path) -> None:
    """Write with TensorBoard: several runs in a folder, a resumed run, and TensorFlow 2's scalars."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.scalar import summary_v2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from torch.utils.tensorboard import SummaryWriter

    for name, kind in RUNS.items():
        with SummaryWriter(str(out / "tensorboard" / "two-runs" / name)) as writer:
            for step, values in story(kind):
                for tag, value in values.items():
                    writer.add_scalar(tag, value, step)
    rows = [
        (step, Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]))
        for step, values in story("resumed")
    ]
    tensors = [(step, summary_v2.scalar_pb(tag, value)) for step, values in story() for tag, value in values.items()]
    for at, (name, part) in enumerate((("resumed", rows[:52]), ("resumed", rows[52:]), ("tensors", tensors))):
        writer = EventFileWriter(str(out / "tensorboard" / name), filename_suffix=f".{at}")
        for step, summary in part:
            writer.add_event(Event(wall_time=step, step=step, summary=summary))
        writer.close()


def trackers(out: Path) -> None:
    """Write with W&B offline, MLflow's two stores, SwanLab and trackio: a run that explodes, and a calm one."""
    import mlflow
    import swanlab
    import wandb

    def log(tracker, rows: list[tuple[int, dict[str, float]]], **settings: object) -> None:
        tracker.init(project="p", **settings)
        for step, values in rows:
            tracker.log(values, step=step)
        tracker.finish()

    os.environ.update(QUIET_WANDB, MLFLOW_ALLOW_FILE_STORE="true", TRACKIO_DIR=str(out / "trackers" / "trackio"))
    import trackio

    folder = out / "trackers"
    (folder / "resumed").mkdir(parents=True)
    rows = story("resumed")
    for part in (rows[:52], rows[52:]):  # as a restarted verl does: another local run of the same name
        log(wandb, part, name="again", dir=str(folder / "resumed"))
    for name, kind in RUNS.items():
        rows = story(kind)
        log(wandb, rows, name=name, dir=str(folder), config={"lr": 1e-6, "kind": kind})
        log(swanlab, rows, experiment_name=name, logdir=str(folder / "swanlog"), mode="offline")
        log(trackio, rows, name=name, config={"seed": 1})
    for store in (str(folder / "mlruns"), f"sqlite:///{folder / 'mlruns.db'}"):
        mlflow.set_tracking_uri(store)
        mlflow.set_experiment("p")
        for name, kind in RUNS.items():
            with mlflow.start_run(run_name=name):
                mlflow.log_params({"data/seed": 1})
                for step, values in story(kind):
                    mlflow.log_metrics(values, step=step)
    _thin(folder)


NO_METRICS = ("requirements.txt", "wandb-metadata.json", "swanlab-metadata.json", ".gitignore")


def _thin(folder: Path) -> None:
    """Remove all but metrics, and the empty pages of databases."""
    import sqlite3

    for path in sorted(folder.rglob("*"), reverse=True):
        is_chatter = path.is_file() and path.parent.name in ("logs", "debug", "console") and "metrics" not in path.parts
        if path.is_symlink() or path.name in NO_METRICS or path.suffix == ".lock" or is_chatter:
            path.unlink()
        elif path.suffix == ".db":
            with sqlite3.connect(path) as database:
                database.execute("pragma journal_mode = delete")
                database.execute("pragma page_size = 512")
                database.execute("vacuum")
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()


if __name__ == "__main__":
    folder = Path(sys.argv[2]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with chdir(folder):
        {"verl": verl, "trainer": trainer, "trackers": trackers}[sys.argv[1]](folder)
