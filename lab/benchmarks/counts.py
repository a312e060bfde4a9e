# SPDX-License-Identifier: Apache-2.0
"""Count what an update asks of the device with gradloc and without: operations, reads, collectives, bytes.

    python -m lab.benchmarks.counts                  # the installed verl: 0.9 (its engine) or 0.7.0 (its actor)

Counted on a CPU, on the code path of a GPU; see :mod:`lab.benchmarks.counter`. An update has two mini-batches of four
micro-batches per rank, on two ranks; the spiking one has one token planted in the second mini-batch. Writes
counts-VERL.json and counts-VERL.md; the exit code is 1 if a limit is exceeded.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.benchmarks.actor import is_engine
from lab.benchmarks.run import Parser, Record, finish
from lab.experiments import environment, verl09
from lab.output import table
from patchkit.build import bases, ensure_base
from tests.world import World

ACTOR = "actor_rollout_ref.actor"
SETTINGS = [
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    f"{ACTOR}.use_dynamic_bsz=false",
]
ON = {True: ["+gradloc=on"], False: [f"{ACTOR}.spike_detection=True"]}
"""Whether the installed verl has engines -> overrides that enable gradloc."""
NAMES, KINDS = ("unpatched", "on"), ("healthy", "spiking")
"""The variants, and the updates of each."""
THRESHOLD = f"{ACTOR}.grad_norm_threshold=640"
PLANT = (13, 5, 1e4)
"""Row, response position and advantage."""
MORE_OPS = 0.01
MOST_READS = 60
"""Maximum reads of a spiking update in addition to its passes and to verl's loss in cures."""
HEAD = ["update", "operations", "reads", "before the step", "in a search's passes", "collectives", "read (MB)"]


@contextmanager
def worlds() -> Iterator[dict[str, World]]:
    """Yield the two ranks of each variant, ``unpatched`` and ``on``; on verl 0.7 on the demo's patched copy."""
    slow: dict[str, Any] = {"timeout_s": 1800}
    if is_engine():  # off is verl's own engine, since ours is registered only in a run that enables it
        os.environ.update(verl09.ENVIRONMENT)
        with World(2, **slow) as world:
            yield dict.fromkeys(NAMES, world)
        return
    base = ensure_base(bases()["v0.7.0"])
    patched = environment.ensure_patched_copy(sys.executable)
    with World(2, path=(str(base),), **slow) as plain, World(2, path=(str(patched),), **slow) as ours:
        yield {"unpatched": plain, "on": ours}


def measure(worlds: dict[str, World], scratch: Path) -> Record:
    """Count a healthy and a spiking update of each variant, on the first rank.

    Args:
        worlds: ``unpatched`` and ``on``.
        scratch: folder of models and events.
    """
    updates = {}
    for name in NAMES:
        folder = scratch / name
        folder.mkdir()
        given = {"overrides": [*ON[is_engine()], THRESHOLD] if name == "on" else [], "settings": SETTINGS}
        worlds[name].run("lab.benchmarks.actor.prepare", name=name, folder=str(folder), **given)
        for seed in (1, 2):  # the first update allocates
            worlds[name].run("lab.benchmarks.actor.update", name=name, seed=seed)
        for kind, plant in zip(KINDS, (None, PLANT), strict=True):
            counted = worlds[name].run("lab.benchmarks.actor.count", name=name, seed=3, plant=plant)
            updates[f"{kind}, {name}"] = counted[0]
    return {"verl": "0.9" if is_engine() else "0.7", "updates": updates}


def broken(run: Record) -> list[str]:
    """Return a sentence for each exceeded limit."""
    plain, loud, healthy, spiking = (run["updates"][f"{kind}, {name}"] for name in NAMES for kind in KINDS)
    name = "reads_before_step"
    limits = [
        ("spikes in a healthy update", healthy["spikes"], 0),
        ("a spiking update without a spike", not spiking["spikes"], False),
        ("operations of a healthy update", healthy["ops"], (1 + MORE_OPS) * plain["ops"]),
        ("reads of a healthy update before its step", healthy[name], plain[name]),
        ("reads of a spiking update in addition to its passes", spiking["reads"] - loud["reads"], MOST_READS),
    ]
    over = [f"{what}: {found}, at most {most} expected" for what, found, most in limits if found > most]
    if healthy["collectives"] != plain["collectives"]:
        over.append(f"collectives {healthy['collectives']}, expected {plain['collectives']}")
    return over


def markdown(run: Record) -> str:
    """Return a table with a row for each update."""
    rows: list[list[object]] = [HEAD]
    for name, counted in run["updates"].items():
        cells = [counted[key] for key in ("ops", "reads", "reads_before_step", "reads_in_passes")]
        cells += [sum(counted["collectives"].values()), f"{counted['bytes'] / 1e6:.0f}"]
        rows.append([f"verl {run['verl']}, {name}", *cells])
    return table(rows)


def main(arguments: list[str] | None = None) -> int:
    """Count, print a table and the exceeded limits."""
    parsed = Parser("counts", __doc__).parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch, worlds() as variants:
        run = measure(variants, Path(scratch))
    finish(parsed, run, markdown(run), f"counts-{run['verl']}")
    over = broken(run)
    for sentence in over:
        print(f"over its limit: {sentence}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
