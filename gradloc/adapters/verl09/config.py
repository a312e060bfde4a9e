# SPDX-License-Identifier: Apache-2.0
"""The actor's config with GradLoc's settings: what ``+gradloc=on`` puts into ``actor_rollout_ref.actor._target_``.

verl builds it in each worker before the engine. So this is where the engine is registered, and where a run in which
a feature could not work is refused.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from verl.trainer.ppo.utils import need_critic
from verl.workers.config import FSDPActorConfig

from ...checks import SEARCHABLE, Requirement, check_requirements, require
from ...config import GradLocConfig, settle
from .touches import check_verl

__all__ = ["GradLocActorConfig", "check_critic", "check_run", "refuse_what_is_not_there"]

_ACTOR = "actor_rollout_ref.actor"
_FSDP = Requirement(f"{_ACTOR}.strategy", ("fsdp", "fsdp2"), None, "fsdp or fsdp2", "other engines do not have it")
_NEEDS = (
    _FSDP,
    Requirement("trainer.use_v1", (True,), True, "true", "it hangs on the V1 trainers"),
    Requirement(f"{_ACTOR}.shuffle", (False,), False, "false", "the trainer must know which mini-batch a row is in"),
    Requirement(f"{_ACTOR}.use_prefix_grouper", (False,), False, "false", "its forward is another one"),
    *SEARCHABLE,
    Requirement("distillation.enabled", (False,), False, "false", "its loss is another one"),
)


_STABILIZE = f"{_ACTOR}.gradloc.stabilize"
_OF_SAFE = "+gradloc=mask trainer.health.enable=true"
_CRITIC_NEEDS = (
    Requirement("critic.strategy", ("fsdp", "fsdp2"), None, "fsdp or fsdp2", "other engines do not have it"),
    Requirement("trainer.use_v1", (True,), True, "true", "it hangs on the V1 trainers"),
    Requirement("critic.shuffle", (False,), False, "false", "the trainer must know which mini-batch a row is in"),
    Requirement("critic.fsdp.ulysses_sequence_parallel_size", (1,), 1, "1", "sequence parallelism was not tried there"),
    Requirement(
        "critic.fsdp.offload_policy", (False, None), False, "false", "use param_offload and optimizer_offload instead"
    ),
    Requirement("critic.model.enable_activation_offload", (False,), False, "false", "a search runs forwards alone"),
)

_NOT_YET = {
    "algorithm.lopti.enable": (None, False),
    "trainer.gradient_analysis_mode": (None, False),
    "trainer.quartile_analysis_mode": (None, False),
    "actor_rollout_ref.rollout.rollout_filter_strategy": (None,),
    f"{_STABILIZE}.token_clip.mode": (None, False, "off"),
    f"{_STABILIZE}.seq_clip.mode": (None, False, "off"),
    f"{_STABILIZE}.layer_clip.rule": (None, False, "off"),
    f"{_STABILIZE}.skip_step.enable": (None, False),
}
"""What is there on verl 0.7 only, and the values with which it is off."""


def refuse_what_is_not_there(config: Any) -> None:
    """Refuse a run that asks for a feature that this adapter does not have.

    Args:
        config: the trainer's whole config.

    Raises:
        ValueError: one sentence that names the setting.
    """
    for key, off in _NOT_YET.items():
        found = OmegaConf.select(config, key, default=None)
        instead = f"; +gradloc=safe has it: take {_OF_SAFE} in its place" if key.startswith(_STABILIZE) else ""
        expected = f"left off on verl 0.9 (it needs verl 0.7.0 or 0.7.1 and the patch{instead})"
        require(found in off, key, expected, found)


def check_run(feature: str, config: Any, prefix: str = "") -> None:
    """Refuse a run in which spikes could not be localized.

    Args:
        feature: the setting that switches it on.
        config: what stands at ``prefix``; by default the trainer's whole config.
        prefix: ends with a dot.

    Raises:
        ValueError: one sentence.
    """
    check_requirements(feature, _NEEDS, config, prefix)


def check_critic(config: Any) -> None:
    """Refuse a run in which spikes of the critic could not be localized.

    Args:
        config: the trainer's whole config.

    Raises:
        ValueError: one sentence.
    """
    feature = f"{_ACTOR}.gradloc.critic"
    require(need_critic(config), "critic.enable", f"true while {feature} is not off", config.critic.enable)
    check_verl("trainer")
    check_requirements(feature, _CRITIC_NEEDS, config)


@dataclass
class GradLocActorConfig(FSDPActorConfig):
    """verl's config of the FSDP actor, the four published keys (None: not given) and ``gradloc``."""

    spike_detection: bool | None = None
    grad_norm_threshold: float | None = None
    bisect_budget_steps: int | None = None
    bisect_dump_dir: str | None = None
    gradloc: GradLocConfig = field(default_factory=GradLocConfig)

    def __post_init__(self):
        super().__post_init__()
        if not settle(self).enable:
            return
        check_verl("worker")
        check_run(f"{_ACTOR}.gradloc.enable", self, f"{_ACTOR}.")
        if f"{__package__}.plugin" not in sys.modules:
            raise RuntimeError(
                "gradloc is switched on, and its plug-in was not loaded: leave VERL_USE_EXTERNAL_PLUGINS at auto or "
                "name gradloc in it, and install gradloc in the environment of every node (pip install gradloc-verl)."
            )
        from .engine import register_engine

        register_engine()
