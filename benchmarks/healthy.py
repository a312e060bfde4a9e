# SPDX-License-Identifier: Apache-2.0
"""The price of a healthy step: verl's real actor unpatched, patched and off, patched and on.

    python -m benchmarks.healthy                        # 200 interleaved groups
    python -m benchmarks.healthy --pairs 40 --tree ~/verl

Needs what runs verl on a CPU (requirements/demo.txt). Every group updates the same batch in all
variants, in random order, so that what else the machine does falls on all of them; ratios are taken
within a group. The unpatched verl runs twice: what differs between its two is noise. Also counts
every collective that one update enters.
"""

import argparse
import json
import os
import platform
import random
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.digest import REPO, digest
from benchmarks.progress import Progress
from tests.world import World

SCHEMA_VERSION = 1
ON = ["actor_rollout_ref.actor.spike_detection=True"]
RATIOS = {
    "on / off": ("on", "off"),
    "off / unpatched": ("off", "unpatched"),
    "on / unpatched": ("on", "unpatched"),
    "unpatched again / unpatched": ("unpatched_again", "unpatched"),
}
_WARM_UP = 5


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write healthy.json and healthy.md."""
    parsed = _parser().parse_args(arguments)
    command = shlex.join(["python", "-m", "benchmarks.healthy", *(arguments or sys.argv[1:])])
    with tempfile.TemporaryDirectory() as scratch:
        base, patched = _trees(Path(scratch), parsed.tree)
        run = measure(base, patched, parsed.pairs, parsed.ranks, Path(scratch))
    run["command"] = command
    out = Path(parsed.out)
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(run, indent=1, sort_keys=True, allow_nan=False)
    (out / "healthy.json").write_text(text + "\n", encoding="utf-8")
    (out / "healthy.md").write_text(markdown(run) + "\n", encoding="utf-8")
    print(markdown(run))
    return 0


def measure(base: Path, patched: Path, pairs: int, ranks: int, scratch: Path) -> dict[str, Any]:
    """Interleaved updates; see the module.

    Args:
        base: folder that holds the unpatched ``verl`` package.
        patched: folder that holds the patched one.
        pairs: groups to time.
        ranks: processes of each trainer.
        scratch: where events would go.
    """
    slow = {"timeout_s": 1800}
    with World(ranks, path=(str(base),), **slow) as plain, World(ranks, path=(str(patched),), **slow) as ours:
        worlds = {"unpatched": plain, "unpatched_again": plain, "off": ours, "on": ours}
        for name, world in worlds.items():
            overrides = ON if name == "on" else []
            dump_dir = str(scratch / name)
            shards = world.run("benchmarks.actor.prepare", name=name, overrides=overrides, dump_dir=dump_dir)
        collectives = {name: _counted(world, name) for name, world in worlds.items()}
        for seed in range(_WARM_UP):
            for name, world in worlds.items():
                world.run("benchmarks.actor.update", name=name, seed=seed)
        groups, events, tracked = _groups(worlds, pairs)
    return {
        "schema_version": SCHEMA_VERSION,
        "core_sha256": digest(),
        "machine": {"processor": platform.machine(), "cpus": os.cpu_count()},
        "versions": {"python": platform.python_version()},
        "ranks": ranks,
        "weights": shards[0],
        "pairs": len(groups),
        "dropped_with_an_event": events,
        "updates_that_tracked_norms": tracked,
        "median_seconds": {name: median(g[name]["seconds"] for g in groups) for name in worlds},
        "ratios": {
            measure: {
                label: _interval([g[top][measure] / g[bottom][measure] for g in groups])
                for label, (top, bottom) in RATIOS.items()
            }
            for measure in ("seconds", "cpu_seconds")
        },
        "hook_share": _interval([g["on"]["hook_seconds"] / g["on"]["cpu_seconds"] for g in groups]),
        "collectives": collectives,
        "groups": groups,
    }


def _groups(worlds: dict[str, World], pairs: int) -> tuple[list[dict[str, dict]], int, int]:
    order = random.Random(0)
    groups, events, tracked, progress = [], 0, 0, Progress(pairs)
    while len(groups) < pairs:
        group, has_event = {}, False
        for name in order.sample(sorted(worlds), len(worlds)):
            seed = 1000 + len(groups) + events
            found = worlds[name].run("benchmarks.actor.update", name=name, seed=seed)
            # the step lasts as long as its slowest rank; processor time is spent by all of them
            group[name] = {
                "seconds": max(rank["seconds"] for rank in found),
                "cpu_seconds": sum(rank["cpu_seconds"] for rank in found),
                "hook_seconds": sum(rank["hook_seconds"] for rank in found),
            }
            has_event |= any(rank["events"] for rank in found)
            tracked += found[0]["tracks_norms"]
        if has_event:  # not a healthy step
            events += 1
            continue
        groups.append(group)
        progress.step(f"on {group['on']['seconds']:.3f} s, off {group['off']['seconds']:.3f} s")
    return groups, events, tracked


def _counted(world: World, name: str) -> dict[str, int]:
    found = world.run("benchmarks.actor.update", name=name, seed=500, counts=True)
    return dict(sorted(found[0]["collectives"].items()))


def _interval(values: list[float]) -> dict[str, float]:
    """Median with its bootstrap 95% interval (percentiles of 2000 resamples)."""
    draw = random.Random(1)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(2000))
    return {"median": median(values), "low": medians[50], "high": medians[1949]}


def markdown(run: dict[str, Any]) -> str:
    """The ratios and the collectives as tables."""
    lines = [f"`{run['command']}`", "", f"{run['pairs']} groups, {run['ranks']} ranks", ""]
    lines += [
        "| `update_policy` | wall time: median ratio (95%) | processor time: median ratio (95%) |",
        "| --- | --- | --- |",
    ]
    for label in RATIOS:
        cells = [_cell(run["ratios"][measure][label]) for measure in ("seconds", "cpu_seconds")]
        lines.append(f"| {label} | {cells[0]} | {cells[1]} |")
    lines += ["", f"Hook's share of the processor time of an update: {_cell(run['hook_share'])}."]
    lines += ["", "| variant | median seconds | collectives of one update |", "| --- | --- | --- |"]
    for name, counts in run["collectives"].items():
        listed = ", ".join(f"{count} {operator}" for operator, count in counts.items())
        total = sum(counts.values())
        lines.append(f"| {name} | {run['median_seconds'][name]:.4f} | {total}: {listed} |")
    return "\n".join(lines)


def _cell(interval: dict[str, float]) -> str:
    return f"{interval['median']:.4f} ({interval['low']:.4f} to {interval['high']:.4f})"


def _trees(scratch: Path, tree: str | None) -> tuple[Path, Path]:
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
