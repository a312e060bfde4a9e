# SPDX-License-Identifier: Apache-2.0
"""What a feature needs of a run on every verl."""

from typing import Any

from ...checks import Requirement, check_requirements, require

_ACTOR = "actor_rollout_ref.actor"

FSDP = Requirement(f"{_ACTOR}.strategy", ("fsdp", "fsdp2"), None, "fsdp or fsdp2", "others do not have it")
WHOLE_SEQUENCES = Requirement(
    f"{_ACTOR}.ulysses_sequence_parallel_size", (1,), 1, "1", "sequence parallelism is not supported yet"
)
SEPARATE_PARAMETERS = Requirement(
    f"{_ACTOR}.fsdp_config.use_orig_params",
    (True,),
    False,
    "true with strategy=fsdp",
    "FSDP1 merges a layer's parameters into one without it",
)
ROLLOUT_LOG_PROBS = Requirement(
    "actor_rollout_ref.rollout.calculate_log_probs",
    (True,),
    False,
    "true",
    "its weights come from the rollout's log-probs",
)


def check_critic(config: Any, *needs: Requirement) -> None:
    """Refuse a run in which spikes of the critic could not be localized.

    Args:
        config: the trainer's whole config.
        needs: what this verl needs beside what every one does.

    Raises:
        ValueError: one sentence.
    """
    from verl.trainer.ppo.utils import need_critic

    feature = f"{_ACTOR}.gradloc.critic"
    require(need_critic(config), "critic.enable", f"true while {feature} is not off", config.critic.enable)
    of_all = (
        Requirement("critic.strategy", ("fsdp", "fsdp2"), None, "fsdp or fsdp2", "others do not have it"),
        Requirement("critic.model.enable_activation_offload", (False,), False, "false", "a search runs forwards alone"),
    )
    check_requirements(feature, (*of_all, *needs), config)


def of_critics_fsdp(ulysses: str, offload: str) -> tuple[Requirement, Requirement]:
    """What the critic needs of FSDP, by the names that these settings have here."""
    return (
        Requirement(ulysses, (1,), 1, "1", "sequence parallelism was not tried there"),
        Requirement(offload, (False, None), False, "false", "use param_offload and optimizer_offload instead"),
    )
