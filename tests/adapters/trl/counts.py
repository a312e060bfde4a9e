# SPDX-License-Identifier: Apache-2.0
"""Count what a step asks of the device; runs inside a rank."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

from gradloc.core.ranks import Ranks
from lab.benchmarks.counter import DeviceCounter
from tests.world.harness import make_batch, make_trainer


def counted(overrides: list[str], dump_dir: str) -> dict[str, Any]:
    """Operations, reads by the host and collectives of the third step, as on a GPU: there our ranks' messages go from
    host to host, and are not counted."""
    trainer = make_trainer(overrides, dump_dir)
    for seed in (1, 2):
        trainer.update(make_batch(seed=seed))
    batch, counter = make_batch(seed=3), DeviceCounter()

    def from_host_to_host(send: Any) -> Any:
        def sent(*args: Any) -> Any:
            before = counter.reads.copy(), counter.collectives.copy()
            answer = send(*args)
            counter.reads, counter.collectives = before
            return answer

        return sent

    with ExitStack() as stack:
        for name in ("sum", "max", "gather", "gather_first", "broadcast_from"):
            stack.enter_context(mock.patch.object(Ranks, name, from_host_to_host(getattr(Ranks, name))))
        stack.enter_context(mock.patch("gradloc.core.gradients.is_slow", lambda device: False))
        stack.enter_context(counter)
        metrics = trainer.update(batch)["metrics"]
    return {
        "ops": sum(counter.ops.values()),
        "reads": sum(counter.reads.values()),
        "collectives": dict(counter.collectives),
        "spikes": metrics.get("gradloc/spikes", [0])[0],
    }
