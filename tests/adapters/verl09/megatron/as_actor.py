# SPDX-License-Identifier: Apache-2.0
"""verl 0.9's Megatron engine under the scenarios of `tests.world`, which were written for verl 0.7's actor."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.adapters.verl09 import as_actor
from tests.adapters.verl09.megatron import harness
from tests.world import harness as of_world
from tests.world.harness import NUM_PROMPT

_layout: dict[str, Any] = {}
"""Of the scenario that runs: ``overrides`` and ``dtype``."""


class Trainer(harness.Trainer, as_actor.Trainer):
    """One process' worker and trainer, with what the scenarios use."""

    @property
    def module(self) -> torch.nn.Module:
        return torch.nn.ModuleList(self.engine.module)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer.chained_optimizers[0].optimizer


def run(scenario: str, layout: dict[str, Any], **given: Any) -> Any:
    """A scenario of `tests.world`: ``spikes.train``, in a layout (``overrides``, ``dtype``)."""
    module, name = scenario.rsplit(".", 1)
    function = getattr(importlib.import_module(f"tests.world.{module}"), name)
    _layout.clear()
    _layout.update(layout)
    with mock.patch.object(of_world, "other_trainer", lambda: sys.modules[__name__]):
        with mock.patch.object(
            importlib.import_module(f"tests.world.{module}"), "other_trainer", of_world.other_trainer, create=True
        ):
            return function(**given)


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
