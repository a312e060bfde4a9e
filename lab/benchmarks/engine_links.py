# SPDX-License-Identifier: Apache-2.0
"""Plant the faults of :mod:`lab.benchmarks.links` in verl 0.9's engine: does the event name the right link?

    python -m lab.benchmarks.engine_links             # three fresh seeds of each; in verl 0.9's environment

verl's own worker and trainer around a model of 60k parameters (tests/adapters/verl09/harness.py), FSDP2, one process.
"""

import itertools
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lab.benchmarks.links import ENDS, FAULTS, STRENGTHS, Plant, judged, report
from lab.benchmarks.run import Parser, Record, finish, seeds_of

HEALTHY = 24
_AFTER = 3

FACTORS = {"token": 1e4, "row": 1e3, "batch": 1e3}
"""Fault of the batch -> factor of its advantages."""


class EnginePlant(Plant):
    """A fault in this trainer's engine, whose tiny model takes more."""

    weight_factor, moment_factor = 50.0, 1e-12


def update_with(made: Any, fault: Plant, step: int, batch: Any) -> None:
    """Run one update, ``step`` counted from the fault's first."""
    part, take, optimizer = fault.part(step), made.engine.optimizer_step, made.engine.optimizer
    if part == 0:
        made.update(batch)
        return
    fault.before_forward()
    if fault.name in FACTORS:
        row = 5 + fault.attempt
        place = {"token": (row, 3), "row": row, "batch": slice(None)}[fault.name]
        batch.batch["advantages"][place] *= (FACTORS[fault.name] * fault.strength) ** part

    def optimizer_step() -> Any:
        fault.after_backward(part)
        return take()

    own_step = optimizer.step

    def step_at_fault(*args: Any, **given: Any) -> Any:  # after the norm was seen
        with fault.optimizer_at_fault():
            return own_step(*args, **given)

    with (
        mock.patch.object(made.engine, "optimizer_step", optimizer_step),
        mock.patch.object(optimizer, "step", step_at_fault),
    ):
        made.update(batch)


def measure(seed: int, folder: str) -> list[Record]:
    """Return the judged first event of each kind of fault; called inside a rank."""
    from tests.adapters.verl09.harness import save_model

    torch.set_num_threads(1)
    save_model(f"{folder}/model")
    rows = []
    for fault, is_gradual in itertools.product(FAULTS, (False, True)):
        for attempt in range(len(STRENGTHS)):
            planted, events = trained(f"{folder}/model", f"{folder}/events", fault, is_gradual, seed, attempt)
            if events:
                break
        row = {"model": "verl 0.9", "seed": seed, "fault": fault, "gradual": is_gradual, "strength": planted.strength}
        rows.append(row | judged(planted, events, HEALTHY))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def trained(
    model: str, dump_dir: str, fault: str, is_gradual: bool, seed: int, attempt: int
) -> tuple[Plant, list[Record]]:
    """Train with a fault until it makes an event; return the fault and its events."""
    from tests.adapters.verl09.harness import ACTOR, make_batch, make_trainer
    from tests.world.events import read_events

    shutil.rmtree(dump_dir, ignore_errors=True)
    settings = [f"{ACTOR}.gradloc.dump_dir={dump_dir}", f"{ACTOR}.optim.weight_decay=0.01"]
    made = make_trainer(["+gradloc=on", *settings], model)
    planted = EnginePlant(made.engine.module, made.engine.optimizer, fault, is_gradual, seed, ENDS, attempt)
    for step in range(HEALTHY + planted.steps + _AFTER):
        update_with(made, planted, step - HEALTHY, make_batch(seed=7 * seed + step % 7))
        if step >= HEALTHY and Path(dump_dir, "events.jsonl").exists():
            own = [event for event in read_events(Path(dump_dir)) if event["step"]["global_step"] > HEALTHY]
            if own:
                return planted, own
    return planted, []


def main() -> int:
    from lab.experiments.verl09 import ENVIRONMENT
    from tests.world import World

    os.environ.update(ENVIRONMENT)  # for its workers on a machine without an accelerator
    made = Parser("engine_links", __doc__)
    made.add_seeds(3, "fresh seeds of each fault")
    args = made.parse_args()
    rows: list[Record] = []
    for seed in seeds_of(args):
        with World(1, timeout_s=7200) as world, tempfile.TemporaryDirectory() as folder:
            rows += world.run("lab.benchmarks.engine_links.measure", seed=seed, folder=folder)[0]
    finish(args, {"rows": rows}, report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
