# SPDX-License-Identifier: Apache-2.0
"""The settings that hold, and every refusal of a run in which a feature could not work."""

from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf

from ...checks import SEARCHABLE, Requirement, check_requirements
from ...config import PUBLISHED, GradLocConfig, settings_from, settings_in
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


def settings_of(config: Any) -> GradLocConfig:
    """The settings that hold in a run, of the trainer's whole config.

    Raises:
        ValueError: one sentence.
    """
    return settings_in(config, lambda block: settings_from(OmegaConf.to_container(block, resolve=True)))


def settle(config: Any, settings: GradLocConfig) -> None:
    """Write these settings into the trainer's config, before any worker gets it: under both names of each, with the
    events' folder absolute (on another node it has another working folder), and with what makes them of the block."""
    actor = config.actor_rollout_ref.actor
    settled = {"_target_": "verl.utils.gradloc_seam.settings", **asdict(settings), "dump_dir": settings.root}
    values = (bool(settings.enable), settings.trigger.tau, settings.budget, settings.root, settled)
    for name, value in zip((*PUBLISHED, "gradloc"), values, strict=True):
        OmegaConf.update(actor, name, value, merge=False, force_add=True)
