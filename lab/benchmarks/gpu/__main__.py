# SPDX-License-Identifier: Apache-2.0
"""Check a GPU: repeatability, closure, certificate, recall, cost, memory and waits, on models of random weights.

    python -m lab.benchmarks.gpu                              # one GPU: 0.5B, bf16, 4k to 32k tokens, every attention
    python -m lab.benchmarks.gpu --parts first                # a minute: is anything wrong at all
    python -m lab.benchmarks.gpu --size 1.5B --tokens 32768
    python -m lab.benchmarks.gpu --forecast                   # no GPU: a search's memory, from sizes only
    torchrun --nproc-per-node 8 -m lab.benchmarks.gpu         # the same step on eight
    python -m lab.benchmarks.gpu --device cpu --size tiny --tokens 128

Needs torch and this repository; uses flash-attn and transformers if installed. Every cell is written to gpu.json and
gpu.md as soon as it is measured, failures included. The exit code is 1 if a cell or its check failed.
"""

import argparse
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS has no deterministic kernels

import torch
import torch.distributed as dist

from gradloc.core.memory_plans import PLANS
from lab.benchmarks.gpu import cells, forecast
from lab.benchmarks.gpu.cells import MODELS, PLANTS, Bench, attended, attentions
from lab.benchmarks.run import Parser, about, write
from lab.output import table

PARTS = ("first", "room", "mask", "syncs", "two", "cells")
"""Parts in order; the first takes a minute on a GPU."""


def cells_of(part: str, parsed: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield a part's cells as (name, function that measures it)."""
    least = min(parsed.tokens)
    if part == "two" and "RANK" not in os.environ:
        yield "two", lambda: cells.two_cell(device, parsed.size, least, parsed.out)
    repeats = {"repeats": cells.repeat_cell}
    spikes = {plant: partial(cells.spike_cell, plant=plant) for plant in PLANTS}
    on_a_bench: dict[str, dict[str, Callable[[Bench], dict[str, Any]]]] = {
        "first": {"tracker": cells.tracker_cell, **repeats, **{name: spikes[name] for name in ("single_10", "three")}},
        "room": {f"way {number}": partial(cells.room_cell, number=number) for number in range(1, len(PLANS))},
        "mask": {"mask": cells.mask_cell},
        "syncs": {"syncs": cells.syncs_cell},
        "cells": repeats | spikes,
    }
    attentions_of = {"cells": parsed.attention or attentions(device)}
    for attention in attentions_of.get(part, ["sdpa"]):
        for tokens in parsed.tokens if part == "cells" else [least]:
            bench = cache(partial(Bench, parsed.size, attention, tokens, parsed.dtype, device))
            where = f"{attention} {tokens} " if part == "cells" else ""
            for name, measure in on_a_bench.get(part, {}).items():
                yield where + name, partial(_on, bench, measure)


def _on(bench: Callable[[], Bench], measure: Callable[[Bench], dict[str, Any]]) -> dict[str, Any]:
    """Return a cell's facts; the first one makes the bench."""
    made = bench()
    with attended(made.attention, is_deterministic=False):
        return made.facts() | measure(made)


def main(arguments: list[str] | None = None) -> int:
    """Measure all parts; write each cell as it comes."""
    options = Parser("gpu", __doc__)
    add = options.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--size", choices=MODELS, default="0.5B")
    add("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    add("--attention", nargs="+", choices=("sdpa", "sdpa_flash", "flash_attn", "varlen"))
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add(
        "--forecast", action="store_true", help="measure nothing: what the search's own forecast says of cards of 80 GB"
    )
    parsed = options.parse_args(arguments)
    if parsed.forecast:
        print(forecast.markdown(parsed.tokens))
        return 0
    device = _join(parsed.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"cpu ({platform.machine()})"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    run: dict[str, Any] = {**about(parsed), "device": name, "versions": versions, "cells": []}
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    for part in parsed.parts:
        for name, measure in cells_of(part, parsed, device):
            run["cells"].append({"part": part, "cell": name, **_measured(measure)})
            if is_writer:
                write(run, parsed.out, "gpu")
                (parsed.out / "gpu.md").write_text(markdown(run) + "\n", encoding="utf-8")
                print(table([HEAD, row_of(run["cells"][-1])]).splitlines()[-1], flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(any(cell["is_ok"] is False for cell in run["cells"]))


def _measured(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        found = measure()
    except Exception as error:  # the next cell may work
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}", "is_ok": False}
    return found | {"took_seconds": time.perf_counter() - started}


HEAD = ("part", "cell", "model", "tokens", "holds", "took (s)", "what was measured")
_SAID_ELSEWHERE = {"part", "cell", "model", "tokens", "is_ok", "took_seconds", "attention", "healthy_norm", "plant"}


def markdown(run: dict[str, Any]) -> str:
    """Return the run as a table, with its origin."""
    about = f"{run['device']}, torch {run['versions']['torch']}, core `{run['core_sha256'][:8]}`: `{run['command']}`"
    return f"{about}\n\n{table([HEAD, *map(row_of, run['cells'])])}"


def row_of(cell: dict[str, Any]) -> list[str]:
    """Return a cell's row of the table."""
    facts = [f"{name} {_number(value)}" for name, value in cell.items() if name not in _SAID_ELSEWHERE]
    holds = {True: "yes", False: "NO", None: "-"}[cell["is_ok"]]
    values = [cell["part"], cell["cell"], cell.get("model", ""), cell.get("tokens", ""), holds]
    return [*map(str, values), f"{cell['took_seconds']:.1f}", ", ".join(facts)]


def _number(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} x{count}" for name, count in value.items()) or "nowhere"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _join(kind: str) -> torch.device:
    """Join torchrun's group or a group of one, and return the device; processes may share devices over gloo."""
    rank, size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    is_shared = kind == "cpu" or size > torch.cuda.device_count()
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank % torch.cuda.device_count())
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if is_shared else "cpu:gloo,cuda:nccl"  # as in verl's groups
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread of gloo that outlives the interpreter would abort the process
