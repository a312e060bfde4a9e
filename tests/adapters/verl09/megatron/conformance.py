# SPDX-License-Identifier: Apache-2.0
"""The conformance suite's harness on verl 0.9's Megatron engine."""

import importlib
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.adapters.verl09 import conformance
from tests.adapters.verl09.megatron import harness
from tests.world import harness as world_harness
from tests.world import spikes
from tests.world.spikes import plant

STEP = "adapters.verl09.megatron.step.MegatronStep"
_layout: dict[str, Any] = {}
"""``overrides`` and ``dtype`` of the scenario that runs; ``model`` is passed on to the scenario."""


class Trainer(harness.Trainer, conformance.Trainer):
    """One process' worker and trainer, with what the scenarios use."""

    module = property(lambda self: torch.nn.ModuleList(self.engine.module))
    optimizer = property(lambda self: self.engine.optimizer.chained_optimizers[0].optimizer)


def run(scenario: str, dealt_out: dict[str, Any], **given: Any) -> Any:
    """A scenario of `tests.world`: ``spikes.train``, in a layout (``overrides``, ``model``, ``dtype``)."""
    room, name = scenario.rsplit(".", 1)
    here = sys.modules[__name__]
    module = here if room == "conformance" else importlib.import_module(f"tests.world.{room}")
    _layout.clear()
    _layout.update(dealt_out)
    given["overrides"] = [*given["overrides"], *dealt_out["model"]]  # the oracle's, too
    with mock.patch.object(world_harness, "adapter", lambda: here):
        return getattr(module, name)(**given)


def fail_in_layer(way: str, process: int | None, overrides: list[str], dump_dir: str) -> list[int]:
    """A spike in whose search a layer's ``forward`` or ``backward`` fails, or the ``loss`` of a pass, the second time
    that a process, or each, is there; the searches that have failed."""
    trainer, uses, loss = make_trainer(overrides, dump_dir), 0, world_harness.step_class()._pulled

    def come(*_: Any) -> None:
        nonlocal uses
        uses += 1
        if uses == 2 and process in (None, dist.get_rank()):
            raise RuntimeError(f"made to fail: {way}")

    def in_layer(module: torch.nn.Module, args: Any, output: Any) -> None:
        step = getattr(trainer.engine, "_step", None)
        if step is not None and step.is_replaying and way == "forward":
            come()
        elif step is not None and step.is_replaying and way == "backward" and output[0].requires_grad:
            output[0].register_hook(come)

    def pulled(*args: Any, **given: Any) -> Any:
        if way == "loss":
            come()
        return loss(*args, **given)

    layers = [layer for layer in trainer.module.modules() if type(layer).__name__ == "TransformerLayer"]
    layers[0].register_forward_hook(in_layer)
    batch = world_harness.make_batch(seed=1)
    plant(batch, 6, 2, 1e4)
    is_short = mock.patch.object(world_harness.part("core.ranks"), "_PATIENCE_S", 2.0)
    with is_short, mock.patch.object(world_harness.step_class(), "_pulled", pulled):
        return trainer.update(batch)["metrics"]["gradloc/failures"]


def slots(plants: list[tuple[int, int, float]], overrides: list[str], dump_dir: str) -> int:
    """The slots that the search of one spike takes: of a stage, each as long as its forward of a micro-batch.

    A pass takes one for each micro-batch and each further stage; with its backward, three.
    """
    of_step, taken = world_harness.step_class()._run, []

    def run(self: Any, selections: Any, forward_only: bool, data: Any = None) -> None:
        taken.append((1 if forward_only else 3) * (len(selections) + self.num_stages - 1))
        of_step(self, selections, forward_only, data)

    batch = world_harness.make_batch()
    for row, position, advantage in plants:
        plant(batch, row, position, advantage)
    with mock.patch.object(world_harness.step_class(), "_run", run):
        make_trainer(spikes.ON + overrides, dump_dir).update(batch)
    return sum(taken)


def make_trainer(overrides: list[str], dump_dir: str, *args: Any, **given: Any) -> Any:
    """Call :func:`conformance.make_trainer`; two chunks on each of two stages take a model of four layers."""
    layout_overrides = _layout["overrides"]
    if any("virtual_pipeline" in override for override in layout_overrides):
        harness.save_model(f"{dump_dir}-model")
    with harness.parallel(_layout.get("dtype", "float32")):
        return conformance.make_trainer([*overrides, *layout_overrides], dump_dir, *args, kind=Trainer, **given)
