# SPDX-License-Identifier: Apache-2.0
"""verl's configs, composed by Hydra inside a rank: a process of its own would mostly import verl."""

import importlib
import os
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock


def compose(
    cases: list[list[str]],
    read: str,
    name: str = "ppo_trainer",
) -> list[Any]:
    """Compose a config once per list of overrides and read each.

    Args:
        cases: overrides.
        read: ``<module>.<function>``, which takes the config and returns what can be sent back.
        name: one of verl's own configs.

    Returns:
        Per case, what ``read`` returned, or ``{"error": sentence}`` where Hydra or ``read`` refused.
    """
    import hydra

    import verl

    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    module, function = read.rsplit(".", 1)
    reader = getattr(importlib.import_module(module), function)
    answers = []
    with hydra.initialize_config_dir(folder, version_base=None):
        for overrides in cases:
            try:
                answers.append(reader(hydra.compose(name, overrides=overrides)))
            except Exception as error:
                answers.append({"error": f"{error} {error.__cause__ or ''}".strip()})
    return answers


def experiments(
    configs: str, cases: list[tuple[str, list[str], dict[str, str]]], variables: dict[str, str]
) -> list[dict[str, Any]]:
    """Compose experiments as verl's entry point does, and have verl check them.

    Args:
        configs: the folder of their configs.
        cases: name, overrides and environment variables of each.
        variables: environment variables of all.

    Returns:
        Per case ``{"config": ...}``, or ``{"error": traceback}``.
    """
    import hydra
    from omegaconf import OmegaConf

    from verl.utils.config import omega_conf_to_dataclass, validate_config

    made = []
    for name, overrides, more in cases:
        try:
            with (
                mock.patch.dict(os.environ, {**variables, **more}),
                hydra.initialize_config_dir(configs, version_base=None),
            ):
                search = "hydra.searchpath=[pkg://verl.trainer.config]"
                config = hydra.compose(name, overrides=[*overrides, search])
                OmegaConf.resolve(config)
                worker = config.actor_rollout_ref
                # Not `ref` and `reward_manager`: even verl's own defaults of these do not become dataclasses.
                for part in (worker.actor, worker.rollout, config.algorithm):
                    omega_conf_to_dataclass(part)
                validate_config(config, use_reference_policy=False, use_critic=False)
                made.append({"config": OmegaConf.to_container(config)})
        except Exception:
            made.append({"error": traceback.format_exc()})
    return made


def actor(config: Any) -> dict[str, Any]:
    """The actor's settings as dataclasses and as yaml."""
    from omegaconf import OmegaConf

    from verl.utils.config import omega_conf_to_dataclass

    part = config.actor_rollout_ref.actor
    made = omega_conf_to_dataclass(part)
    raw = OmegaConf.to_container(part.gradloc, resolve=True)
    return {"ok": asdict(made.gradloc), "yaml": raw, "spike": made.spike_detection}


def reweighting(config: Any) -> str:
    """Whether the trainer reweights or splits its update."""
    from types import SimpleNamespace

    from verl.gradloc.verl_actor.trainer import build_trainer_hook

    hook = build_trainer_hook(SimpleNamespace(config=config, tokenizer=None, train_dataset=[]))
    return "on" if hook.alpha or hook.lopti else "nothing is on"


def health(config: Any) -> dict[str, Any]:
    """Whether there is a monitor, and its settings."""
    from omegaconf import OmegaConf

    from verl.gradloc.health.monitor import build_monitor

    is_on = build_monitor(config) is not None
    return {"on": is_on, "yaml": OmegaConf.to_container(config.trainer.health, resolve=True)}
