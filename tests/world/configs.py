# SPDX-License-Identifier: Apache-2.0
"""verl's configs, composed by Hydra inside a rank: a process of its own would mostly import verl."""

import functools
import importlib
import os
import pickle
import traceback
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

_GROUPS = ("model_engine=", "gradloc=")
"""Overrides of the defaults, by which Hydra chooses files."""


def config_of(overrides: list[str], name: str = "ppo_trainer", folder: str | None = None) -> Any:
    """verl's config of that name with these overrides; with ``folder``, the one there that builds on verl's.

    Composing takes a third of a second, more than all else that a tiny trainer needs. So Hydra composes
    once for what adds to the config (``+gradloc=safe``), and plain values are set on a copy as it sets them;
    a pickle makes that copy in a seventh of deepcopy's time.
    """
    from omegaconf import OmegaConf

    values = [override for override in overrides if override[0].isalpha() and not override.startswith(_GROUPS)]
    others = tuple(override for override in overrides if override not in values)
    config = pickle.loads(_composed(name, others, folder))
    for override in map(_parsed, values):
        OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    return config


@functools.cache
def _parsed(override: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(override)


@functools.cache
def _composed(name: str, overrides: tuple[str, ...], folder: str | None) -> bytes:
    import hydra

    import verl

    search = ["hydra.searchpath=[pkg://verl.trainer.config]"] if folder else []
    verls = str(Path(verl.__file__).parent / "trainer" / "config")
    with hydra.initialize_config_dir(folder or verls, version_base=None):
        return pickle.dumps(hydra.compose(name, overrides=[*overrides, *search]))


def read_all(cases: list[list[str]], read: str, name: str = "ppo_trainer") -> list[Any]:
    """Read verl's config under each list of overrides.

    Args:
        cases: overrides.
        read: ``<module>.<function>``, which takes the config and returns what can be sent back.
        name: one of verl's own configs.

    Returns:
        Per case, what ``read`` returned, or ``{"error": sentence}`` where Hydra or ``read`` refused.
    """
    module, function = read.rsplit(".", 1)
    reader = getattr(importlib.import_module(module), function)
    answers = []
    for overrides in cases:
        try:
            answers.append(reader(config_of(overrides, name)))
        except Exception as error:
            answers.append({"error": f"{error} {error.__cause__ or ''}".strip()})
    return answers


def experiments(
    configs: str,
    cases: list[tuple[str, list[str], dict[str, str]]],
    variables: dict[str, str],
    # Not `ref` and `reward_manager`: even verl's own defaults of these do not become dataclasses.
    parts: tuple[str, ...] = ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"),
) -> list[dict[str, Any]]:
    """Compose experiments as verl's entry point does, and have verl check them.

    Args:
        configs: the folder of their configs.
        cases: name, overrides and environment variables of each.
        variables: environment variables of all.
        parts: what is to become verl's dataclasses.

    Returns:
        Per case ``{"config": ...}``, or ``{"error": traceback}``.
    """
    from omegaconf import OmegaConf

    from verl.utils.config import omega_conf_to_dataclass, validate_config

    made = []
    for name, overrides, more in cases:
        try:
            with mock.patch.dict(os.environ, {**variables, **more}):
                config = config_of(overrides, name, configs)
                OmegaConf.resolve(config)
                for part in parts:
                    omega_conf_to_dataclass(OmegaConf.select(config, part))
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
    raw = OmegaConf.to_container(part.gradloc, resolve=True)
    _hook(config)
    made = omega_conf_to_dataclass(part)
    return {"ok": asdict(made.gradloc), "yaml": raw, "spike": made.spike_detection}


def settings(config: Any) -> dict[str, Any]:
    """GradLoc's settings, its two names each resolved, as the trainer sees them."""
    from gradloc.adapters.verl07.trainer import clip_limit
    from gradloc.adapters.verl_common.trainer import limit_of_all
    from gradloc.config import settings_in

    found = settings_in(config)
    return {
        "enable": found.enable,
        "dump_dir": found.dump_dir,
        "stabilizes": found.stabilize.is_on,
        "clip_limit": limit_of_all(config, clip_limit(config)),
    }


class StandIn(SimpleNamespace):
    """Stand in for verl's trainer while its hook is built; a class that can be extended."""


def _hook(config: Any) -> Any:
    from gradloc.adapters.verl07.trainer import build_trainer_hook

    return build_trainer_hook(StandIn(config=config, tokenizer=None, train_dataset=[]))


def trainer_hook(config: Any) -> None:
    """Build the trainer's hook, for what refuses in there."""
    _hook(config)


def reweighting(config: Any) -> str:
    """Whether the trainer reweights or splits its update."""
    hook = _hook(config)
    return "on" if hook.alpha or hook.lopti else "nothing is on"


def every_name(config: Any) -> dict[str, Any]:
    """The whole config, unresolved."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(config, resolve=False)


def health(config: Any) -> dict[str, Any]:
    """Whether there is a monitor, and its settings."""
    from omegaconf import OmegaConf

    from gradloc.adapters.verl_common.trainer import build_monitor

    is_on = build_monitor(config, 1.0) is not None
    return {"on": is_on, "yaml": OmegaConf.to_container(config.trainer.health, resolve=True)}


def found_on(config: Any) -> tuple[str | None, bool]:
    """Return what the patch's seam finds switched on, and whether a part of the package's hook does something."""
    from verl.utils.gradloc_seam import switched_on

    found, hook = switched_on(config), _hook(config)
    parts = (hook.spikes, hook.critic, hook.stabilizers, hook.lopti, hook.monitor, hook.analysis)
    return found, hook.alpha != 0 or any(part is not None for part in parts)
