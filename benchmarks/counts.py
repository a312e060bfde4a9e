# SPDX-License-Identifier: Apache-2.0
"""What an update asks of the device with gradloc and without: operations, reads by the host, collectives, bytes.

    python -m benchmarks.counts                  # the installed verl: 0.9 (its engine) or 0.7.0 (its actor)
    python -m benchmarks.counts --tree ~/verl    # a patched checkout of 0.7

Counted on a CPU, on the path that a GPU takes, so the same on every machine: :mod:`benchmarks.counter`. One update is
two mini-batches of four micro-batches a rank, on two ranks; the spiking one has one token planted in the second
mini-batch. Writes counts.json and counts.md; the exit code is 1 where a limit is broken.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.actor import is_engine
from benchmarks.healthy import ON, worlds
from benchmarks.run import REPO, digest
from tests.world import World

ACTOR = "actor_rollout_ref.actor"
SETTINGS = [
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    f"{ACTOR}.use_dynamic_bsz=false",
]
THRESHOLD = f"{ACTOR}.grad_norm_threshold=640"
PLANT = (13, 5, 1e4)
"""Row, response position and advantage."""
MORE_OPS = 0.03
MOST_READS = 60
"""Of a spiking update beside its forwards and backwards."""


def measure(worlds: dict[str, World], scratch: Path) -> dict[str, Any]:
    """Count a healthy and a spiking update of each variant, on the first rank.

    Args:
        worlds: ``unpatched`` and ``on``.
        scratch: where models and events go.
    """
    found = {}
    for name in ("unpatched", "on"):
        folder = scratch / name
        folder.mkdir()
        given = {"overrides": [*ON[is_engine()], THRESHOLD] if name == "on" else [], "settings": SETTINGS}
        worlds[name].run("benchmarks.actor.prepare", name=name, folder=str(folder), **given)
        for seed in (1, 2):  # the first update allocates
            worlds[name].run("benchmarks.actor.update", name=name, seed=seed)
        for kind, plant in (("healthy", None), ("spiking", PLANT)):
            counted = worlds[name].run("benchmarks.actor.count", name=name, seed=3, plant=plant)
            found[f"{kind}, {name}"] = counted[0]
    return {"core_sha256": digest(), "verl": "0.9" if is_engine() else "0.7", "updates": found}


def broken(run: dict[str, Any]) -> list[str]:
    """What is over its limit, a sentence each."""
    updates = run["updates"]
    plain, healthy, spiking = (updates[name] for name in ("healthy, unpatched", "healthy, on", "spiking, on"))
    found = []
    if healthy["spikes"] or not spiking["spikes"]:
        found.append(f"spikes: healthy {healthy['spikes']}, expected 0; spiking {spiking['spikes']}, expected 1")
    if healthy["ops"] > (1 + MORE_OPS) * plain["ops"]:
        found.append(f"a healthy update has {healthy['ops']} operations, at most 3 % more than {plain['ops']} expected")
    if healthy["reads_before_step"] > plain["reads_before_step"]:
        found.append(f"{healthy['reads_before_step']} reads before the step, {plain['reads_before_step']} expected")
    if healthy["collectives"] != plain["collectives"]:
        found.append(f"collectives {healthy['collectives']}, expected {plain['collectives']}")
    beside = reads_of_search(run)
    if beside > MOST_READS:
        found.append(f"a spiking update reads {beside} times beside its forwards and backwards, expected {MOST_READS}")
    return found


def reads_of_search(run: dict[str, Any]) -> int:
    """Reads of a spiking update that are neither its own nor those of the search's forwards and backwards."""
    updates = run["updates"]
    return updates["spiking, on"]["reads"] - updates["spiking, unpatched"]["reads"]


def markdown(run: dict[str, Any]) -> str:
    """A table: a line for each update."""
    lines = [
        "| update | operations | reads | before the step | in a search's passes | collectives | read (MB) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, told in run["updates"].items():
        cells = [f"verl {run['verl']}, {name}", told["ops"], told["reads"], told["reads_before_step"]]
        cells += [told["reads_in_passes"], sum(told["collectives"].values()), f"{told['bytes'] / 1e6:.0f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Count, print a table, and say what is over its limit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counts", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tree", help="a patched verl checkout (default: patches a copy)")
    parser.add_argument("--out", type=Path, default=REPO / "runs" / "benchmarks" / "counts")
    parsed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch, worlds(Path(scratch), parsed.ranks, parsed.tree) as found:
        run = measure(found, Path(scratch))
    parsed.out.mkdir(parents=True, exist_ok=True)
    (parsed.out / "counts.json").write_text(json.dumps(run, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (parsed.out / "counts.md").write_text(markdown(run) + "\n", encoding="utf-8")
    print(markdown(run))
    over = broken(run)
    for sentence in over:
        print(f"over its limit: {sentence}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
