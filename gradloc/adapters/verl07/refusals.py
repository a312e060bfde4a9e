# SPDX-License-Identifier: Apache-2.0
"""The settings that hold, and every refusal of a run in which a feature could not work."""

from typing import Any

from ...checks import SEARCHABLE, WEIGHTS_ON_DEVICE, Requirement, check_requirements, require
from ...config import GradLocConfig, settings_in, settle
from ..verl_common.needs import ROLLOUT_LOG_PROBS, SEPARATE_PARAMETERS, WHOLE_SEQUENCES

_ACTOR = "actor_rollout_ref.actor"


_LEGACY = Requirement(
    "trainer.use_legacy_worker_impl", ("auto", "enable"), "auto", "auto or enable", "the engine workers do not have it"
)
_FSDP = Requirement(f"{_ACTOR}.strategy", ("fsdp", "fsdp2"), None, "fsdp or fsdp2", "other workers do not have it")
_CRITIC = (
    Requirement("critic.strategy", ("fsdp", "fsdp2"), None, "fsdp or fsdp2", "other workers do not have it"),
    Requirement("critic.ulysses_sequence_parallel_size", (1,), 1, "1", "sequence parallelism was not tried there"),
    Requirement("critic.model.fsdp_config.offload_policy", (False, None), False, "false", "use param_offload instead"),
    Requirement("critic.model.enable_activation_offload", (False,), False, "false", "a search runs forwards alone"),
)

_NEEDS = {
    f"{_ACTOR}.spike_detection": (_LEGACY, _FSDP, *SEARCHABLE),
    f"{_ACTOR}.gradloc.critic": (_LEGACY, *_CRITIC),
    f"{_ACTOR}.gradloc.stabilize": (_LEGACY, _FSDP, WHOLE_SEQUENCES, WEIGHTS_ON_DEVICE),
    f"{_ACTOR}.gradloc.stabilize.layer_clip.group finer than layer": (SEPARATE_PARAMETERS,),
    f"{_ACTOR}.gradloc.stabilize.token_clip or seq_clip": (ROLLOUT_LOG_PROBS,),
    "algorithm.lopti.enable": (_LEGACY, _FSDP),
    "trainer.gradient_analysis_mode": (_LEGACY, _FSDP, WHOLE_SEQUENCES),
    "trainer.quartile_analysis_mode": (_LEGACY, _FSDP, WHOLE_SEQUENCES, WEIGHTS_ON_DEVICE),
}


def check_run(feature: str, config: Any) -> None:
    """Refuse a run in which a feature that is on could not work.

    Args:
        feature: the setting that switches it on, one of the table above; ``actor_rollout_ref.actor`` may be left out.
        config: the trainer's whole config.

    Raises:
        ValueError: one sentence that names the key, what it must be, what was found and which feature needs it.
    """
    _check(feature, config, "")


def check_critic(config: Any) -> None:
    """Refuse a run in which spikes of the critic could not be localized: as :func:`check_run`."""
    from verl.trainer.ppo.utils import need_critic

    feature = f"{_ACTOR}.gradloc.critic"
    require(need_critic(config), "critic.enable", f"true while {feature} is not off", config.critic.enable)
    check_run(feature, config)


def settings_of(config: Any) -> GradLocConfig:
    """See :func:`~..config.settings_in`; ``config`` is the trainer's whole config."""
    from verl.utils.config import omega_conf_to_dataclass

    return settings_in(config, omega_conf_to_dataclass)


def settle_actor_config(actor: Any) -> None:
    """When the actor's config is built, on the trainer and on every worker: both names of a setting say the same from
    here on, and a wrong setting or combination is refused.

    Args:
        actor: verl's ``ActorConfig`` with the four published keys and ``gradloc``.

    Raises:
        ValueError: as :func:`check_run`.
    """
    settings = settle(actor)
    if settings.enable:
        _check("spike_detection", actor, f"{_ACTOR}.")
    stabilize = settings.stabilize
    if stabilize.is_on:
        _check("gradloc.stabilize", actor, f"{_ACTOR}.")
    if actor.strategy == "fsdp" and stabilize.layer_clip.rule != "off" and stabilize.layer_clip.group != "layer":
        _check("gradloc.stabilize.layer_clip.group finer than layer", actor, f"{_ACTOR}.")


def _full(feature: str) -> str:
    return feature if feature in _NEEDS else f"{_ACTOR}.{feature}"


def _check(feature: str, config: Any, prefix: str) -> None:
    feature = _full(feature)
    check_requirements(feature, _NEEDS[feature], config, prefix)
