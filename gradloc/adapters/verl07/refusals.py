# SPDX-License-Identifier: Apache-2.0
"""The settings that hold, and every refusal of a run in which a feature could not work."""

from typing import Any

from ...checks import SEARCHABLE, Requirement, check_requirements
from ...config import GradLocConfig, settings_in, settle
from ..verl_common import needs
from ..verl_common.needs import FSDP, ROLLOUT_LOG_PROBS, SEPARATE_PARAMETERS, WHOLE_SEQUENCES, of_critics_fsdp

_ACTOR = "actor_rollout_ref.actor"

_LEGACY = Requirement(
    "trainer.use_legacy_worker_impl", ("auto", "enable"), "auto", "auto or enable", "the engine workers do not have it"
)
_CRITIC = of_critics_fsdp("critic.ulysses_sequence_parallel_size", "critic.model.fsdp_config.offload_policy")

_NEEDS = {
    f"{_ACTOR}.spike_detection": (_LEGACY, FSDP, *SEARCHABLE),
    f"{_ACTOR}.gradloc.stabilize": (_LEGACY, FSDP, WHOLE_SEQUENCES),
    f"{_ACTOR}.gradloc.stabilize.layer_clip.group finer than layer": (SEPARATE_PARAMETERS,),
    f"{_ACTOR}.gradloc.stabilize.token_clip or seq_clip": (ROLLOUT_LOG_PROBS,),
    "algorithm.lopti.enable": (_LEGACY, FSDP),
    "trainer.gradient_analysis_mode": (_LEGACY, FSDP, WHOLE_SEQUENCES),
    "trainer.quartile_analysis_mode": (_LEGACY, FSDP, WHOLE_SEQUENCES),
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
    needs.check_critic(config, _LEGACY, *_CRITIC)


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
