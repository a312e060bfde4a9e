# SPDX-License-Identifier: Apache-2.0
"""Scenarios of a cluster: disks of their own, working folders of their own, trainers of their own."""

import contextlib
import errno
import io
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.adapters.verl07.harness import make_config
from tests.world.harness import lines_of, local_of, make_batch, make_trainer


def keep_weights(strategy: str, folder: str, full_rank: int | None) -> dict[str, Any]:
    """Save the weights, the disk of one rank maybe full; and read them back with verl's own manager."""
    from gradloc.adapters.verl_common.watch import sharded_weights, write_weights
    from gradloc.core.ranks import Ranks
    from gradloc.loop import writer
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    trainer = make_trainer([f"actor_rollout_ref.actor.strategy={strategy}"], folder)
    module, before = trainer.actor.actor_module, trainer.weights_hash()
    save = torch.save

    def full(state: Any, path: str) -> None:
        save({}, path)
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(torch, "save", full if dist.get_rank() == full_rank else save):
        settings = SimpleNamespace(root=folder, evidence=SimpleNamespace(checkpoint="before_step", max_gb=1.0))
        gather, write = partial(sharded_weights, module), partial(write_weights, module, Ranks())
        kept = writer.keep_weights(settings, 1, Ranks(), gather, write)
    dist.barrier()
    found: dict[str, Any] = {"folder": kept, "shards": sorted(path.name for path in Path(folder).rglob("*.pt"))}
    if kept is not None:
        trainer.update(make_batch())
        found["is_moved"] = trainer.weights_hash() != before
        contents = {"save_contents": ["model"], "load_contents": ["model"]}
        FSDPCheckpointManager(module, trainer.actor.actor_optimizer, checkpoint_config=contents).load_checkpoint(kept)
        again = make_trainer([f"actor_rollout_ref.actor.strategy={strategy}"], folder)
        pairs = zip(module.parameters(), again.actor.actor_module.parameters(), strict=True)
        found["is_back"] = all(torch.equal(local_of(a), local_of(b)) for a, b in pairs)
    return found


def update_without_policy(overrides: list[str], dump_dir: str) -> dict[str, Any]:
    """Two updates of a trainer that calls the worker group itself."""
    with lines_of("gradloc.adapters.verl07.hook") as lines:
        trainer = make_trainer(overrides, dump_dir)
        for seed in range(2):
            batch = make_batch(seed=seed)
            batch.meta_info["temperature"] = 1.0
            output = trainer.update_actor(batch)
    return {"lines": lines, "count": output.meta_info["metrics"]["gradloc/updates_without_policy"][0]}


def resolve_relative(overrides: list[str], folder: str) -> str:
    """Return the folder for events that workers get where the user gave a relative one."""
    os.makedirs(folder, exist_ok=True)
    before = os.getcwd()
    os.chdir(folder)
    try:
        trainer = make_trainer([*overrides, "actor_rollout_ref.actor.bisect_dump_dir=some/events"], folder)
    finally:
        os.chdir(before)
    return trainer.config.actor_rollout_ref.actor.bisect_dump_dir


def build_without_trainer(overrides: list[str], dump_dir: str) -> dict[str, Any]:
    """The actor's hook under a trainer that has not built its own, and what is said."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.gradloc_seam import build_hook

    config, said = make_config(overrides, dump_dir).actor_rollout_ref.actor, io.StringIO()
    with contextlib.redirect_stderr(said):
        hook = build_hook(SimpleNamespace(config=omega_conf_to_dataclass(config), actor_optimizer="an optimizer"))
    return {"kind": type(hook).__name__, "said": said.getvalue()}
