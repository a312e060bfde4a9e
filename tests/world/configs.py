# SPDX-License-Identifier: Apache-2.0
"""verl's configs, composed by Hydra inside a rank: a process of its own would mostly import verl."""

import importlib
from dataclasses import asdict
from pathlib import Path
from typing import Any


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
