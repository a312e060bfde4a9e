# SPDX-License-Identifier: Apache-2.0
"""What a rank does for the price of a healthy step: verl's real worker, updated and timed.

Built from the pieces that the tests run it with, verl 0.7's actor or verl 0.9's engine, around a model large enough
that an update is not all interpreter.
"""

import importlib.metadata
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from benchmarks.collectives import CollectiveCounter
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


def prepare(name: str, overrides: list[str], folder: str) -> int:
    """Build the trainer called ``name``, whose updates are timed; returns the weights of this rank."""
    harness.NUM_RESPONSE, harness.VOCABULARY, harness.model_config = RESPONSE, _VOCABULARY, _config
    if is_engine():
        from tests.adapters.verl09 import harness as engine

        engine.save_model(f"{folder}/model")
        dump = [f"actor_rollout_ref.actor.gradloc.dump_dir={folder}"] if overrides else []
        longer = ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128"]
        made = engine.make_trainer(_SETTLED + longer + overrides + dump, f"{folder}/model", stock=not overrides)
        owner, method, module = made.worker, "update_actor", made.engine.module
    else:
        made = harness.make_trainer(_SETTLED + overrides, folder)
        owner, method, module = made.actor, "update_policy", made.actor.actor_module
    setattr(owner, method, _measured(getattr(owner, method)))
    _trainers[name] = made
    return sum(param.numel() for param in module.parameters())


def update(name: str, seed: int, counts: bool = False) -> dict[str, Any]:
    """One update of a healthy batch.

    Args:
        name: of a trainer that :func:`prepare` built.
        seed: of the batch.
        counts: count the collectives, too.

    Returns:
        ``seconds`` and ``cpu_seconds`` of the worker's update, ``spikes`` it saw, ``collectives`` by name.
    """
    batch = harness.make_batch(ROWS, seed)
    _found.clear()
    _found["counts"] = counts
    out = _trainers[name].update(batch)
    spikes = out.get("metrics", out).get("gradloc/spikes", 0)
    return {**_found, "spikes": float(spikes[0] if isinstance(spikes, list) else spikes)}


def _measured(update: Callable) -> Callable:
    """The worker's update, with what it took noted."""

    def run(*arguments: Any) -> Any:
        counter = CollectiveCounter()
        dist.barrier()
        started, cpu_started = time.perf_counter(), time.process_time()
        if _found["counts"]:
            with counter:
                out = update(*arguments)
        else:
            out = update(*arguments)
        _found["seconds"], _found["cpu_seconds"] = time.perf_counter() - started, time.process_time() - cpu_started
        _found["collectives"] = dict(counter.counts)
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
