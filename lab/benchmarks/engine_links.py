# SPDX-License-Identifier: Apache-2.0
"""Plant the faults of :mod:`lab.benchmarks.links` in verl 0.9's engine: does the event name the right link?

    python -m lab.benchmarks.engine_links             # three fresh seeds of each; in verl 0.9's environment

verl's own worker and trainer around a model of 60k parameters (tests/adapters/verl09/harness.py), FSDP2, one process.
Each seed trains once; every fault continues from there, with weights, moments and gradloc's state restored.
"""

import copy
import itertools
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lab.benchmarks.links import FAULTS, STRENGTHS, Plant, judged, matrix, sentence
from lab.benchmarks.run import Record, as_typed, digest, finish, parser

HEALTHY = 24
_AFTER = 3


class Snapshot:
    """A snapshot of a run: local weights, the optimizer's and gradloc's state."""

    def __init__(self, made: Any):
        self.made, self.localizer = made, made.engine._watch.localizer
        self.shards = [_local(param.detach()) for param in made.engine.module.parameters()]
        self.weights = [shard.clone() for shard in self.shards]
        self.moments = copy.deepcopy([dict(state) for state in made.engine.optimizer.state.values()])
        self.groups = copy.deepcopy([_settings(group) for group in made.engine.optimizer.param_groups])
        self.step, self.drivers = made.trainer.global_steps, [driver.state() for driver in made.trainer.gradloc.drivers]
        self.movements, keeper = copy.deepcopy(self.localizer.updates.movements), self.localizer._keeper
        self.reference = keeper.reference, copy.copy(keeper._norms), copy.copy(keeper._measured)

    @torch.no_grad()
    def put_back(self) -> None:
        for shard, saved in zip(self.shards, self.weights, strict=True):
            shard.copy_(saved)
        for state, saved in zip(self.made.engine.optimizer.state.values(), self.moments, strict=True):
            state.update(copy.deepcopy(saved))
        for group, settings in zip(self.made.engine.optimizer.param_groups, self.groups, strict=True):
            group.update(copy.deepcopy(settings))
        for driver, state in zip(self.made.trainer.gradloc.drivers, self.drivers, strict=True):
            driver.load_state(copy.deepcopy(state))
        updates, keeper = self.localizer.updates, self.localizer._keeper
        updates._is_present = False
        updates._note()
        updates.movements, updates._pending, updates._open = copy.deepcopy(self.movements), None, []
        keeper.reference, keeper._norms, keeper._measured = map(copy.copy, self.reference)
        self.made.trainer.global_steps = self.step


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


BATCH: dict[str, tuple[Any, float]] = {"token": ((5, 3), 1e4), "row": (5, 1e3), "batch": (slice(None), 1e3)}
"""Fault of the batch -> whose advantages are multiplied, and by what."""


def plant(made: Any, fault: str, is_gradual: bool, seed: int, attempt: int) -> Plant:
    """Return a fault of :mod:`lab.benchmarks.links` in this trainer's engine."""
    ends = ("model.norm.weight", "lm_head.weight")
    planted = Plant(made.engine.module, made.engine.optimizer, fault, is_gradual, seed, ends, attempt)
    planted.weight_factor, planted.moment_factor = 50.0, 1e-12  # the tiny model takes more
    return planted


def update_with(made: Any, fault: Plant, step: int, batch: Any) -> None:
    """Run one update, ``step`` counted from the fault's first."""
    part, take, optimizer = fault.part(step), made.engine.optimizer_step, made.engine.optimizer
    if part == 0:
        made.update(batch)
        return
    fault.before_forward()
    if fault.name in BATCH:
        rows, factor = BATCH[fault.name]
        if fault.name != "batch":
            rows = (rows[0] + fault.attempt, rows[1]) if isinstance(rows, tuple) else rows + fault.attempt
        batch.batch["advantages"][rows] *= (factor * fault.strength) ** part

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
    from tests.adapters.verl09.harness import ACTOR, make_batch, make_trainer, save_model
    from tests.world.events import read_events

    torch.set_num_threads(1)
    save_model(f"{folder}/model")
    overrides = ["+gradloc=on", f"{ACTOR}.gradloc.dump_dir={folder}/events", f"{ACTOR}.optim.weight_decay=0.01"]
    made, kept, rows = make_trainer(overrides, f"{folder}/model"), None, []
    for fault, is_gradual in itertools.product(FAULTS, (False, True)):
        for attempt in range(len(STRENGTHS)):
            planted = plant(made, fault, is_gradual, seed, attempt)
            shutil.rmtree(f"{folder}/events", ignore_errors=True)
            if kept is not None:
                kept.put_back()
            for step in range(0 if kept is None else HEALTHY - 1, HEALTHY + planted.steps + _AFTER):
                if kept is None and step == HEALTHY - 1:
                    kept = Snapshot(made)
                update_with(made, planted, step - HEALTHY, make_batch(seed=7 * seed + step % 7))
                has_events = step >= HEALTHY and Path(folder, "events", "events.jsonl").exists()
                events = read_events(Path(folder, "events")) if has_events else []
                own = [event for event in events if event["step"]["global_step"] > HEALTHY]
                if own:
                    break
            if own:
                break
        row = {"model": "verl 0.9", "seed": seed, "fault": fault, "gradual": is_gradual, "strength": planted.strength}
        rows.append(row | judged(planted, own, HEALTHY))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> int:
    from lab.experiments.verl09 import ENVIRONMENT
    from tests.world import World

    os.environ.update(ENVIRONMENT)  # for its workers on a machine without an accelerator
    made = parser("engine_links", __doc__)
    made.add_argument("--seeds", type=int, default=3, help="fresh seeds of each fault")
    made.add_argument("--seed", type=int, action="append", help="these seeds instead")
    args = made.parse_args()
    seeds = args.seed or [random.SystemRandom().randrange(2**20) for _ in range(args.seeds)]
    rows: list[Record] = []
    for seed in seeds:
        with World(1, timeout_s=7200) as world, tempfile.TemporaryDirectory() as folder:
            rows += world.run("lab.benchmarks.engine_links.measure", seed=seed, folder=folder)[0]
    record = {"command": as_typed("engine_links"), "sources": digest(), "rows": rows}
    finish(record, args.out, "engine_links", f"{matrix(rows)}\n\n{sentence(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
