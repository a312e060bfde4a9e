# SPDX-License-Identifier: Apache-2.0
"""Scenarios in which one rank fails while a spike is looked into, or no step is taken."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.world.harness import make_batch, make_trainer, part, step_class
from tests.world.settings import require
from tests.world.spikes import plant


def fail_at_boundaries(first: int, overrides: list[str], dump_dir: str) -> dict[str, Any]:
    """On three spikes in a row, make one rank fail right before a collective boundary, then train on.

    Whatever a rank computes by itself between two collectives goes through ``Ranks.run_local_synced``; so its
    uses are the boundaries, in order: the ``first`` from 1 at the first spike, then the two after it,
    in turn on either rank. Before the first nothing fails.

    Returns:
        What training left behind; and of each spike how many failures there were by then, and whether
        the boundary was reached at all.
    """
    Ranks = part("core.ranks").Ranks
    original = Ranks.run_local_synced
    trainer = make_trainer(overrides, dump_dir)
    failures, reached = [], []
    for boundary in range(first, first + 3):
        uses = 0

        def run_local_synced(self, local, boundary=boundary):
            nonlocal uses
            uses += 1
            is_due = uses == boundary and self.process == boundary % 2

            def failing():
                raise RuntimeError(f"made to fail at boundary {boundary}")

            return original(self, failing if is_due else local)

        batch = make_batch(8, seed=1)
        plant(batch, 6, 2, 1e4)
        with mock.patch.object(Ranks, "run_local_synced", run_local_synced):
            out = trainer.update(batch)
        failures.append(out["metrics"].get("gradloc/failures", [0])[0])
        reached.append(0 < boundary <= uses)
    trainer.update(make_batch(8, seed=2))
    return {"reached": reached, "failures": failures, "weights": trainer.weights_hash()}


def part_norms(over: int, overrides: list[str], dump_dir: str) -> dict[str, Any]:
    """On a spike, let the norms differ in the last bit, and only that of the rank ``over`` be over the threshold.

    Returns:
        ``failures``, ``spikes``, and ``weights`` after a healthy step.
    """
    trainer, batch, norms = make_trainer(overrides, dump_dir), make_batch(seed=1), []
    require(trainer.has_driver, "the first rank's norm comes with the policy: tests/watch/test_ranks.py")
    ActorWatch, Policy = part("adapters.verl_common.watch").ActorWatch, part("loop.messages").Policy
    clip = ActorWatch.clip

    def clip_apart(watch: Any) -> torch.Tensor:
        norm = clip(watch)
        norms.append(float(norm))
        above = torch.nextafter(norm.float(), torch.tensor(torch.inf, device=norm.device)).to(norm.dtype)
        return above if torch.distributed.get_rank() == over else norm

    plant(batch, 6, 2, 1e4)
    with (
        mock.patch.object(ActorWatch, "clip", clip_apart),
        mock.patch.object(Policy, "threshold", lambda policy, number: norms[-1] if norms else None),
    ):
        metrics = trainer.update(batch)["metrics"]
    trainer.update(make_batch(seed=2))
    found = {name: metrics.get(f"gradloc/{name}", [0])[0] for name in ("failures", "spikes")}
    return {**found, "weights": trainer.weights_hash()}


def lose_first(overrides: list[str], dump_dir: str) -> None:
    """End the first process at a spike, just before it sends its norm."""
    Ranks, trainer, batch = part("core.ranks").Ranks, make_trainer(overrides, dump_dir), make_batch(seed=1)
    require(trainer.has_driver, "the norm is sent by a collective")
    if torch.distributed.get_rank() == 0:
        Ranks.decided = lambda *_: os._exit(1)
    plant(batch, 6, 2, 1e4)
    trainer.update(batch)


def fail_inside(place: str, overrides: list[str], dump_dir: str) -> None:
    """On a spike, make rank 1 fail inside a backward of the search, or the step's method of that name."""
    part("core.ranks")._PATIENCE_S = 2.0
    trainer = make_trainer(overrides, dump_dir)
    require(place != "backward" or trainer.is_sharded, "a forward waits for no rank: peers hear of it and go on")
    batch = make_batch(seed=1)
    plant(batch, 6, 2, 1e4)
    owner, name = (part("core.probe"), "run_backward") if place == "backward" else (step_class(), place)
    original = getattr(owner, name)

    def failing(*args):
        if torch.distributed.get_rank() == 1:
            os.makedirs(dump_dir, exist_ok=True)
            Path(dump_dir, "failed").touch()
            raise RuntimeError(f"made to fail inside a {place}")
        return original(*args)

    setattr(owner, name, failing)
    trainer.update(batch)


def resume(overrides: list[str], dump_dir: str) -> dict[str, Any]:
    """Train, save beside a checkpoint, go on; and go on from the checkpoint in another trainer."""
    os.makedirs(dump_dir, exist_ok=True)
    first = make_trainer(overrides, dump_dir)
    require(hasattr(first.hook, "save"), "its checkpoints are the loop's own")
    for seed in range(12):
        first.update(make_batch(seed=seed))
    first.hook.save(dump_dir)
    second = make_trainer(overrides, dump_dir)
    before = second.driver and second.driver.adaptive.threshold(0)
    second.hook.load(dump_dir)
    if second.driver is None:  # which only the first rank has
        return {}
    return {
        "empty": before,
        "last_checkpoint": second.driver.writer.last_checkpoint,
        "saved": first.driver.adaptive.state(),
        "loaded": second.driver.adaptive.state(),
        "thresholds": (first.driver.adaptive.threshold(0), second.driver.adaptive.threshold(0)),
    }


def stop_or_skip(mode: str, overrides: list[str], dump_dir: str) -> dict[str, Any]:
    """A spike under ``action.mode`` skip or abort: what the step left of weights and optimizer."""
    trainer = make_trainer(overrides, dump_dir)
    trainer.update(make_batch(seed=1))
    before = trainer.weights_hash()
    batch = make_batch()
    plant(batch, 5, 3, 1e4)
    message, out = "", None
    try:
        out = trainer.update(batch)
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    return {"before": before, "after": trainer.weights_hash(), "message": message, "metrics": out and out["metrics"]}
