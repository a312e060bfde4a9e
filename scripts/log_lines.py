# SPDX-License-Identifier: Apache-2.0
"""The logs that are written here, line by line: consoles, other trainers' formats, spreadsheets, and what is no log."""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterable
from pathlib import Path

from log_story import BOOM, EXPLODES, NORM, answer, renamed, story


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
    noise = "\x1b[36m(WorkerDict pid=4801, ip=10.0.0.3)\x1b[0m INFO engine: 812.3 tokens/s [repeated 7x across cluster]"
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
    import pyarrow

    (out / "console" / "packed.log.zst").write_bytes(pyarrow.compress(text, "zstd", asbytes=True))
    answer("console/packed.log.zst", form, *EXPLODES)
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
        f"10:00:{s % 60:02d} SUCCESS Step {s} | Time: 24.44s | Loss: 0.0123 | Entropy: {v['actor/entropy']:.4f} | "
        f"Mismatch KL: 0.0010 | Grad. Norm: {v[NORM]:.4f} | LR: 1.00e-06 | Throughput: 8123 tokens/s | "
        "MFU: 12.1% | Peak Mem.: 61.2 GiB"
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
    areal = []
    for s, v in rows:
        said = f"Epoch {1 + s // 30}/3 Step {s % 30 + 1}/30 Train step {s}/60 done."
        cells = (
            f"│ ppo_actor/task_reward/avg │ {v['critic/score/mean']:.4e} │ ppo_actor/update/grad_norm │ {v[NORM]:.4e} │"
        )
        areal += [f"20250801-10:00:00.123 StatsLogger INFO: {said}", f"╒{'═' * 85}╕", cells, f"╘{'═' * 85}╛"]
    put("areal.log", areal, "AReaL's log")
    megatron = [
        f" iteration {s:8d}/      60 | consumed samples: {s * 8:12d} | elapsed time per iteration (ms): 812.1 | "
        f"learning rate: 1.0E-06 | lm loss: 1.23E+00 | grad norm: {v[NORM]:.3f} | number of nan iterations:   0 |"
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
    console = [f"step:{s} - {dashed(v)}\n" for s, v in rows]
    cells = [
        {"cell_type": "code", "source": [], "outputs": [{"output_type": "stream", "name": "stdout", "text": console}]}
    ]
    (out / "trainers" / "notebook.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}, indent=1))
    answer("trainers/notebook.ipynb", "verl's console log", *EXPLODES)
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
    put("spaces.txt", ["step", "grad_norm"], [[s, v[NORM]] for s, v in rows], "CSV", EXPLODES[0], comma=" ")
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
