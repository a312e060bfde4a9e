# SPDX-License-Identifier: Apache-2.0
"""The price of a healthy step: verl's real worker unpatched, and with detection on.

    python -m benchmarks.healthy                        # 200 interleaved groups
    python -m benchmarks.healthy --pairs 40 --tree ~/verl

With verl 0.9 installed (`requirements/verl09.txt`), its engine; else verl 0.7.0's actor (`requirements/demo.txt`), also
patched and off. On 0.9 off is verl's own engine, since ours is registered in a run that asks for it only. Every group
updates the same batch in all variants, in random order, so that what else the machine does falls on all of them; ratios
are taken within a group. The unpatched verl runs twice: what differs between its two is noise. Also counts every
collective that one update enters.
"""

import argparse
import json
import os
import platform
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.actor import is_engine
from benchmarks.run import REPO, Progress, as_typed, digest
from tests.world import World

SCHEMA_VERSION = 1
ON = {True: ["+gradloc=on"], False: ["actor_rollout_ref.actor.spike_detection=True"]}
"""By whether the installed verl has engines."""
AGAIN = "unpatched_again"
_WARM_UP = 5


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write healthy.json and healthy.md."""
    parsed = _parser().parse_args(arguments)
    command = as_typed("healthy", arguments)
    with tempfile.TemporaryDirectory() as scratch, worlds(Path(scratch), parsed.ranks, parsed.tree) as found:
        run = measure(found, parsed.pairs, Path(scratch))
    run["command"] = command
    out = Path(parsed.out)
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(run, indent=1, sort_keys=True, allow_nan=False)
    (out / "healthy.json").write_text(text + "\n", encoding="utf-8")
    (out / "healthy.md").write_text(markdown(run) + "\n", encoding="utf-8")
    print(markdown(run))
    return 0


@contextmanager
def worlds(scratch: Path, size: int, tree: str | None) -> Iterator[dict[str, World]]:
    """The variants, and the processes that run each.

    Args:
        scratch: where a patched copy of verl 0.7 goes.
        size: ranks.
        tree: a patched checkout in its place.
    """
    slow: dict[str, Any] = {"timeout_s": 1800}
    if is_engine():
        from experiments.verl09 import ENVIRONMENT

        os.environ.update(ENVIRONMENT)
        with World(size, **slow) as world:
            yield dict.fromkeys(("unpatched", AGAIN, "on"), world)
        return
    base, patched = trees(scratch, tree)
    with World(size, path=(str(base),), **slow) as plain, World(size, path=(str(patched),), **slow) as ours:
        yield {"unpatched": plain, AGAIN: plain, "off": ours, "on": ours}


def measure(worlds: dict[str, World], pairs: int, scratch: Path) -> dict[str, Any]:
    """Interleaved updates; see the module.

    Args:
        worlds: by variant.
        pairs: groups to time.
        scratch: where models and events go.
    """
    for name, world in worlds.items():
        folder = scratch / name
        folder.mkdir()
        overrides = ON[is_engine()] if name == "on" else []
        shards = world.run("benchmarks.actor.prepare", name=name, overrides=overrides, folder=str(folder))
    collectives = {name: _counted(world, name) for name, world in worlds.items()}
    for seed in range(_WARM_UP):
        for name, world in worlds.items():
            world.run("benchmarks.actor.update", name=name, seed=seed)
    groups, spikes = _groups(worlds, pairs)
    ratios = {f"{name} / unpatched": (name, "unpatched") for name in worlds if name != "unpatched"}
    return {
        "schema_version": SCHEMA_VERSION,
        "core_sha256": digest(),
        "machine": {"processor": platform.machine(), "cpus": os.cpu_count()},
        "versions": {"python": platform.python_version()},
        "verl": "0.9" if is_engine() else "0.7",
        "ranks": len(shards),
        "weights": sum(shards),
        "pairs": len(groups),
        "dropped_with_a_spike": spikes,
        "median_seconds": {name: median(g[name]["seconds"] for g in groups) for name in worlds},
        "ratios": {
            measure: {
                label: _interval([g[top][measure] / g[bottom][measure] for g in groups])
                for label, (top, bottom) in ratios.items()
            }
            for measure in ("seconds", "cpu_seconds")
        },
        "collectives": collectives,
        "groups": groups,
    }


def _groups(worlds: dict[str, World], pairs: int) -> tuple[list[dict[str, dict]], int]:
    order = random.Random(0)
    groups, spikes, progress = [], 0, Progress(pairs)
    while len(groups) < pairs:
        group, is_healthy = {}, True
        for name in order.sample(sorted(worlds), len(worlds)):
            found = worlds[name].run("benchmarks.actor.update", name=name, seed=1000 + len(groups) + spikes)
            # the step lasts as long as its slowest rank; processor time is spent by all of them
            group[name] = {
                "seconds": max(rank["seconds"] for rank in found),
                "cpu_seconds": sum(rank["cpu_seconds"] for rank in found),
            }
            is_healthy &= not any(rank["spikes"] for rank in found)
        if not is_healthy:
            spikes += 1
            continue
        groups.append(group)
        progress.step(f"on {group['on']['seconds']:.3f} s, unpatched {group['unpatched']['seconds']:.3f} s")
    return groups, spikes


def _counted(world: World, name: str) -> dict[str, int]:
    found = world.run("benchmarks.actor.count", name=name, seed=500)
    return found[0]["collectives"]


def _interval(values: list[float]) -> dict[str, float]:
    """Median with its bootstrap 95% interval (percentiles of 2000 resamples)."""
    draw = random.Random(1)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(2000))
    return {"median": median(values), "low": medians[50], "high": medians[1949]}


def markdown(run: dict[str, Any]) -> str:
    """The ratios and the collectives as tables."""
    lines = [f"`{run['command']}`", "", f"{run['pairs']} groups, {run['ranks']} ranks", ""]
    lines += [
        "| update | wall time: median ratio (95%) | processor time: median ratio (95%) |",
        "| --- | --- | --- |",
    ]
    for label in run["ratios"]["seconds"]:
        cells = [_cell(run["ratios"][measure][label]) for measure in ("seconds", "cpu_seconds")]
        lines.append(f"| {label} | {cells[0]} | {cells[1]} |")
    lines += ["", "| variant | median seconds | collectives of one update |", "| --- | --- | --- |"]
    for name, counts in run["collectives"].items():
        listed = ", ".join(f"{count} {operator}" for operator, count in counts.items())
        total = sum(counts.values())
        lines.append(f"| {name} | {run['median_seconds'][name]:.4f} | {total}: {listed} |")
    return "\n".join(lines)


def _cell(interval: dict[str, float]) -> str:
    return f"{interval['median']:.4f} ({interval['low']:.4f} to {interval['high']:.4f})"


def trees(scratch: Path, tree: str | None) -> tuple[Path, Path]:
    """The unpatched verl, and a patched one: the named checkout, or a copy with our patch on it."""
    from patchkit.apply.applier import Applier
    from patchkit.apply.library import Library
    from patchkit.build.base import ensure_base
    from patchkit.tree.checkout import resolve

    base = ensure_base()
    if tree is not None:
        return base, Path(tree).resolve()
    patched = scratch / base.name
    shutil.copytree(base, patched)
    Applier(resolve(str(patched)), Library(REPO / "patches")).apply()
    return base, patched


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.healthy", description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=200, help="interleaved groups to time")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tree", help="a patched verl checkout (default: patches a copy)")
    parser.add_argument("--out", default=str(REPO / "runs" / "benchmarks" / "healthy"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
