# SPDX-License-Identifier: Apache-2.0
"""Writes what tools write themselves in tests/data/logs: a run of 60 steps that explodes at step 47.

Consoles, tables and the lines of trainers that do not install on a laptop lie there as they are: edit these by hand.
`answers.json` says what was planted in each file; a test holds the reader to it. Each part has its environment:

    python scripts/make_logs.py verl tests/data/logs            # once with each verl: PYTHONPATH names it
    python scripts/make_logs.py trainer tests/data/logs         # transformers, torch, tensorboard
    python scripts/make_logs.py trackers tests/data/logs        # wandb, mlflow-skinny, sqlalchemy, swanlab, trackio
"""

import io
import json
import lzma
import math
import os
import random
import shutil
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

NORM, BOOM = "actor/grad_norm", 47
EXPLODES = ["Step 47: gradient norm 903,", "Reward fell from 0.6"]
ANSWERS: dict[str, dict] = {}


def row(step: int, boom: int | None, rng: random.Random) -> dict[str, float]:
    """A step's metrics by verl's names; from ``boom`` on the policy breaks."""
    since = step - boom if boom is not None and step > boom else 0
    return {
        NORM: 903.0 if step == boom else round(0.488 * math.exp(rng.gauss(0, 0.12)), 5),
        "actor/entropy": round(0.31 * (1 + rng.gauss(0, 0.02)) + min(0.21 * since, 1.9), 5),
        "critic/score/mean": round(max(0.61 * (1 + rng.gauss(0, 0.02)) - 0.07 * since, 0.02), 5),
        "response_length/mean": round(240 * (1 + rng.gauss(0, 0.02)), 3),
    }


def story(kind: str = "explodes") -> list[tuple[int, dict[str, float]]]:
    """The rows, as logged, of a run that ``explodes``, stays ``calm`` or is ``resumed`` before its explosion."""
    rng = random.Random(kind)
    if kind == "resumed":
        return [(s, row(s, BOOM, rng)) for s in range(1, 53)] + [(s, row(s, None, rng)) for s in range(41, 61)]
    return [(s, row(s, BOOM if kind == "explodes" else None, rng)) for s in range(1, 61)]


def answer(name: str, form: str, *says: str, **more: object) -> None:
    """Note what was planted in a file or folder."""
    ANSWERS[name] = {"format": form, "says": list(says), **more}


def verl(out: Path) -> None:
    """Every logger of the verl that is imported, told the same steps by its own ``Tracking``."""
    from importlib.metadata import version as installed

    from verl import __file__ as where

    stated = Path(where).parent / "version" / "version"
    version = stated.read_text().strip() if stated.is_file() else installed("verl")
    folder = out / f"verl-{version}"
    folder.mkdir(parents=True)
    os.environ.update(VERL_FILE_LOGGER_PATH=str(folder / "file.jsonl"), WANDB_MODE="offline", WANDB_SILENT="true")
    os.environ.update(WANDB_DISABLE_GIT="true", WANDB_X_DISABLE_META="true", WANDB_X_DISABLE_MACHINE_INFO="true")
    os.environ.update(TENSORBOARD_DIR=str(folder / "tensorboard"), WANDB_DIR=str(folder), WANDB_CONSOLE="off")
    from verl.utils.tracking import Tracking

    settings = {"trainer": {"project_name": "p"}, "data": {"seed": 1}}
    printed = io.StringIO()
    with redirect_stdout(printed):
        tracking = Tracking("p", "e", ["console", "file", "tensorboard", "wandb"], config=settings)
        for step, values in story():
            tracking.log(values, step)
        del tracking
    (folder / "console.log").write_text(printed.getvalue())
    forms = {"console.log": "verl's console log", "file.jsonl": "verl's file logger", "tensorboard": "TensorBoard"}
    for name, form in forms.items():
        answer(f"{folder.name}/{name}", form, *EXPLODES)
    answer(f"{folder.name}/wandb", "W&B's local run", *EXPLODES, settings={"data.seed": 1})
    answer(folder.name, "verl's console log", *EXPLODES, "hold the same steps")
    _thin(folder)


def trainer(out: Path) -> None:
    """A Hugging Face Trainer whose gradient norms are the story's: the loss is norm x weight, the weight one number."""
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
    explodes = EXPLODES[0]
    answer("trainer/output", "trainer_state.json", explodes, "hold the same steps", "checkpoint-40")
    answer("trainer/stdout.log", "a Trainer's printed dicts", explodes, "do not say their step")
    answer("trainer/trainer_state.json", "trainer_state.json", explodes)
    answer("trainer/trainer_state.json.xz", "trainer_state.json", explodes)
    answer("trainer/tensorboard", "TensorBoard", explodes)
    boards(out)


