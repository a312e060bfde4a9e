# SPDX-License-Identifier: Apache-2.0
"""What a feature needs of a run on every verl."""

from dataclasses import replace
from typing import Any

from ...checks import Requirement, check_requirements, require
from ...config import GradLocConfig

ACTOR = "actor_rollout_ref.actor"
STABILIZE = f"{ACTOR}.gradloc.stabilize"
RATIO_CLIPS = f"{STABILIZE}.token_clip or seq_clip"
FINE_LAYER_CLIP = f"{STABILIZE}.layer_clip.group finer than layer"
LOPTI = "algorithm.lopti.enable"
BUCKETS, QUARTILES = "trainer.gradient_analysis_mode", "trainer.quartile_analysis_mode"
"""The features, by the setting that switches each on."""


def only(key: str, value: Any, because: str) -> Requirement:
    """What a setting has to be, and is where nobody has set it."""
    return Requirement(key, (value,), value, str(value).lower(), because)


FSDP = Requirement(f"{ACTOR}.strategy", ("fsdp", "fsdp2"), None, "fsdp or fsdp2", "others do not have it")
WHOLE_SEQUENCES = only(f"{ACTOR}.ulysses_sequence_parallel_size", 1, "sequence parallelism is not supported yet")
_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"
_PARAMS = f"{ACTOR}.fsdp_config.use_orig_params"
_MERGES = "FSDP1 merges a layer's parameters into one without it"
_OFFLOAD = "actor_rollout_ref.model.enable_activation_offload"
NO_OFFLOAD = only(_OFFLOAD, False, "its handler counts a backward for every forward, and here are forwards alone")
CHECKPOINTED_OFFLOAD = Requirement(
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    (True,),
    True,
    "true",
    "else verl's activation offload takes views of one tensor for the same, and the gradient is another one",
    only_with=_OFFLOAD,
)
NEEDS = {
    RATIO_CLIPS: (Requirement(_LOG_PROBS, (True,), False, "true", "its weights come from the rollout's log-probs"),),
    FINE_LAYER_CLIP: (Requirement(_PARAMS, (True,), False, "true with strategy=fsdp", _MERGES),),
}
"""Of the features that need the same on every verl."""


def features_on(settings: GradLocConfig, strategy: str, spikes: str) -> list[str]:
    """The features under ``gradloc`` that a run has on.

    Args:
        settings: those that hold.
        strategy: the actor's.
        spikes: the setting that switches localization on.
    """
    stabilize = settings.stabilize
    clips_finely = stabilize.layer_clip.rule != "off" and stabilize.layer_clip.group != "layer"
    is_on = {
        spikes: settings.enable,
        STABILIZE: stabilize.is_on,
        RATIO_CLIPS: stabilize.weighs_tokens,
        FINE_LAYER_CLIP: clips_finely and strategy == "fsdp",
    }
    return [feature for feature, on in is_on.items() if on]


def check_critic(config: Any, ulysses: str, offload: str, *needs: Requirement) -> None:
    """Refuse a run in which spikes of the critic could not be localized.

    Args:
        config: the trainer's whole config.
        ulysses: the key of the critic's sequence parallel size on this verl.
        offload: likewise, of FSDP's own offload.
        needs: what this verl needs beside what every one does.

    Raises:
        ValueError: one sentence.
    """
    from verl.trainer.ppo.utils import need_critic

    feature = f"{ACTOR}.gradloc.critic"
    require(need_critic(config), "critic.enable", f"true while {feature} is not off", config.critic.enable)
    of_all = (
        replace(FSDP, key="critic.strategy"),
        only("critic.model.enable_activation_offload", False, "a search runs forwards alone"),
        only(ulysses, 1, "sequence parallelism was not tried there"),
        Requirement(offload, (False, None), False, "false", "use param_offload and optimizer_offload instead"),
    )
    check_requirements(feature, (*of_all, *needs), config)
