# SPDX-License-Identifier: Apache-2.0
"""Every strategy on the same spikes, side by side, against brute force.

    python -m lab.benchmarks.localize --quick
    python -m lab.benchmarks.localize --full --out runs/benchmarks/localize
    python -m lab.benchmarks.localize --full --device cuda
    python -m lab.benchmarks.localize --model smollm2 --resume      # a pretrained language model, cell by cell

Needs torch; no verl, no Ray. Writes localize.json and localize.md.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from lab.benchmarks.localization.bench import Bench
from lab.benchmarks.localization.plan import Cell, full, pretrained, quick
from lab.benchmarks.localization.tables import markdown
from lab.benchmarks.run import MACHINE, REPO, Progress, Record, as_typed, digest, finish, parser, write

SCHEMA_VERSION = 1
CHOICES = ("sweep", "scenario", "dtype")
"""Of a cell, by which a part of the plan can be chosen."""


def main(arguments: list[str] | None = None) -> int:
    """Run the plan that the arguments name, and write what was measured."""
    parsed = _parser().parse_args(arguments)
    cells = pretrained(parsed.tokens, parsed.ranks) if parsed.model else full(parsed.seeds) if parsed.full else quick()
    cells = [cell for cell in cells if _is_wanted(cell, parsed)]
    if parsed.strategy:
        chosen = {cell: tuple(name for name in cell.strategies if name in parsed.strategy) for cell in cells}
        cells = [replace(cell, strategies=kept) for cell, kept in chosen.items() if kept]
    if not cells:
        print("localize: no cell is left: check --sweep, --scenario, --strategy, --device", file=sys.stderr)
        return 2
    command = as_typed("localize", arguments)
    kept = _kept(parsed.out) if parsed.resume else []
    run = measure(cells, parsed.device, parsed.threads, parsed.cache, command, parsed.out, kept=kept)
    finish(run, parsed.out, "localize", markdown(run))
    print(f"written to {parsed.out}/localize.json, localize.md", file=sys.stderr)
    return 0


def measure(
    cells: list[Cell],
    device: str,
    threads: int,
    folder: Path,
    command: str,
    out: Path | None = None,
    training_steps: int | None = None,
    kept: Sequence[Record] = (),
) -> Record:
    """Measure the cells in order; the run's whole record.

    Args:
        cells: what to measure.
        device: ``cpu`` or ``cuda``.
        threads: of torch, in this process.
        folder: where trained models are kept.
        command: for the record.
        out: where the record is kept up to date after every cell, so that an interrupted run is
            not lost.
        training_steps: see :class:`~lab.benchmarks.localization.bench.Bench`.
        kept: records of cells that need not be measured again.
    """
    torch.set_num_threads(threads)
    bench = Bench(folder, device, training_steps)
    done = {json.dumps(record["cell"], sort_keys=True): record for record in kept}
    for record in kept:
        bench.remember(Cell(**record["cell"]), record["history"])
    progress = Progress(len(cells))
    run = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "is_complete": False,
        "core_sha256": digest(),
        "machine": {**MACHINE, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu"},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cells": [],
    }
    try:
        for number, cell in enumerate(cells, 1):
            record = done.get(json.dumps(asdict(cell), sort_keys=True))
            if record is None:
                started = time.perf_counter()
                record = {**bench.measure(cell), "load": os.getloadavg()[0]}
                record["seconds"] = time.perf_counter() - started
            run["cells"].append(record)
            run["seconds"] = sum(cell["seconds"] for cell in run["cells"])
            run["is_complete"] = number == len(cells)
            if out is not None:
                write(run, out, "localize")
            what = f"{cell.scenario} N={cell.tokens} W={cell.ranks} M={cell.micro_batches}"
            progress.step(f"{what} {cell.model} {cell.dtype} seed {cell.seed}")
    finally:
        bench.close()
    return run


def _kept(out: Path) -> list[Record]:
    """What an earlier run wrote there, if it measured the same core."""
    path = out / "localize.json"
    run = json.loads(path.read_text()) if path.exists() else {"core_sha256": None}
    return run["cells"] if run["core_sha256"] == digest() else []


def _is_wanted(cell: Cell, parsed: argparse.Namespace) -> bool:
    chosen = {name: getattr(parsed, name) for name in CHOICES}
    if any(values and getattr(cell, name) not in values for name, values in chosen.items()):
        return False
    return parsed.device == "cpu" or cell.ranks <= torch.cuda.device_count()


def _parser() -> argparse.ArgumentParser:
    made = parser("localize", __doc__)
    add, size = made.add_argument, made.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="one seed, small (the default)")
    size.add_argument("--full", action="store_true", help="three seeds and all sweeps")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    size.add_argument("--model", choices=("smollm2",), help="a pretrained language model (half an hour, 6 GB)")
    add("--tokens", type=int, default=512, help="of a step on the pretrained model")
    add("--ranks", type=int, default=2, help="likewise")
    add("--resume", action="store_true", help="keep the cells that the record in --out has")
    add("--seeds", type=int, default=3, help="of the full battery")
    for name in (*CHOICES, "strategy"):
        add(f"--{name}", action="append", help=f"only this {name} (repeatable)")
    add("--threads", type=int, default=1, help="of the process that prepares cells")
    add("--cache", type=Path, default=REPO / ".gradloc" / "benchmarks")
    return made


if __name__ == "__main__":
    sys.exit(main())
