# SPDX-License-Identifier: Apache-2.0
"""Every strategy on the same spikes, side by side, against brute force.

    python -m benchmarks.localize --quick
    python -m benchmarks.localize --full --out runs/benchmarks/localize
    python -m benchmarks.localize --full --device cuda
    python -m benchmarks.localize --model smollm2 --resume      # a pretrained language model, cell by cell

Needs torch; no verl, no Ray. Writes localize.json, localize.md and, with matplotlib, localize.svg.
"""

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: python benchmarks/localize.py
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.localization.bench import Bench
from benchmarks.localization.plan import Cell, full, pretrained, quick
from benchmarks.localization.tables import markdown, plot
from benchmarks.run import REPO, Progress, as_typed, digest

SCHEMA_VERSION = 1


def main(arguments: list[str] | None = None) -> int:
    """Run the plan that the arguments name, and write what was measured."""
    parsed = _parser().parse_args(arguments)
    cells = pretrained(parsed.tokens, parsed.ranks) if parsed.model else full(parsed.seeds) if parsed.full else quick()
    cells = [cell for cell in cells if _is_wanted(cell, parsed)]
    if parsed.strategy:
        chosen = {cell: tuple(name for name in cell.strategies if name in parsed.strategy) for cell in cells}
        cells = [replace(cell, strategies=kept) for cell, kept in chosen.items() if kept]
    if not cells:
        print(
            "localize: no cell is left to measure: check --sweep, --scenario, --strategy, --device",
            file=sys.stderr,
        )
        return 2
    command = as_typed("localize", arguments)
    out = Path(parsed.out)
    kept = _kept(out) if parsed.resume else []
    run = measure(cells, parsed.device, parsed.threads, Path(parsed.cache), command, out, kept=kept)
    write(run, out)
    print(markdown(run))
    print(f"written to {out}/localize.json, localize.md", file=sys.stderr)
    return 0


def measure(
    cells: list[Cell],
    device: str,
    threads: int,
    folder: Path,
    command: str,
    out: Path | None = None,
    training_steps: int | None = None,
    kept: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Measure the cells in order; the run's whole record.

    Args:
        cells: what to measure.
        device: ``cpu`` or ``cuda``.
        threads: of torch, in this process.
        folder: where trained models are kept.
        command: for the record.
        out: where the record is kept up to date after every cell, so that an interrupted run is
            not lost.
        training_steps: see :class:`~benchmarks.localization.bench.Bench`.
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
        "machine": {
            "processor": platform.machine(),
            "cpus": os.cpu_count(),
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "trainings": bench.trainings,
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
                write_json(run, out)
            what = f"{cell.scenario} N={cell.tokens} W={cell.ranks} M={cell.micro_batches}"
            progress.step(f"{what} {cell.model} {cell.dtype} seed {cell.seed}")
    finally:
        bench.close()
    return run


def write_json(run: dict[str, Any], out: Path) -> None:
    """localize.json, replaced at once."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_finite(run), indent=1, sort_keys=True, allow_nan=False)
    scratch = out / "localize.json.new"
    scratch.write_text(text + "\n", encoding="utf-8")
    scratch.replace(out / "localize.json")


def write(run: dict[str, Any], out: Path) -> None:
    """localize.json, localize.md, and localize.svg where it can be drawn."""
    write_json(run, out)
    (out / "localize.md").write_text(markdown(run) + "\n", encoding="utf-8")
    if not plot(run, out / "localize.svg"):
        print("localize: no figure (needs matplotlib and a sweep over tokens)", file=sys.stderr)


def _kept(out: Path) -> list[dict[str, Any]]:
    """What an earlier run wrote there, if it measured the same core."""
    path = out / "localize.json"
    run = json.loads(path.read_text()) if path.exists() else {"core_sha256": None}
    return run["cells"] if run["core_sha256"] == digest() else []


def _is_wanted(cell: Cell, parsed: argparse.Namespace) -> bool:
    if parsed.sweep and cell.sweep not in parsed.sweep:
        return False
    if parsed.scenario and cell.scenario not in parsed.scenario:
        return False
    if parsed.dtype and cell.dtype not in parsed.dtype:
        return False
    return parsed.device == "cpu" or cell.ranks <= torch.cuda.device_count()


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.localize", description=__doc__.split("\n")[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="one seed, small (the default)")
    size.add_argument("--full", action="store_true", help="three seeds and all sweeps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    size.add_argument("--model", choices=("smollm2",), help="a pretrained language model (half an hour, 6 GB)")
    parser.add_argument("--tokens", type=int, default=512, help="of a step on the pretrained model")
    parser.add_argument("--ranks", type=int, default=2, help="likewise")
    parser.add_argument("--resume", action="store_true", help="keep the cells that the record in --out has")
    parser.add_argument("--seeds", type=int, default=3, help="of the full battery")
    parser.add_argument("--sweep", action="append", help="only this sweep (repeatable)")
    parser.add_argument("--scenario", action="append", help="only this scenario (repeatable)")
    parser.add_argument("--dtype", action="append", help="only what computes in this (repeatable)")
    parser.add_argument("--strategy", action="append", help="only this strategy (repeatable)")
    parser.add_argument("--threads", type=int, default=1, help="of the process that prepares cells")
    parser.add_argument("--out", default=str(REPO / "runs" / "benchmarks" / "localize"))
    parser.add_argument("--cache", default=str(REPO / ".gradloc" / "benchmarks"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
