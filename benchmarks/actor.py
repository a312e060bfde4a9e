# SPDX-License-Identifier: Apache-2.0
"""What a rank does for the price of a healthy step: verl's real actor, updated and timed.

Built from the pieces that the tests run the actor with, around a model large enough that an update
is not all interpreter.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.collectives import CollectiveCounter
from tests.world import harness

ROWS, RESPONSE = 16, 48
_VOCABULARY, _WIDTH, _LAYERS = 1024, 128, 4
_HOOK_METHODS = (
    "begin_update",
    "begin_mini_batch",
    "before_forward",
    "after_forward",
    "after_backward",
    "before_step",
    "end_update",
)
_trainers: dict[str, harness.Trainer] = {}
_hook_seconds: list[float] = []


def prepare(name: str, overrides: list[str], dump_dir: str) -> int:
    """Build the trainer called ``name``; returns its number of weights."""
    harness.NUM_RESPONSE, harness.VOCABULARY, harness.make_model = RESPONSE, _VOCABULARY, _model
    settled = ["actor_rollout_ref.actor.optim.lr=1e-6"]  # the norms must not drift into a spike
    _trainers[name] = harness.make_trainer(settled + overrides, dump_dir)
    hook = getattr(_trainers[name].actor, "gradloc", None)
    for method in _HOOK_METHODS:
        if hook is not None and hasattr(hook, method):
            setattr(hook, method, _timed(getattr(hook, method)))
    sizes = [param.numel() for param in _trainers[name].actor.actor_module.parameters()]
    return sum(sizes)


def update(name: str, seed: int, counts: bool = False) -> dict[str, Any]:
    """One update of a healthy batch.

    Args:
        name: of a trainer that :func:`prepare` built.
        seed: of the batch.
        counts: count the collectives instead of timing.

    Returns:
        ``seconds`` and ``cpu_seconds`` of ``update_policy``, ``hook_seconds`` of them inside the
        hook, ``events`` it raised, ``collectives`` by name.
    """
    trainer = _trainers[name]
    batch = harness.make_batch(ROWS, seed)
    trainer.step += 1
    size = dist.get_world_size()
    if trainer.driver is not None:
        trainer.driver.stamp(batch)
        trainer.driver.before_update(batch, trainer.step, size)
    batch.meta_info["temperature"] = 1.0
    local = batch.chunk(size)[dist.get_rank()]
    counter = CollectiveCounter()
    _hook_seconds.clear()
    dist.barrier()
    started, cpu_started = time.perf_counter(), time.process_time()
    if counts:
        with counter:
            metrics = trainer.actor.update_policy(local)
    else:
        metrics = trainer.actor.update_policy(local)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    meta = harness._pop_events(metrics) if trainer.driver is not None else {}
    events = meta.get("gradloc_events", [])
    if trainer.driver is not None:
        batch.meta_info = {"metrics": {key: [value] for key, value in metrics.items()}, **meta}
        trainer.driver.after_update(batch, batch)
    hook = getattr(trainer.actor, "gradloc", None)
    tracker = getattr(hook, "_tracker", None)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "hook_seconds": sum(_hook_seconds),
        "events": len(events),
        "collectives": dict(counter.counts),
        "tracks_norms": bool(tracker is not None and tracker.is_on),
    }


def _timed(method: Callable) -> Callable:
    """The method, its CPU time noted: what it costs whatever else the machine does."""

    def run(*arguments):
        started = time.thread_time()
        try:
            return method(*arguments)
        finally:
            _hook_seconds.append(time.thread_time() - started)

    return run


def _model(seed: int = 0, dropout: float = 0.0) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(seed)
    config = Qwen3Config(
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
    return AutoModelForCausalLM.from_config(config)
