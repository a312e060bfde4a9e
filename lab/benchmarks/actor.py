# SPDX-License-Identifier: Apache-2.0
"""Update verl's real worker on a rank, and time or count the update.

Built from the tests' parts: verl 0.7's actor or verl 0.9's engine, with a model large enough that the interpreter does
not dominate an update.
"""

import importlib.metadata
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch.distributed as dist

from lab.benchmarks.counter import DeviceCounter
from tests.world import harness

ROWS, RESPONSE = 16, 48
_VOCABULARY, _WIDTH, _LAYERS = 1024, 128, 4
_SETTLED = [
    "actor_rollout_ref.actor.optim.lr=1e-6",  # the norms must not drift into a spike
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
]
_trainers: dict[str, Any] = {}
_found: dict[str, Any] = {}


def is_engine() -> bool:
    """Return whether the installed verl is 0.9, which has engines; 0.7 is a tree on the path."""
    try:
        return importlib.metadata.version("verl").startswith("0.9.")
    except importlib.metadata.PackageNotFoundError:
        return False


def prepare(name: str, overrides: list[str], folder: str, settings: Sequence[str] = ()) -> int:
    """Build the trainer ``name`` with timed updates; return this rank's number of weights.

    Args:
        name: the variant.
        overrides: overrides that enable gradloc; empty for plain verl.
        folder: folder of model and events.
        settings: verl's own overrides.
    """
    with _sizes():
        made, owner, method, module = _built(overrides, folder, settings)
    setattr(owner, method, _measured(getattr(owner, method)))
    _trainers[name] = made
    return sum(param.numel() for param in module.parameters())


def _sizes() -> Any:
    """Replace the tests' sizes of batch and model."""
    return mock.patch.multiple(harness, NUM_RESPONSE=RESPONSE, VOCABULARY=_VOCABULARY, model_config=_config)


def _built(overrides: list[str], folder: str, settings: Sequence[str]) -> tuple[Any, Any, str, Any]:
    """Return the trainer, the owner and the name of its update method, and the model."""
    if is_engine():
        from tests.adapters.verl09 import harness as engine

        engine.save_model(f"{folder}/model")
        dump = [f"actor_rollout_ref.actor.gradloc.dump_dir={folder}"] if overrides else []
        longer = ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128"]
        made = engine.make_trainer(
            [*_SETTLED, *longer, *settings, *overrides, *dump], f"{folder}/model", stock=not overrides
        )
        return made, made.worker, "update_actor", made.engine.module
    made = harness.make_trainer([*_SETTLED, *settings, *overrides], folder)
    return made, made.actor, "update_policy", made.actor.actor_module


def update(name: str, seed: int, plant: tuple[int, int, float] | None = None) -> dict[str, Any]:
    """Update on one batch.

    Args:
        name: a trainer from :func:`prepare`.
        seed: the batch's seed.
        plant: row, response position and advantage of a token to plant.

    Returns:
        ``seconds`` and ``cpu_seconds`` of the worker's update, and the number of ``spikes``.
    """
    with _sizes():
        batch = harness.make_batch(ROWS, seed)
    if plant is not None:
        row, position, advantage = plant
        batch.batch["advantages"][row, position] = advantage
    out = _trainers[name].update(batch)
    spikes = out.get("metrics", out).get("gradloc/spikes", 0)
    return {**_found, "spikes": float(spikes[0] if isinstance(spikes, list) else spikes)}


def count(name: str, seed: int, plant: tuple[int, int, float] | None = None) -> dict[str, Any]:
    """Count what an update asks of the device on the code path of a GPU; see :mod:`lab.benchmarks.counter`.

    Returns:
        ``ops``, ``reads`` without the next two, ``reads_in_passes`` of the search, ``reads_in_losses`` of cures,
        ``reads_before_step``, ``collectives`` by name, ``bytes`` read, and the ``places`` that read.
    """
    counter, before = DeviceCounter(), {"behind": 0}
    optimizer = _optimizer(_trainers[name])

    def stepped(*_: Any) -> None:
        before["step"] = before.get("step", 0) + counter.reads[""] - before.pop("begin", counter.reads[""])

    def began(*_: Any) -> None:
        before["begin"] = counter.reads[""]

    _found["counter"] = counter
    handles = [optimizer.register_step_pre_hook(stepped)]
    zero_grad = optimizer.zero_grad
    optimizer.zero_grad = lambda *given, **named: (began(), zero_grad(*given, **named))[1]
    try:
        with _as_on_gpu(counter):
            found = update(name, seed, plant)
    finally:
        del _found["counter"], optimizer.zero_grad
        for handle in handles:
            handle.remove()
    return {
        "spikes": found["spikes"],
        "ops": sum(counter.ops.values()),
        "reads": counter.reads[""],
        "reads_in_passes": counter.reads["pass"],
        "reads_in_losses": counter.reads["loss"],
        "reads_before_step": before["step"],
        "collectives": dict(sorted(counter.collectives.items())),
        "bytes": sum(counter.bytes.values()),
        "places": dict(counter.places.most_common()),
    }


def _optimizer(trainer: Any) -> Any:
    return trainer.engine.optimizer if is_engine() else trainer.actor.actor_optimizer


@contextmanager
def _as_on_gpu(counter: DeviceCounter) -> Iterator[None]:
    """Make gradloc read gradients as on a GPU, and the counter attribute its passes, losses and host messages.

    Does nothing without gradloc.
    """
    try:
        names = ("gradients", "tracker", "probe", "ranks", "step")
        gradients, tracker, probe, ranks, step = (harness.part(f"core.{name}") for name in names)
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
        for module in (gradients, tracker):
            stack.enter_context(mock.patch.object(module, "is_slow", lambda device: False))
        stack.enter_context(within("pass", probe.Prober, "_together"))
        stack.enter_context(within("loss", step.LossReplay, "recorded_under"))  # verl's loss reads its metrics
        for name in ("gather", "gather_first", "broadcast_from"):
            stack.enter_context(within("sent", ranks.Ranks, name))
        yield


def _measured(update: Callable) -> Callable:
    """Wrap the worker's update to record its time."""

    def run(*arguments: Any) -> Any:
        dist.barrier()
        started, cpu_started = time.perf_counter(), time.process_time()
        with _found.get("counter", nullcontext()):
            out = update(*arguments)
        _found["seconds"], _found["cpu_seconds"] = time.perf_counter() - started, time.process_time() - cpu_started
        return out

    return run


def _config(dropout: float = 0.0) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=_WIDTH,
        intermediate_size=3 * _WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=_WIDTH // 4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        attention_dropout=dropout,
        attn_implementation="sdpa",
    )
