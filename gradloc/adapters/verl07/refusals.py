# SPDX-License-Identifier: Apache-2.0
"""The settings that hold, and every refusal of a run in which a feature could not work."""

from typing import Any

from ...checks import SEARCHABLE, Requirement, check_requirements
from ...config import settle
from ..verl_common import needs
from ..verl_common.needs import (
    ACTOR,
    BUCKETS,
    FSDP,
    LOPTI,
    NO_OFFLOAD,
    QUARTILES,
    STABILIZE,
    WHOLE_SEQUENCES,
    features_on,
)

SPIKES = f"{ACTOR}.spike_detection"
_LEGACY = Requirement(
    "trainer.use_legacy_worker_impl", ("auto", "enable"), "auto", "auto or enable", "the engine workers do not have it"
)
_NEEDS = {
    **needs.NEEDS,
    SPIKES: (_LEGACY, FSDP, NO_OFFLOAD, *SEARCHABLE),
    LOPTI: (_LEGACY, FSDP),
    STABILIZE: (_LEGACY, FSDP, WHOLE_SEQUENCES),
    **dict.fromkeys((BUCKETS, QUARTILES), (_LEGACY, FSDP, NO_OFFLOAD, WHOLE_SEQUENCES)),
}


def check_run(feature: str, config: Any, prefix: str = "") -> None:
    """Refuse a run in which a feature that is on could not work.

    Args:
        feature: the setting that switches it on.
        config: the trainer's whole config, or what stands in it at ``prefix``.
        prefix: only the needs whose keys begin with it are checked.

    Raises:
        ValueError: one sentence that names the key, what it must be, what was found and which feature needs it.
    """
    check_requirements(feature, _NEEDS[feature], config, prefix)


def check_critic(config: Any) -> None:
    """Refuse a run in which spikes of the critic could not be localized: as :func:`check_run`."""
    keys = "critic.ulysses_sequence_parallel_size", "critic.model.fsdp_config.offload_policy"
    needs.check_critic(config, *keys, _LEGACY)


def settle_actor_config(actor: Any) -> None:
    """When the actor's config is built, on the trainer and on every worker: both names of a setting say the same from
    here on, and a wrong setting or combination is refused.

    Args:
        actor: verl's ``ActorConfig`` with the four published keys and ``gradloc``.

    Raises:
        ValueError: as :func:`check_run`.
    """
    for feature in features_on(settle(actor), actor.strategy, SPIKES):
        check_run(feature, actor, f"{ACTOR}.")