def boards(out: Path) -> None:
    """TensorBoard's own writer: several runs under a folder, a run that was resumed, TensorFlow 2's way of scalars."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.scalar import summary_v2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from torch.utils.tensorboard import SummaryWriter

    for name, kind in (("two-runs/bad", "explodes"), ("two-runs/good", "calm")):
        with SummaryWriter(str(out / "tensorboard" / name)) as writer:
            for step, values in story(kind):
                for tag, value in values.items():
                    writer.add_scalar(tag, value, step)
    answer("tensorboard/two-runs", "TensorBoard", *EXPLODES, "No spike in 60 steps")
    rows = story("resumed")
    for at, part in enumerate((rows[:52], rows[52:])):
        writer = EventFileWriter(str(out / "tensorboard" / "resumed"), filename_suffix=f".{at}")
        for step, values in part:
            scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            writer.add_event(Event(wall_time=step, step=step, summary=Summary(value=scalars)))
        writer.close()
    answer("tensorboard/resumed", "TensorBoard", EXPLODES[0], "12 steps (41-52) were logged twice")
    writer = EventFileWriter(str(out / "tensorboard" / "tensors"))
    for step, values in story():
        for tag, value in values.items():
            writer.add_event(Event(wall_time=step, step=step, summary=summary_v2.scalar_pb(tag, value)))
    writer.close()
    answer("tensorboard/tensors", "TensorBoard", *EXPLODES)


def trackers(out: Path) -> None:
    """W&B offline, MLflow's two stores, SwanLab and trackio, each with a run that explodes and one that does not."""
    import mlflow
    import swanlab
    import wandb

    os.environ.update(WANDB_DISABLE_GIT="true", WANDB_X_DISABLE_META="true", WANDB_X_DISABLE_MACHINE_INFO="true")
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_CONSOLE="off", MLFLOW_ALLOW_FILE_STORE="true")
    folder = out / "trackers"
    (folder / "resumed").mkdir(parents=True)
    both = (("bad", "explodes"), ("good", "calm"))
    for name, kind in both:
        run = wandb.init(project="p", name=name, dir=str(folder), config={"lr": 1e-6, "kind": kind})
        for step, values in story(kind):
            run.log(values, step=step)
        run.finish()
    answer("trackers/wandb", "W&B's local run", *EXPLODES, "No spike in 60 steps")
    rows = story("resumed")
    for part in (rows[:52], rows[52:]):  # what verl does that is started again: another local run of the same name
        run = wandb.init(project="p", name="again", dir=str(folder / "resumed"))
        for step, values in part:
            run.log(values, step=step)
        run.finish()
    answer("trackers/resumed", "W&B's local run", EXPLODES[0], "12 steps (41-52) were logged twice")
    stores = {"mlruns": folder / "mlruns", "mlruns.db": f"sqlite:///{folder / 'mlruns.db'}"}
    for name, store in stores.items():
        mlflow.set_tracking_uri(str(store))
        mlflow.set_experiment("p")
        for run, kind in both:
            with mlflow.start_run(run_name=run):
                mlflow.log_params({"data/seed": 1})
                for step, values in story(kind):
                    mlflow.log_metrics(values, step=step)
        answer(f"trackers/{name}", "MLflow", *EXPLODES, "good: No spike in 60 steps", settings={"data.seed": "1"})
    bad = next((folder / "mlruns").glob("*/*/tags/mlflow.runName")).parents[1].relative_to(out)
    answer(str(bad), "MLflow", settings={"data.seed": "1"})
    for name, kind in both:
        swanlab.init(project="p", experiment_name=name, logdir=str(folder / "swanlog"), mode="offline")
        for step, values in story(kind):
            swanlab.log(values, step=step)
        swanlab.finish()
    answer("trackers/swanlog", "SwanLab's local run", *EXPLODES, "No spike in 60 steps")
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    import trackio

    for name, kind in both:
        trackio.init(project="p", name=name, config={"seed": 1})
        for step, values in story(kind):
            trackio.log(values, step=step)
        trackio.finish()
    answer("trackers/trackio", "trackio", *EXPLODES, "good: No spike in 60 steps", settings={"seed": 1})
    _thin(folder)


NO_METRICS = ("requirements.txt", "wandb-metadata.json", "swanlab-metadata.json", ".gitignore")


def _thin(folder: Path) -> None:
    """Take away what is no metric, and the empty pages of databases."""
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


def main(part: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    known = out / "answers.json"
    with chdir(out):
        {"verl": verl, "trainer": trainer, "trackers": trackers}[part](Path.cwd())
    before = json.loads(known.read_text()) if known.is_file() else {}
    known.write_text(json.dumps(dict(sorted({**before, **ANSWERS}.items())), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
