# SPDX-License-Identifier: Apache-2.0
"""Update verl's real worker on a rank, and count what the update asks of the device.

Built from the tests' parts: verl 0.7's actor or verl 0.9's engine, with a model large enough that the interpreter does
not dominate an update.
"""

import importlib.metadata
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

from lab.benchmarks.counter import DeviceCounter
from tests.world import harness

ROWS, RESPONSE = 16, 48
_SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
_SETTLED = [
    "actor_rollout_ref.actor.optim.lr=1e-6",  # the norms must not drift into a spike
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
]
_trainers: dict[str, Any] = {}
_counter: DeviceCounter | None = None
"""Counts the workers' updates."""


def is_engine() -> bool:
    """Return whether the installed verl is 0.9, which has engines; 0.7 is a tree on the path."""
    try:
        return importlib.metadata.version("verl").startswith("0.9.")
    except importlib.metadata.PackageNotFoundError:
        return False


def prepare(name: str, overrides: list[str], folder: str, settings: Sequence[str] = ()) -> None:
    """Build the trainer ``name`` with updates that can be counted.

    Args:
        name: the variant.
        overrides: overrides that enable gradloc; empty for plain verl.
        folder: folder of model and events.
        settings: verl's own overrides.
    """
    with _sizes():
        made, owner, method = _built(overrides, folder, settings)
    if overrides:
        harness.part("core.tracker")._MAX_COST = math.inf  # else a busy machine's updates ask for something else
    worker_update = getattr(owner, method)

    def counted(*arguments: Any) -> Any:
        with _counter or nullcontext():
            return worker_update(*arguments)

    setattr(owner, method, counted)
    _trainers[name] = made


def _sizes() -> Any:
    """Replace the tests' sizes of batch and model."""
    config = partial(harness.model_config, **_SIZES, max_position_embeddings=128)
    return mock.patch.multiple(harness, NUM_RESPONSE=RESPONSE, VOCABULARY=1024, model_config=config)


def _built(overrides: list[str], folder: str, settings: Sequence[str]) -> tuple[Any, Any, str]:
    """Return the trainer, and the owner and the name of its worker's update method."""
    if is_engine():
        from tests.adapters.verl09 import harness as engine

        engine.save_model(f"{folder}/model")
        dump = [f"actor_rollout_ref.actor.gradloc.dump_dir={folder}"] if overrides else []
        longer = ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128"]
        made = engine.make_trainer(
            [*_SETTLED, *longer, *settings, *overrides, *dump], f"{folder}/model", stock=not overrides
        )
        return made, made.worker, "update_actor"
    made = harness.make_trainer([*_SETTLED, *settings, *overrides], folder)
    return made, made.actor, "update_policy"


def update(name: str, seed: int, plant: tuple[int, int, float] | None = None) -> float:
    """Update on one batch; return the number of spikes.

    Args:
        name: a trainer from :func:`prepare`.
        seed: the batch's seed.
        plant: row, response position and advantage of a token to plant.
    """
    with _sizes():
        batch = harness.make_batch(ROWS, seed)
    if plant is not None:
        row, position, advantage = plant
        batch.batch["advantages"][row, position] = advantage
    out = _trainers[name].update(batch)
    spikes = out.get("metrics", out).get("gradloc/spikes", 0)
    return float(spikes[0] if isinstance(spikes, list) else spikes)


def count(name: str, seed: int, plant: tuple[int, int, float] | None = None) -> dict[str, Any]:
    """Count what an update asks of the device on the code path of a GPU; see :mod:`lab.benchmarks.counter`.

    Returns:
        ``ops``, ``reads`` without the next two, ``reads_in_passes`` of the search, ``reads_in_losses`` of cures,
        ``reads_before_step``, ``collectives`` by name, ``bytes`` read, and the ``places`` that read.
    """
    counter, reads, trainer = DeviceCounter(), Counter[str](), _trainers[name]
    optimizer = trainer.engine.optimizer if is_engine() else trainer.actor.actor_optimizer
    zero_grad = optimizer.zero_grad

    def begun(*given: Any, **named: Any) -> None:
        reads["begin"] = counter.reads[""]
        zero_grad(*given, **named)

    def stepped(*_: Any) -> None:
        reads["before_step"] += counter.reads[""] - reads.pop("begin", counter.reads[""])

    handle = optimizer.register_step_pre_hook(stepped)
    with (
        mock.patch(f"{__name__}._counter", counter),
        mock.patch.object(optimizer, "zero_grad", begun),
        _as_on_gpu(counter),
    ):
        spikes = update(name, seed, plant)
    handle.remove()
    return {
        "spikes": spikes,
        "ops": sum(counter.ops.values()),
        "reads": counter.reads[""],
        "reads_in_passes": counter.reads["pass"],
        "reads_in_losses": counter.reads["loss"],
        "reads_before_step": reads["before_step"],
        "collectives": dict(sorted(counter.collectives.items())),
        "bytes": sum(counter.bytes.values()),
        "places": dict(counter.places.most_common()),
    }


@contextmanager
def _as_on_gpu(counter: DeviceCounter) -> Iterator[None]:
    """Make gradloc read gradients as on a GPU, and the counter attribute its passes, losses and host messages.

    Does nothing without gradloc.
    """
    try:
        names = ("gradients", "probe", "ranks", "step")
        gradients, probe, ranks, step = (harness.part(f"core.{name}") for name in names)
    except ImportError:
        yield
        return

    def within(phase: str, owner: type, name: str) -> Any:
        method = getattr(owner, name)

        def counted(*given: Any) -> Any:
            with counter.within(phase):
                return method(*given)

        return mock.patch.object(owner, name, counted)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(gradients, "is_slow", lambda device: False))
        stack.enter_context(within("pass", probe.Prober, "_run_on_all_ranks"))
        stack.enter_context(within("loss", step.LossReplay, "recorded_under"))  # verl's loss reads its metrics
        for name in ("gather", "gather_first", "broadcast_from"):
            stack.enter_context(within("sent", ranks.Ranks, name))
        yield
