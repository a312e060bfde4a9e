# SPDX-License-Identifier: Apache-2.0
"""Makes tests/data/logs: a run of 60 steps that explodes at step 47, as each tool writes it.

What a tool can write is written by that tool; the lines of trainers that do not install on a laptop are written here.
`answers.json` says what was planted in each; the test holds the reader to it. Each part has its environment:

    python scripts/make_logs.py lines tests/data/logs                 # numpy and pandas
    python scripts/make_logs.py verl tests/data/logs                  # once with each verl: PYTHONPATH names it
    python scripts/make_logs.py trainer tests/data/logs               # transformers, torch, tensorboard
    python scripts/make_logs.py trackers tests/data/logs              # wandb, mlflow-skinny, sqlalchemy, swanlab, trackio
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import math
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

NORM, BOOM, STEPS = "actor/grad_norm", 47, 60
Rows = list[tuple[int, dict[str, float]]]
EXPLODES = ["Step 47: gradient norm 903,", "Reward fell from 0.6"]
ANSWERS: dict[str, dict] = {}


def row(step: int, boom: int | None, rng: random.Random, norm: float = 903.0) -> dict[str, float]:
    """A step's metrics by verl's names; from ``boom`` on the policy breaks."""
    since = step - boom if boom is not None and step > boom else 0
    return {
        NORM: norm if step == boom else round(0.488 * math.exp(rng.gauss(0, 0.12)), 5),
        "actor/entropy": round(0.31 * (1 + rng.gauss(0, 0.02)) + min(0.21 * since, 1.9), 5),
        "critic/score/mean": round(max(0.61 * (1 + rng.gauss(0, 0.02)) - 0.07 * since, 0.02), 5),
        "response_length/mean": round(240 * (1 + rng.gauss(0, 0.02)), 3),
    }


def story(kind: str = "explodes") -> Rows:
    """The rows of one kind of run, in the order in which they are logged."""
    rng = random.Random(kind)
    if kind == "resumed":  # the explosion is overwritten
        return [(s, row(s, BOOM, rng)) for s in range(1, 53)] + [(s, row(s, None, rng)) for s in range(41, 61)]
    if kind == "again":  # from the first step, into the same file
        return [(s, row(s, BOOM, rng)) for s in range(1, 53)] + [(s, row(s, None, rng)) for s in range(1, 61)]
    steps, boom, norm = {
        "explodes": (60, BOOM, 903.0),
        "calm": (60, None, 0.0),
        "warmup": (40, 12, 903.0),
        "short": (7, 5, 903.0),
        "nan": (60, BOOM, math.nan),
        "inf": (60, BOOM, math.inf),
        "first": (60, 1, 903.0),
        "last": (47, BOOM, 903.0),
    }[kind]
    return [(s, row(s, boom, rng, norm)) for s in range(1, steps + 1)]


def renamed(rows: Rows, **names: str) -> Rows:
    """The rows with the names of another trainer."""
    known = {NORM: "norm", "critic/score/mean": "reward", "actor/entropy": "entropy", "response_length/mean": "length"}
    return [(s, {names[known[n]]: v for n, v in values.items() if known[n] in names}) for s, values in rows]


def answer(name: str, form: str, *says: str, **more) -> str:
    """Note what was planted in a file or folder."""
    ANSWERS[name] = {"format": form, "says": list(says), **more}
    return name


# -- lines that are written here: trainers, terminals, spreadsheets


def dashed(values: dict[str, float], show: Callable[[float], str] = repr) -> str:
    return " - ".join(f"{name}:{show(value)}" for name, value in values.items())


def consoles(out: Path) -> None:
    """verl's console line behind what a cluster puts before and into it."""
    import numpy as np

    form = "verl's console log"

    def put(name: str, lines: Iterable[str], *says: str, end: str = "\n", coding: str = "utf-8", **more) -> None:
        (out / "console").mkdir(parents=True, exist_ok=True)
        (out / "console" / name).write_bytes((end.join(lines) + end).encode(coding))
        answer(f"console/{name}", form, *(says or EXPLODES), **more)

    lines = [f"step:{s} - {dashed(v)}" for s, v in story()]
    ray = "\x1b[36m(TaskRunner pid=4711)\x1b[0m "
    noise = "\x1b[36m(WorkerDict pid=4801, ip=10.0.0.3)\x1b[0m INFO 11-22 engine: 812.3 tokens/s [repeated 7x across cluster]"
    put("ray.log", [part for line in lines for part in (ray + line, noise)])
    put("ray-plain.log", [f"(main_task pid=19799) {line}" for line in lines])
    put("ray-repeated.log", [f"{ray}{line} [repeated 2x across cluster]" for line in lines])
    put("colour-without-escape.log", [f"[36m(TaskRunner pid=1)[0m {line}" for line in lines])
    put(
        "slurm.out",
        [f"0: {line}" for line in lines] + ["1: worker says step done", "slurmstepd: error: *** CANCELLED ***"],
    )
    put("timestamps.log", [f"2026-11-22 10:{s % 60:02d}:00,123 INFO main - {line}" for s, line in enumerate(lines)])
    bar = [f"Training Progress: {s:3d}%|##  | {s}/60 [00:{s % 60:02d}<01:00]" for s in range(1, 61)]
    put("progress-bar.log", [f"{b}\r{line}" for b, line in zip(bar, lines, strict=True)])
    put("progress-same-line.log", [f"{b}{line}" for b, line in zip(bar, lines, strict=True)])
    put("numpy.log", [f"step:{s} - {dashed({n: np.float64(x) for n, x in v.items()})}" for s, v in story()])
    shown = [f"step:{s} - {dashed(v, lambda x: f'tensor({x:.4f}, device=' + repr('cuda:0') + ')')}" for s, v in story()]
    put("tensor.log", shown)
    put(
        "three-digits.log", [f"step:{s} - {dashed(v, lambda x: f'{x:.3f}')} - actor/lr(1e-4):0.010" for s, v in story()]
    )
    put("crlf.log", lines, end="\r\n")
    put("bom.log", lines, coding="utf-8-sig")
    put("utf-16.log", lines, coding="utf-16")
    put("utf-16-without-mark.log", lines, coding="utf-16-le")
    put("latin-1.log", ["Gr\u00f6\u00dfe: 12 \u00b5s", *lines], coding="latin-1")
    put("chinese.log", ["\u8bad\u7ec3\u5f00\u59cb \u2728", *lines])
    put(
        "wrapped.log",
        [part for line in lines for part in (line[: line.index(" - critic")], "    " + line[line.index("- critic") :])],
    )
    cut = "\n".join(lines[:47])
    (out / "console" / "cut-in-the-spike.log").write_text(cut[: cut.rindex("903.0") + 2])
    answer("console/cut-in-the-spike.log", form, "No spike in 46 steps", "may lack digits")
    (out / "console" / "cut-after.log").write_text("\n".join(lines)[:-30])
    answer("console/cut-after.log", form, *EXPLODES)
    put("torn-lines.log", [line if s % 7 or s == BOOM else line[: len(line) // 2] for s, line in enumerate(lines, 1)])
    put("validation-first.log", ["step:0 - val-core/gsm8k/acc/mean@1:0.31", *lines])
    put(
        "val-between.log",
        [part for s, line in enumerate(lines, 1) for part in (line, f"step:{s} - val-core/x/acc:0.5")],
    )
    settings = (
        "{'actor_rollout_ref': {'actor': {'optim': {'lr': 1e-06},\n   'grad_clip': 1.0}},\n 'data': {'seed': %d}}"
    )
    for seed, kind in ((1, "explodes"), (2, "calm")):
        head = [f"(TaskRunner pid=7) {line}" for line in (settings % seed).splitlines()]
        rows = [f"(TaskRunner pid=7) step:{s} - {dashed(v)}" for s, v in story(kind)]
        says = EXPLODES if kind == "explodes" else ["No spike in 60 steps"]
        put(f"config-{kind}.log", [*head, *rows], *says, settings={"data.seed": seed})
    told = {
        "calm": ["No spike in 60 steps"],
        "resumed": ["Step 47: gradient norm 903,", "12 steps (41-52) were logged twice", "peaked at 903 at step 47"],
        "again": ["Step 47: gradient norm 903,", "start 2: No spike in 60 steps"],
        "warmup": ["Step 12: gradient norm 903,", "are the warm-up"],
        "short": ["Step 5: gradient norm 903,", "All 7 steps"],
        "nan": ["Step 47: gradient norm NaN", "Reward fell"],
        "inf": ["Step 47: gradient norm \u221e", "Reward fell"],
        "first": ["Step 1: gradient norm 903,", "norms often start high"],
        "last": ["Step 47: gradient norm 903,", "It is the last step"],
    }
    for kind, says in told.items():
        put(f"{kind}.log", [f"{ray}step:{s} - {dashed(v)}" for s, v in story(kind)], *says)
    zero = [f"step:{s} - {NORM}:0.0 - critic/score/mean:0.0" for s in range(1, 31)]
    put("zero.log", zero, "All 30 gradient norms are 0")
    pids = [
        f"(TaskRunner pid={4711 if s < 53 else 5001}) step:{i} - {dashed(v)}"
        for s, (i, v) in enumerate(story("resumed"))
    ]
    put("resumed-by-another-process.log", pids, *told["resumed"])
    both = zip(story(), story("calm"), strict=True)
    mixed = [f"(T pid={p}) step:{s} - {dashed(v)}" for pair in both for p, (s, v) in enumerate(pair, 1)]
    put("two-at-once.log", mixed, *EXPLODES, "No spike in 60 steps")
    twice = [line for line in lines for _ in range(2)]
    put("printed-twice.log", twice, *EXPLODES, "60 rows of printed-twice.log repeat")
    batches = [f"step:{s} - {dashed(v | {NORM: v[NORM] / part})}" for s, v in story() for part in (3, 1, 2)]
    put("mini-batches.log", batches, *EXPLODES, "several rows for a step")
    text = ("\n".join(lines) + "\n").encode()
    for ending, pack in (("gz", gzip.compress), ("xz", lzma.compress), ("bz2", bz2.compress)):
        (out / "console" / f"packed.log.{ending}").write_bytes(pack(text))
        answer(f"console/packed.log.{ending}", form, *EXPLODES)
    torn = gzip.compress(text)
    (out / "console" / "torn.log.gz").write_bytes(torn[: int(len(torn) * 0.9)])
    answer("console/torn.log.gz", form, *EXPLODES, "is cut off or damaged")
    folder = out / "console" / "requeued"  # Slurm gives a job that it starts again another file
    folder.mkdir()
    rows = story("resumed")
    for name, part in (("slurm-99.out", rows[:52]), ("slurm-100.out", rows[52:])):
        (folder / name).write_text("".join(f"step:{s} - {dashed(v)}\n" for s, v in part))
    answer("console/requeued", form, *told["resumed"])


def trainers(out: Path) -> None:
    """What other trainers print."""
    (out / "trainers").mkdir(parents=True, exist_ok=True)

    def put(name: str, lines: Iterable[str], form: str, *says: str) -> None:
        (out / "trainers" / name).write_text("\n".join(lines) + "\n")
        answer(f"trainers/{name}", form, *(says or EXPLODES))

    rows = story()
    named = renamed(rows, norm="actor_grad_norm", reward="reward", length="response_length")
    start = "(PPOTrainer pid=7) 2026-11-22 10:00:00.000 | INFO | openrlhf - "
    put("openrlhf.log", [f"{start}\u2728 Global step {s}: {v}" for s, v in named], "OpenRLHF's log")
    named = renamed(rows, norm="train/grad_norm", entropy="train/entropy_loss")
    rewards = renamed(rows, reward="rollout/raw_reward", length="rollout/response_len/mean")
    both = zip(named, rewards, strict=True)
    slime = [
        part for (s, v), (_, r) in both for part in (f"data.py:41 - rollout {s}: {r}", f"model.py:9 - step {s}: {v}")
    ]
    put("slime.log", slime, "slime's log")
    prime = [
        f"10:00:{s % 60:02d} SUCCESS Step {s} | Time: 24.44s | Loss: 0.0123 | Entropy: {v['actor/entropy']:.4f} | Mismatch KL: "
        f"0.0010 | Grad. Norm: {v[NORM]:.4f} | LR: 1.00e-06 | Throughput: 8123 tokens/s | MFU: 12.1% | Peak Mem.: 61.2 GiB"
        for s, v in rows
    ]
    put("prime-rl.log", prime, "prime-rl's log", EXPLODES[0], "Entropy rose from 0.3")
    nemo = []
    for s, v in rows:
        nemo += [f"{'=' * 25} Step {s}/60 {'=' * 25}", "\U0001f4ca Training Results:", "  \u2022 Loss: 0.0123"]
        nemo += [f"  \u2022 Grad Norm: {v[NORM]:.4f}", f"  \u2022 Avg Reward: {v['critic/score/mean']:.4f}"]
        nemo += ["  \u2022 Generation KL Error: 0.0011", "\u23f1  Timing:", "  \u2022 Total step time: 35.70s"]
    put("nemo-rl.log", nemo, "NeMo-RL's log")
    put(
        "nemo-rl-without-norm.log",
        [line for line in nemo if "Norm" not in line],
        "NeMo-RL's log",
        "has no gradient norm",
        "Avg Reward",
    )
    megatron = [
        f" iteration {s:8d}/      60 | consumed samples: {s * 8:12d} | elapsed time per iteration (ms): 812.1 | learning rate: "
        f"1.000000E-06 | lm loss: 1.23E+00 | loss scale: 1.0 | grad norm: {v[NORM]:.3f} | number of nan iterations:   0 |"
        for s, v in rows
    ]
    put("megatron.log", megatron, "Megatron's log", EXPLODES[0])
    titan = [
        f"[titan] INFO - step: {s:2d}  loss:  7.1234  grad_norm:  {v[NORM]:.4f}  memory: 10.20GiB(12%)" for s, v in rows
    ]
    put("torchtitan.log", titan, "lines of `step N ... name: value`", EXPLODES[0])
    own = [
        f"Step {s}: Loss=0.1200, LR=1.00e-06, GradNorm={v[NORM]:.4f}, reward={v['critic/score/mean']:.3f}"
        for s, v in rows
    ]
    put("own-loop.log", own, "lines of `step N ... name: value`")
    swift = [
        json.dumps(
            {"loss": 0.1, "grad_norm": v[NORM], "reward": v["critic/score/mean"], "global_step/max_steps": f"{s}/60"}
        )
        for s, v in rows
    ]
    put("ms-swift.jsonl", swift, "JSON lines")
    factory = [json.dumps({"current_steps": s, "total_steps": 60, "loss": 0.1, "grad_norm": v[NORM]}) for s, v in rows]
    put("llama-factory.jsonl", factory, "JSON lines", EXPLODES[0])
    flat = [json.dumps({"step": s, **v}) for s, v in rows]
    put("flat.jsonl", flat, "JSON lines")
    unsaid = [json.dumps(v) for _, v in rows]
    put("without-steps.jsonl", unsaid, "JSON lines", *EXPLODES, "do not say their step")
    cut = "\n".join(json.dumps({"step": s, "data": v}) for s, v in rows)
    (out / "trainers" / "file-logger-cut.jsonl").write_text(cut[:-20])
    answer("trainers/file-logger-cut.jsonl", "verl's file logger", *EXPLODES, "is cut off and was left out")
    documents = {
        "series.json": ({"source": "x", "series": [[s, v[NORM]] for s, v in rows]}, "JSON of a series", EXPLODES[:1]),
        "rows.json": ([{"step": s, **v} for s, v in rows], "JSON", EXPLODES),
        "columns.json": ({"step": [s for s, _ in rows], "grad_norm": [v[NORM] for _, v in rows]}, "JSON", EXPLODES[:1]),
    }
    for name, (document, form, says) in documents.items():
        (out / "trainers" / name).write_text(json.dumps(document, indent=1))
        answer(f"trainers/{name}", form, *says)


def tables(out: Path) -> None:
    """What is downloaded from a page of a tracker, or made by a spreadsheet."""
    import pandas as pd

    (out / "tables").mkdir(parents=True, exist_ok=True)

    def put(
        name: str, head: list[str], cells: Iterable[Iterable], form: str, *says: str, comma=",", coding="utf-8", **how
    ) -> None:
        sink = io.StringIO()
        writer = csv.writer(sink, delimiter=comma, lineterminator="\r\n", **how)
        writer.writerows([head, *cells])
        (out / "tables" / name).write_bytes(sink.getvalue().encode(coding))
        answer(f"tables/{name}", form, *(says or EXPLODES))

    rows, calm = story(), story("calm")
    names = list(rows[0][1])
    plain = [[s, *v.values()] for s, v in rows]
    put("plain.csv", ["step", *names], plain, "CSV")
    put("quoted.csv", ["step", *names], plain, "CSV", quoting=csv.QUOTE_ALL)
    put("bom.csv", ["step", *names], plain, "CSV", coding="utf-8-sig")
    put("excel-utf-16.csv", ["step", *names], plain, "CSV", comma="\t", coding="utf-16")
    put("tabs.tsv", ["step", *names], plain, "CSV", comma="\t")
    german = [[s, *(f"{x}".replace(".", ",") for x in v.values())] for s, v in rows]
    put("german.csv", ["Step", *names], german, "CSV", comma=";")
    put("latin-1.csv", ["step", "dur\u00e9e", *names], [[c[0], 1, *c[1:]] for c in plain], "CSV", coding="latin-1")
    put(
        "global-step.csv",
        ["epoch", "train/global_step", "train/grad_norm"],
        [[0.1, s, v[NORM]] for s, v in rows],
        "CSV",
        EXPLODES[0],
    )
    put("another-name.csv", ["iteration", "total gradient norm"], [[s, v[NORM]] for s, v in rows], "CSV", EXPLODES[0])
    put("without-steps.csv", names, [c[1:] for c in plain], "CSV", *EXPLODES, "has no step column")
    put(
        "resumed.csv",
        ["step", *names],
        [[s, *v.values()] for s, v in story("resumed")],
        "CSV",
        EXPLODES[0],
        "12 steps (41-52)",
    )
    panel = ["Step", f"run-7 - {NORM}", f"run-7 - {NORM}__MIN", f"run-7 - {NORM}__MAX"]
    put(
        "wandb-panel.csv",
        panel,
        [[s, v[NORM], v[NORM], v[NORM]] for s, v in rows],
        "W&B's CSV",
        EXPLODES[0],
        quoting=csv.QUOTE_ALL,
    )
    pairs = zip(rows[::2], rows[1::2], strict=True)  # a panel of few points: a point is a mean, and hides the spike
    few = [[s, (a[NORM] + b[NORM]) / 2, min(a[NORM], b[NORM]), max(a[NORM], b[NORM])] for (s, a), (_, b) in pairs]
    put("wandb-points.csv", panel, few, "W&B's CSV", "Step 47: gradient norm 903,")
    several = ["Step", *(f"{run} - {NORM}{end}" for run in ("calm - 1", "bad") for end in ("", "__MIN", "__MAX"))]
    cells = [[s, *[c[NORM]] * 3, *[v[NORM]] * 3] for (s, v), (_, c) in zip(rows, calm, strict=True)]
    put("wandb-two-runs.csv", several, cells, "W&B's CSV", EXPLODES[0], "calm - 1: No spike in 60 steps")
    relative = ["Relative Time (Process)", f"run-7 - {NORM}"]
    put(
        "wandb-relative.csv",
        relative,
        [[s * 31.5, v[NORM]] for s, v in rows],
        "W&B's CSV",
        EXPLODES[0],
        "the steps were counted",
    )
    frame = pd.DataFrame([{"_step": s, "_runtime": s * 31.5, "_timestamp": 1.7e9 + s, **v} for s, v in rows])
    frame.to_csv(out / "tables" / "wandb-history.csv")
    answer("tables/wandb-history.csv", "CSV", *EXPLODES)
    frame.to_csv(out / "tables" / "wandb-history.csv.gz", compression={"method": "gzip", "mtime": 1})
    answer("tables/wandb-history.csv.gz", "CSV", *EXPLODES)
    board = [[1.7e9 + s, s, v[NORM]] for s, v in rows]
    put("run-a-tag-actor_grad_norm.csv", ["Wall time", "Step", "Value"], board, "TensorBoard's CSV", EXPLODES[0])
    put(
        "downloaded.csv",
        ["Wall time", "Step", "Value"],
        board,
        "TensorBoard's CSV",
        EXPLODES[0],
        "was taken for the gradient norm",
    )
    long = [[n, s, x] for s, v in rows for n, x in v.items()]
    put("long.csv", ["tag", "step", "value"], long, "a CSV of values")
    swan = ["step", f"exp-{NORM}", f"exp-{NORM}_timestamp"]
    put("swanlab.csv", swan, [[s, v[NORM], 1.7e9 + s] for s, v in rows], "CSV", EXPLODES[0])


def refusals(out: Path) -> None:
    """What is no log: the sentence says what to do."""
    (out / "refused").mkdir(parents=True, exist_ok=True)
    files = {
        "empty.log": (b"", "is empty: name a log with at least one training step"),
        "words.txt": (b"Nothing happened today.\nStep by step we go.\n", "has no metrics that can be read"),
        "config.json": (b'{"lr": 1e-06, "model": {"path": "x"}}', "has no metrics that can be read"),
        "picture.png": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "has no metrics that can be read"),
        "weights.bin": (bytes(range(256)) * 8, "has no metrics that can be read"),
        "archive.zip": (b"PK\x03\x04" + bytes(64), "unpack it first: unzip"),
        "no-step.csv": (b"a,b\n1,2\n3,4\n", "has no step column and none that looks like a gradient norm"),
        "torn.db": (b"SQLite format 3\0" + bytes(100), "has no metrics that can be read"),
        "torn.wandb": (b":W&B\xe1\xbe\0" + bytes(40), "has no metrics that can be read"),
    }
    for name, (content, said) in files.items():
        (out / "refused" / name).write_bytes(content)
        answer(f"refused/{name}", "", said, refused=True)


def lines(out: Path) -> None:
    for make in (consoles, trainers, tables, refusals):
        make(out)


# -- written by the tools themselves


def verl(out: Path) -> None:
    """Every logger of the verl that is imported, told the same steps by its own ``Tracking``."""
    from importlib.metadata import version as installed

    from verl import __file__ as where

    found = Path(where).parent / "version" / "version"
    version = found.read_text().strip() if found.is_file() else installed("verl")
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

    def train(folder: Path, kind: str, **how):
        rows = [{"x": values[NORM]} for _, values in story(kind)]
        said = io.StringIO()
        args = TrainingArguments(
            str(folder),
            per_device_train_batch_size=1,
            logging_steps=1,
            save_steps=20,
            num_train_epochs=1,
            report_to=["tensorboard"],
            logging_dir=str(folder / "runs"),
            save_only_model=False,
            use_cpu=True,
            save_safetensors=False,
            **how,
        )

        class InOrder(Trainer):
            def _get_train_sampler(self, *_):
                return torch.utils.data.SequentialSampler(self.train_dataset)

        with redirect_stdout(said), redirect_stderr(said):
            made = InOrder(Model(), args, train_dataset=rows)
            made.train()
            made.save_state()
        return said.getvalue()

    folder = out / "trainer"
    said = train(folder / "output", "explodes")
    (folder / "stdout.log").write_text(said)
    shutil.copy(folder / "output" / "trainer_state.json", folder / "trainer_state.json")
    shutil.copytree(folder / "output" / "runs", folder / "tensorboard")
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix in (".bin", ".pt", ".pth", ".safetensors"):
            path.unlink()
    lzma_text = (folder / "trainer_state.json").read_bytes()
    (folder / "trainer_state.json.xz").write_bytes(lzma.compress(lzma_text))
    says = EXPLODES[0]
    answer("trainer/output", "trainer_state.json", says, "hold the same steps", "checkpoint-40")
    answer("trainer/stdout.log", "a Trainer's printed dicts", says, "do not say their step")
    answer("trainer/trainer_state.json", "trainer_state.json", says)
    answer("trainer/trainer_state.json.xz", "trainer_state.json", says)
    answer("trainer/tensorboard", "TensorBoard", says)
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
            found = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            writer.add_event(Event(wall_time=step, step=step, summary=Summary(value=found)))
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
    folder.mkdir(parents=True)
    both = (("bad", "explodes"), ("good", "calm"))
    for name, kind in both:
        run = wandb.init(project="p", name=name, dir=str(folder), config={"lr": 1e-6, "kind": kind})
        for step, values in story(kind):
            run.log(values, step=step)
        run.finish()
    answer("trackers/wandb", "W&B's local run", *EXPLODES, "No spike in 60 steps")
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


def _thin(folder: Path) -> None:
    """Take away what is no metric, and the empty pages of databases."""
    import sqlite3

    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_symlink() or path.name in (
            "requirements.txt",
            "wandb-metadata.json",
            "swanlab-metadata.json",
            ".gitignore",
        ):
            path.unlink()
        elif path.suffix in (".lock",) or (
            path.is_file() and path.parent.name in ("logs", "debug", "console") and "metrics" not in path.parts
        ):
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
        {"lines": lines, "verl": verl, "trainer": trainer, "trackers": trackers}[part](Path.cwd())
    before = json.loads(known.read_text()) if known.is_file() else {}
    known.write_text(json.dumps(dict(sorted({**before, **ANSWERS}.items())), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
