# SPDX-License-Identifier: Apache-2.0
"""The actor's config with GradLoc's settings, which ``+gradloc=on`` sets as ``actor_rollout_ref.actor._target_``.

verl builds it in each worker before the engine: so here a plug-in that was not loaded is missed, and another verl.

``touched.json`` lists what is private or may change of verl, by who touches it: each function's parameters, or null
where it only has to be there. Its last block, ``code``, has what we rely on without calling it, or replace in part: the
digests of the code that is known, of 0.9.0, 0.9.1 and 0.10's development (1dda039b, August 2026).
"""

import json
import logging
import re
import sys
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, ClassVar

import verl
from verl.workers.config import FSDPActorConfig, McoreActorConfig, RolloutConfig

from ...analysis.config import BucketSettings
from ...checks import keys_by_field
from ...config import GradLocConfig, resolve
from ...private_api import differences, digest
from ...rollout_filter.config import FilterSettings

_OF_ROLLOUT = [
    (key.rpartition(".")[2], Any, getattr(settings, name))
    for settings in (BucketSettings, FilterSettings)
    for name, key in keys_by_field(settings).items()
    if key.startswith("actor_rollout_ref.rollout.")
]
GradLocRolloutConfig = make_dataclass(
    "GradLocRolloutConfig", _OF_ROLLOUT, bases=(RolloutConfig,), namespace={"__module__": __name__}
)
"""verl's config of the rollout with the filter's and the bucket analysis' settings, which the trainer reads."""


@dataclass
class _WithSettings:
    """Mixin before verl's config of an actor: the four published keys (None: not given) and ``gradloc``."""

    spike_detection: bool | None = None
    grad_norm_threshold: float | None = None
    bisect_budget_steps: int | None = None
    bisect_dump_dir: str | None = None
    gradloc: GradLocConfig = field(default_factory=GradLocConfig)
    filter_loss_scaling: str = FilterSettings.loss_scaling
    touched_by: ClassVar[str] = "worker"

    def __post_init__(self):
        super().__post_init__()
        settings = resolve(self.gradloc, self)
        if not settings.enable and not settings.stabilize.is_on:
            return
        check_verl(self.touched_by)
        if f"{__package__}.plugin" not in sys.modules:
            raise RuntimeError(
                "gradloc is switched on, and its plug-in was not loaded: leave VERL_USE_EXTERNAL_PLUGINS at auto or "
                "name gradloc in it, and install gradloc in the environment of every node (pip install gradloc-verl)."
            )


@dataclass
class GradLocActorConfig(_WithSettings, FSDPActorConfig):
    """The FSDP actor's config."""


@dataclass
class GradLocMegatronActorConfig(_WithSettings, McoreActorConfig):
    """The Megatron actor's config."""

    touched_by: ClassVar[str] = "megatron"


def actor_config(**given: Any) -> _WithSettings:
    """Return the config of the run's engine."""
    return (GradLocMegatronActorConfig if given.get("strategy") == "megatron" else GradLocActorConfig)(**given)


logger = logging.getLogger(__name__)

KNOWN = ("0.9.0", "0.9.1")
"""Known releases: the first was read, the last was tested."""
_LISTED = json.loads(Path(__file__).with_name("touched.json").read_text(encoding="utf-8"))
TOUCHED = {
    "worker": _LISTED["losses"] | _LISTED["worker"],
    "megatron": _LISTED["losses"] | _LISTED["megatron"],
    "trainer": _LISTED["trainer"],
}


def changed_bodies() -> list[str]:
    """Return how the installed verl differs from every known release."""
    return [place for place, known in _LISTED["code"].items() if digest(place) not in known.split()]


def check_verl(who: str) -> None:
    """Refuse a verl that this adapter does not fit, by the code that it touches and not by its version.

    To the trainer, changes that may be harmless are a warning. ``who`` is one of ``TOUCHED``.

    Raises:
        RuntimeError: one sentence that names the version, what changed, and what to do.
    """
    release = verl.__version__
    if tuple(map(int, re.findall(r"\d+", release)[:2])) < (0, 9):
        raise RuntimeError(
            f"gradloc's plug-in is for verl 0.9, found verl {release}: on 0.7.0 apply the patch "
            "(gradloc-patch --repo VERL), from 0.8 move on to 0.9, and leave +gradloc out until then."
        )
    if changed := differences(TOUCHED[who]):
        raise RuntimeError(
            f"verl {release} changed what gradloc hangs on (it knows {', '.join(KNOWN)}): {changed[0]}; "
            "install one of these, or leave +gradloc out."
        )
    if who == "trainer" and (changed := changed_bodies()):
        logger.warning(
            "gradloc: verl %s changed the code of %s, which gradloc knows of %s: it goes on; a rehearsal "
            "(actor_rollout_ref.actor.gradloc.trigger.force_step=1) shows whether it still measures what it should",
            release,
            ", ".join(place.partition(":")[2] for place in changed),
            ", ".join(KNOWN),
        )
