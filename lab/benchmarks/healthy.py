# SPDX-License-Identifier: Apache-2.0
"""Measure the price of a healthy step: verl's real worker unpatched, and with detection on.

    python -m lab.benchmarks.healthy                        # 200 interleaved groups
    python -m lab.benchmarks.healthy --pairs 40 --tree ~/verl

With verl 0.9 installed (`requirements/verl09.txt`), its engine; else verl 0.7.0's actor (`requirements/demo.txt`), also
patched and off. On 0.9, off is verl's own engine, since ours is registered only in a run that enables it. Every group
updates the same batch in all variants, in random order, so that other load affects all of them; ratios are within a
group. The unpatched verl runs twice, which shows the noise. Also counts every collective of one update.
"""

import argparse
import os
import platform
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from lab.benchmarks.actor import is_engine
from lab.benchmarks.run import MACHINE, Progress, Record, as_typed, digest, finish, parser
from lab.output import table
from tests.world import World

SCHEMA_VERSION = 1
ON = {True: ["+gradloc=on"], False: ["actor_rollout_ref.actor.spike_detection=True"]}
"""Whether the installed verl has engines -> overrides that enable gradloc."""
AGAIN = "unpatched_again"
_WARM_UP = 5


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write healthy.json and healthy.md."""
    options = with_worlds(parser("healthy", __doc__))
    options.add_argument("--pairs", type=int, default=200, help="interleaved groups to time")
    parsed = options.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch, worlds(parsed.ranks, parsed.tree) as variants:
        run = {"command": as_typed("healthy", arguments), **measure(variants, parsed.pairs, Path(scratch))}
    finish(run, parsed.out, "healthy", markdown(run))
    return 0


def with_worlds(options: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of :func:`worlds` to a command line."""
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--tree", help="a patched verl checkout (default: the demo's own copy)")
    return options


@contextmanager
def worlds(size: int, tree: str | None) -> Iterator[dict[str, World]]:
    """Yield variant -> its ``size`` ranks; ``tree`` is passed to :func:`trees`."""
    slow: dict[str, Any] = {"timeout_s": 1800}
    if is_engine():
        from lab.experiments.verl09 import ENVIRONMENT

        os.environ.update(ENVIRONMENT)
        with World(size, **slow) as world:
            yield dict.fromkeys(("unpatched", AGAIN, "on"), world)
        return
    base, patched = trees(tree)
    with World(size, path=(str(base),), **slow) as plain, World(size, path=(str(patched),), **slow) as ours:
        yield {"unpatched": plain, AGAIN: plain, "off": ours, "on": ours}


def measure(worlds: dict[str, World], pairs: int, scratch: Path) -> Record:
    """Measure interleaved updates; see the module.

    Args:
        worlds: variant -> ranks.
        pairs: number of groups to time.
        scratch: folder of models and events.
    """
    for name, world in worlds.items():
        folder = scratch / name
        folder.mkdir()
        overrides = ON[is_engine()] if name == "on" else []
        shards = world.run("lab.benchmarks.actor.prepare", name=name, overrides=overrides, folder=str(folder))
    counted = {name: world.run("lab.benchmarks.actor.count", name=name, seed=500)[0] for name, world in worlds.items()}
    for seed in range(_WARM_UP):
        for name, world in worlds.items():
            world.run("lab.benchmarks.actor.update", name=name, seed=seed)
    groups, spikes = _groups(worlds, pairs)
    ratios = {f"{name} / unpatched": (name, "unpatched") for name in worlds if name != "unpatched"}
    return {
        "schema_version": SCHEMA_VERSION,
        "core_sha256": digest(),
        "machine": MACHINE,
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
        "collectives": {name: found["collectives"] for name, found in counted.items()},
        "groups": groups,
    }


def _groups(worlds: dict[str, World], pairs: int) -> tuple[list[dict[str, dict]], int]:
    order = random.Random(0)
    groups, spikes, progress = [], 0, Progress(pairs)
    while len(groups) < pairs:
        group, is_healthy = {}, True
        for name in order.sample(sorted(worlds), len(worlds)):
            found = worlds[name].run("lab.benchmarks.actor.update", name=name, seed=1000 + len(groups) + spikes)
            group[name] = spent(found)
            is_healthy &= not any(rank["spikes"] for rank in found)
        if not is_healthy:
            spikes += 1
            continue
        groups.append(group)
        progress.step(f"on {group['on']['seconds']:.3f} s, unpatched {group['unpatched']['seconds']:.3f} s")
    return groups, spikes


def spent(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Return an update's wall time, that of its slowest rank, and the processor time of all ranks."""
    return {"seconds": max(r["seconds"] for r in ranks), "cpu_seconds": sum(r["cpu_seconds"] for r in ranks)}


def _interval(values: list[float]) -> dict[str, float]:
    """Return the median and its bootstrap 95% interval (percentiles of 2000 resamples)."""
    draw = random.Random(1)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(2000))
    return {"median": median(values), "low": medians[50], "high": medians[1949]}


def markdown(run: Record) -> str:
    """Return the ratios and the collectives as tables."""
    ratios = [["update", "wall time: median ratio (95%)", "processor time: median ratio (95%)"]]
    for label in run["ratios"]["seconds"]:
        ratios.append([label, *(_cell(run["ratios"][measure][label]) for measure in ("seconds", "cpu_seconds"))])
    variants = [["variant", "median seconds", "collectives of one update"]]
    for name, counts in run["collectives"].items():
        listed = ", ".join(f"{count} {operator}" for operator, count in counts.items())
        variants.append([name, f"{run['median_seconds'][name]:.4f}", f"{sum(counts.values())}: {listed}"])
    about = f"`{run['command']}`\n\n{run['pairs']} groups, {run['ranks']} ranks"
    return "\n\n".join([about, table(ratios), table(variants)])


def _cell(interval: dict[str, float]) -> str:
    return f"{interval['median']:.4f} ({interval['low']:.4f} to {interval['high']:.4f})"


def trees(tree: str | None) -> tuple[Path, Path]:
    """Return the unpatched verl 0.7.0, and a patched one: the given checkout, or the demo's."""
    from lab.experiments import environment
    from patchkit.build import bases, ensure_base

    patched = Path(tree).resolve() if tree else environment.ensure_patched_copy(sys.executable)
    return ensure_base(bases()["v0.7.0"]), patched


if __name__ == "__main__":
    sys.exit(main())
