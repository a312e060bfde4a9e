# SPDX-License-Identifier: Apache-2.0
"""verl 0.9's Megatron engine under the scenarios of `tests.world`, which were written for verl 0.7's actor."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.adapters.verl09 import as_actor
from tests.adapters.verl09.megatron import harness
from tests.world import harness as of_world
from tests.world.harness import NUM_PROMPT
from tests.world.spikes import plant

_layout: dict[str, Any] = {}
"""Of the scenario that runs: ``overrides`` and ``dtype``; ``model`` is what the scenario is told of it."""


class Trainer(harness.Trainer, as_actor.Trainer):
    """One process' worker and trainer, with what the scenarios use."""

    @property
    def module(self) -> torch.nn.Module:
        return torch.nn.ModuleList(self.engine.module)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer.chained_optimizers[0].optimizer


def run(scenario: str, dealt_out: dict[str, Any], **given: Any) -> Any:
    """A scenario of `tests.world`: ``spikes.train``, in a layout (``overrides``, ``model``, ``dtype``)."""
    room, name = scenario.rsplit(".", 1)
    here = sys.modules[__name__]
    module = here if room == "as_actor" else importlib.import_module(f"tests.world.{room}")
    _layout.clear()
    _layout.update(dealt_out)
    given["overrides"] = [*given["overrides"], *dealt_out["model"]]  # the oracle's, too
    with (
        mock.patch.object(of_world, "other_trainer", lambda: here),
        mock.patch.object(module, "other_trainer", lambda: here, create=True),
    ):
        return getattr(module, name)(**given)


def fail_in_the_loss(overrides: list[str], dump_dir: str) -> dict[str, Any]:
    """A spike that is only looked into, and the same with a loss that fails on one process in the third of a pass."""
    from gradloc.adapters.verl09.megatron.step import MegatronStep

    original, found = MegatronStep.after_output, {}
    for kind in ("looks", "fails"):
        calls = 0

        def after_output(self: Any, *args: Any) -> Any:
            nonlocal calls
            calls += self.is_replaying
            if calls == 3 and dist.get_rank() == dist.get_world_size() - 1:
                raise RuntimeError("made to fail in the loss")
            return original(self, *args)

        trainer = make_trainer(overrides, f"{dump_dir}-{kind}")
        batch = of_world.make_batch(seed=1)
        plant(batch, 6, 2, 1e4)
        with mock.patch.object(MegatronStep, "after_output", after_output if kind == "fails" else original):
            out = trainer.update(batch)
        trainer.update(of_world.make_batch(seed=2))
        found[kind] = {"weights": trainer.weights_hash(), "rng": torch.get_rng_state().numpy().tobytes()}
    return {**found, "failures": out["metrics"]["gradloc/failures"]}


def step_class() -> type:
    """The adapter's step, which the search replays."""
    from gradloc.adapters.verl09.megatron.step import MegatronStep

    return MegatronStep


def make_trainer(overrides: list[str], dump_dir: str, *args: Any, **given: Any) -> Any:
    """See :func:`as_actor.make_trainer`."""
    with harness.parallel(_layout.get("dtype", "float32")):
        return as_actor.make_trainer([*overrides, *_layout["overrides"]], dump_dir, *args, kind=Trainer, **given)


@contextlib.contextmanager
def letting_out(plants: list[tuple[int, int, float]], batch: Any) -> Iterator[None]:
    """Make plain training detach the planted tokens in its own forward."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    original = MegatronEngineWithLMHead.postprocess_micro_batch_func
    targets = []
    for row, position, _ in plants:
        length = NUM_PROMPT + int(batch.batch["response_mask"][row].sum())
        targets.append((batch.batch["input_ids"][row, :length], NUM_PROMPT + position - 1))

    def postprocess(self: Any, output: Any, data: Any, forward_only: bool, *args: Any, **named: Any) -> Any:
        output = output if forward_only else as_actor.without(targets, data, output)
        return original(self, output, data, forward_only, *args, **named)

    with mock.patch.object(MegatronEngineWithLMHead, "postprocess_micro_batch_func", postprocess):
        yield
