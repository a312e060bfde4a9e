# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a world run for these tests."""

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.adapters.verl07.harness import make_config, shard
from tests.world.harness import make_batch, make_model, make_trainer
from tests.world.spikes import plant


def save_models(folder: str) -> None:
    """The model of the harness, with other weights, and with other shapes."""
    from transformers import AutoModelForCausalLM

    model = make_model()
    model.save_pretrained(f"{folder}/model")
    make_model(seed=1).save_pretrained(f"{folder}/other")
    for name, key, value in (
        ("wide", "intermediate_size", 96),
        ("deep", "num_hidden_layers", 3),
        ("tiny", "vocab_size", 32),
    ):
        settings = {**model.config.to_dict(), key: value}
        settings.pop("layer_types", None)  # derived from the number of layers
        config = type(model.config)(**settings)
        AutoModelForCausalLM.from_config(config).save_pretrained(f"{folder}/{name}")
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    model.save_pretrained(f"{folder}/nan")


def make_event(plants: list, overrides: list[str], dump_dir: str, rollout_noise: float | None = None) -> None:
    """One real update of the harness's model, with these tokens' advantages changed."""
    batch = make_batch(rollout_noise=rollout_noise)
    for row, position, advantage in plants:
        plant(batch, row, position, advantage)
    make_trainer(overrides, dump_dir).update(batch)


def run_replay(argv: list[str], patches: dict[str, Any]) -> dict[str, Any]:
    """The command, in this process; ``patches`` make ``module.name`` answer or raise."""
    from unittest import mock

    from gradloc.replay.__main__ import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        for target, effect in patches.items():
            stack.enter_context(mock.patch(f"gradloc.{target}", **effect))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            code = main(argv)
        except SystemExit as stop:  # argparse
            code = stop.code
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def run_page(script: str, argv: list[str], folder: str) -> dict[str, Any]:
    """A page's example in ``folder``: its script, then its command."""
    import os

    before = os.getcwd()
    os.chdir(folder)
    try:
        exec(compile(script, "docs/bundle.md", "exec"), {})
        return run_replay(argv, {})
    finally:
        os.chdir(before)


def save_checkpoint(folder: str, strategy: str) -> None:
    """The harness's model as verl's own checkpoint manager saves it from two ranks."""
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    contents = {"save_contents": ["model"], "load_contents": ["model"]}
    manager = FSDPCheckpointManager(_sharded(strategy), checkpoint_config=contents)
    manager.save_checkpoint(str(Path(folder) / "global_step_0" / "actor"), global_step=0)


def fingerprints() -> dict[str, Any]:
    """Of the harness's model however it is sharded, and of another one."""
    from gradloc.core.gradients import GradientSpace
    from gradloc.loop.fingerprint import fingerprint
    from gradloc.record.store import plain

    def of(module):
        return plain(fingerprint(GradientSpace(module)))

    found = {"fsdp2": of(_sharded("fsdp2")), "fsdp1": of(_sharded("fsdp"))}
    found["fsdp1, original parameters"] = of(_sharded("fsdp", True))
    return found | {"plain": of(make_model()), "other": of(make_model(seed=1))}


def _sharded(strategy: str, use_orig_params: bool = False) -> torch.nn.Module:
    from verl.utils.config import omega_conf_to_dataclass

    actor = "actor_rollout_ref.actor."
    overrides = [f"{actor}strategy={strategy}"]
    overrides.append(f"{actor}fsdp_config.use_orig_params={use_orig_params}")
    config = make_config(overrides, "unused")
    assert dist.is_initialized()
    return shard(make_model(), omega_conf_to_dataclass(config.actor_rollout_ref.actor), config.actor_rollout_ref.model)
