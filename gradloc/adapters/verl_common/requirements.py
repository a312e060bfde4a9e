# SPDX-License-Identifier: Apache-2.0
"""Find the features that a run has on, and refuse it where their requirements, those of requirements.yaml, fail."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from ...analysis.config import BucketSettings, QuartileSettings, read_if_on
from ...checks import require
from ...config import GradLocConfig, settings_from, settings_in
from ...health.config import HealthConfig
from ...names import refuse_unknown_names
from ...reweighting.config import AdvantageReweightingConfig, LoptiConfig
from ...rollout_filter.config import FilterSettings, read_filter

ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"

SPIKES, CRITIC = f"{ACTOR}.gradloc.enable", f"{ACTOR}.gradloc.critic"
STABILIZE = f"{ACTOR}.gradloc.stabilize"
RATIO_CLIPS = f"{STABILIZE}.token_clip or seq_clip"
FINE_LAYER_CLIP = f"{STABILIZE}.layer_clip.group finer than layer"
REWEIGHTING, LOPTI = "algorithm.advantage_reweighting.alpha", "algorithm.lopti.enable"
BUCKETS, QUARTILES = "trainer.gradient_analysis_mode", "trainer.quartile_analysis_mode"
FILTER = f"{_ROLLOUT}.rollout_filter_value"
"""Features, each named by the setting that switches it on."""


def analyses_in(config: Any) -> tuple[BucketSettings | None, QuartileSettings | None, FilterSettings] | None:
    """Return the settings of both analyses, None for one that is off, and of the rollout filter; None if all are off.

    Raises:
        ValueError: one sentence that names a key with a bad value, also while the features are off.
    """
    buckets, quartiles = read_if_on(BucketSettings, config), read_if_on(QuartileSettings, config)
    chosen = read_filter(config)
    return None if buckets is None and quartiles is None and chosen.keeps_all else (buckets, quartiles, chosen)


def reweighting_of(config: Any) -> tuple[float, LoptiConfig | None]:
    """Return Advantage Reweighting's alpha and Lopti's settings, 0 and None where they are off."""
    blocks = {"advantage_reweighting": AdvantageReweightingConfig, "lopti": LoptiConfig}
    alpha, lopti = (settings_from(config.algorithm.get(name) or {}, kind) for name, kind in blocks.items())
    return alpha.alpha, (lopti if lopti.enable else None)


def health_in(config: Any) -> HealthConfig | None:
    """Return the health monitor's settings; None while it is off, and in a config without the block.

    Raises:
        ValueError: one sentence that names a wrong setting, also while the monitor is off.
    """
    block = config.trainer.get("health")
    if block is None:
        return None
    settings = HealthConfig(**{str(name): value for name, value in OmegaConf.to_container(block, resolve=True).items()})
    return settings if settings.enable else None


class RequestedFeatures(NamedTuple):
    """The features that a run asks for."""

    settings: GradLocConfig
    """The settings of the block ``gradloc``."""
    alpha: float
    """Alpha of Advantage Reweighting."""
    lopti: LoptiConfig | None
    """None while it is off."""
    analyses: tuple[Any, Any, Any] | None
    """Result of :func:`analyses_in`."""
    features: list[str]
    """Names of the features that are on."""


def asked_of(config: Any, on: Collection[str]) -> RequestedFeatures:
    """Return the features that a run asks for; refuse the run if one of them could not work: :func:`check_needs`.

    Raises:
        ValueError: one sentence.
    """
    refuse_unknown_names(config)
    settings, (alpha, lopti) = settings_in(config), reweighting_of(config)
    analyses = analyses_in(config)
    buckets, quartiles, _ = analyses or (None, None, None)
    stabilize = settings.stabilize
    clips_finely = stabilize.layer_clip.rule != "off" and stabilize.layer_clip.group != "layer"
    is_on = {
        SPIKES: settings.enable,
        STABILIZE: stabilize.is_on,
        RATIO_CLIPS: stabilize.weighs_tokens,
        FINE_LAYER_CLIP: clips_finely and config.actor_rollout_ref.actor.get("strategy") == "fsdp",
        LOPTI: lopti is not None,
        BUCKETS: buckets is not None,
        QUARTILES: quartiles is not None,
        FILTER: analyses is not None,
        REWEIGHTING: alpha != 0,
        CRITIC: settings.critic != "off",
    }
    features = [feature for feature, is_asked in is_on.items() if is_asked]
    check_needs(on, features, config)
    return RequestedFeatures(settings, alpha, lopti, analyses, features)


_NAMES = {
    "spikes": [SPIKES],
    "critic": [CRITIC],
    "stabilize": [STABILIZE],
    "ratio_clips": [RATIO_CLIPS],
    "fine_layer_clip": [FINE_LAYER_CLIP],
    "reweighting": [REWEIGHTING],
    "lopti": [LOPTI],
    "filter": [FILTER],
    "analyses": [BUCKETS, QUARTILES],
    "updates": [SPIKES, STABILIZE, LOPTI, BUCKETS, QUARTILES],
}


@dataclass(frozen=True)
class Requirement:
    """The values of one setting that a feature needs."""

    key: str
    allowed: tuple[Any, ...]
    default: Any
    """The value where the config does not have the key."""
    expected: str
    because: str
    only_with: str = ""
    """A switch; where it is off, any value is allowed."""

    def found_in(self, config: Any) -> Any:
        """Return the setting's value in the trainer's whole config; where it does not matter, an allowed one."""
        if self.only_with and not _at(config, self.only_with):
            return self.allowed[0]
        found = _at(config, self.key)
        return self.default if found is None else found


def _at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name, None)
    return config


def _table() -> Iterator[tuple[Requirement, dict[str, list[str]]]]:
    """Yield each setting's requirement, and by version of verl the features that have it."""
    for row in yaml.safe_load(Path(__file__).with_name("requirements.yaml").read_text(encoding="utf-8")):
        where = {}
        for verl, names in row["where"].items():
            where[verl] = [feature for name in names.split() for feature in _NAMES[name]]
        for key, value in row.get("keys", {row.get("key"): row.get("is")}).items():
            allowed = tuple(row.get("one of", [value]))
            default, said = row.get("default", allowed[0]), row.get("said", str(allowed[0]).lower())
            yield Requirement(key, allowed, default, said, row["because"], row.get("only with", "")), where


