# SPDX-License-Identifier: Apache-2.0
"""What a rank does for the price of a healthy step: verl's real worker, updated and timed.

Built from the pieces that the tests run it with, verl 0.7's actor or verl 0.9's engine, around a model large enough
that an update is not all interpreter.
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
    """Whether the installed verl is 0.9, which has engines; 0.7 is a tree on the path."""
    try:
        return importlib.metadata.version("verl").startswith("0.9.")
    except importlib.metadata.PackageNotFoundError:
        return False


def prepare(name: str, overrides: list[str], folder: str, settings: Sequence[str] = ()) -> int:
    """Build the trainer called ``name``, whose updates are timed; returns the weights of this rank.

    Args:
        name: of the variant.
        overrides: that switch gradloc on; none leaves verl as it is.
        folder: where model and events go.
        settings: of verl's own.
    """
    with _sizes():
        made, owner, method, module = _built(overrides, folder, settings)
    setattr(owner, method, _measured(getattr(owner, method)))
    _trainers[name] = made
    return sum(param.numel() for param in module.parameters())


def _sizes() -> Any:
    """Of batch and model, in place of the tests'."""
    return mock.patch.multiple(harness, NUM_RESPONSE=RESPONSE, VOCABULARY=_VOCABULARY, model_config=_config)


def _built(overrides: list[str], folder: str, settings: Sequence[str]) -> tuple[Any, Any, str, Any]:
    """The trainer, whose method makes an update, that method, and the model."""
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
    """One update of a batch.

    Args:
        name: of a trainer that :func:`prepare` built.
        seed: of the batch.
        plant: row, response position and the advantage that makes that token a spike.

    Returns:
        ``seconds`` and ``cpu_seconds`` of the worker's update, ``spikes`` it saw.
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
    """The same, and what the update asks of the device on the path that a GPU takes, see :mod:`lab.benchmarks.counter`.

    Returns:
        ``ops``, ``reads`` (but the next two), ``reads_in_passes`` of the search, ``reads_in_losses`` asked for other
        settings, ``reads_before_step``, ``collectives`` by name, ``bytes`` read, and the ``places`` that read.
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
    """gradloc reads gradients as it does on a GPU, and the counter knows its passes, and what ranks send each other by
    verl's backend for the host; nothing where gradloc is not there.
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
        stack.enter_context(within("loss", step.LossReplay, "recorded_under"))  # verl's reads its metrics
        for name in ("gather", "gather_first", "broadcast_from"):
            stack.enter_context(within("sent", ranks.Ranks, name))
        yield


def _measured(update: Callable) -> Callable:
    """The worker's update, with what it took noted."""

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