TABLE = tuple(_table())


def check_needs(on: Collection[str], features: Iterable[str], config: Any) -> None:
    """Refuse a run in which a feature that is on could not work.

    Args:
        on: the columns of the table that hold for the run: ``0.7``; or ``0.9``, with ``0.10`` and ``megatron`` where
            these apply.
        features: see :class:`RequestedFeatures`.
        config: the trainer's whole config.

    Raises:
        ValueError: one sentence that names the key, what it must be, what was found and which feature needs it.
    """
    for feature in features:
        if feature == CRITIC:
            from verl.trainer.ppo.utils import need_critic

            require(need_critic(config), "critic.enable", f"true while {feature} is not off", config.critic.enable)
        for need in _needs_of(feature, on):
            found, said = need.found_in(config), f"{need.expected} while {feature} is on ({need.because})"
            require(found in need.allowed, need.key, said, found)


def tables_for(config: Any) -> list[str]:
    """Return the table's columns that hold for a run on verl 0.9 or later. Reads verl's source without importing it."""
    on, spec = ["0.9"], find_spec("verl")
    engine = Path(*(spec.submodule_search_locations or ()) if spec else (), "workers/engine/fsdp/transformer_impl.py")
    if engine.is_file() and "prefix_grouper" in engine.read_text(encoding="utf-8"):
        on.append("0.10")
    if config.actor_rollout_ref.actor.strategy == "megatron":
        on.append("megatron")
    return on


_CURES = {
    "clip_tokens": (STABILIZE, RATIO_CLIPS),
    "clip_sequences": (STABILIZE, RATIO_CLIPS),
    "reweight": (REWEIGHTING,),
}
"""Settings that a search measures as cures, and the features that they switch on."""


def refused_cures(on: Collection[str], config: Any) -> frozenset[str]:
    """Return the names of the cures with whose settings this run would be refused, so that no advice names them.

    Rollout log-probs that are off are no reason: a cure's line switches them on.
    """
    refused = set()
    for name, features in _CURES.items():
        for feature in features:
            for need in _needs_of(feature, on):
                if need.key != f"{_ROLLOUT}.calculate_log_probs" and need.found_in(config) not in need.allowed:
                    refused.add(name)
    return frozenset(refused)


def _needs_of(feature: str, on: Collection[str]) -> list[Requirement]:
    return [need for need, where in TABLE if any(feature in where.get(verl, ()) for verl in ("all", *on))]


def needed_of_megatron(block: str) -> dict[str, Any]:
    """Return by name the values that were tested in this block of Megatron's config; any other is refused."""
    prefix = f"{ACTOR}.megatron.{block}."
    return {need.key.removeprefix(prefix): need.default for need, _ in TABLE if need.key.startswith(prefix)}


def refuse_pictures(feature: str, inputs: Iterable[Any]) -> None:
    """Refuse rows with inputs besides text, which the analysis that ``feature`` switches on does not know.

    In a text-only run verl's agent loop gives empty dicts.

    Raises:
        ValueError: one sentence.
    """
    if any(inputs):
        raise ValueError(f"{feature} does not take batches with multi_modal_inputs yet: switch it off.")
