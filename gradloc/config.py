# SPDX-License-Identifier: Apache-2.0
"""The settings under ``actor_rollout_ref.actor.gradloc``, validated when the run starts.

The dataclasses of settings, here and in each room's ``config.py``, are the only place of a default, its bound and its
sentence: ``scripts/make_settings.py`` makes Hydra's files and the tables in docs/ from them. The docs print the
docstring below a field, so it says ``null`` and ``true`` as YAML does.

The four published keys (``spike_detection``, ``grad_norm_threshold``, ``bisect_budget_steps``, ``bisect_dump_dir``)
are in the actor's own config and are aliases of settings in here, which :func:`resolve` fills from them.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from .checks import (
    POSITIVE,
    SWITCH,
    Allowed,
    checked,
    integer,
    number,
    one_of,
    or_null,
    refuse_unknown,
    require,
    setting,
)
from .mismatch.config import MismatchConfig
from .notify.config import NotifyConfig
from .record import ACTIONS
from .search.limit import BUDGET, MAX_CULPRITS, MAX_CURES, MAX_STEPS, STRATEGIES
from .stabilize.config import StabilizeConfig

_KEY = "actor_rollout_ref.actor"
_TAU = or_null(POSITIVE, "null (adaptive) or a positive number (the published per-token threshold)")
_FOLDER = Allowed("the path of a folder", lambda value: isinstance(value, str) and value.strip() != "")
PUBLISHED = {
    "spike_detection": ("enable", SWITCH),
    "grad_norm_threshold": ("trigger.tau", _TAU),
    "bisect_budget_steps": ("budget", integer(1)),
    "bisect_dump_dir": ("dump_dir", _FOLDER),
}
"""The published keys of the actor's own config: the setting under ``gradloc`` that each is an alias of, its bound."""


@checked(f"{_KEY}.gradloc.trigger")
@dataclass(frozen=True)
class TriggerConfig:
    """When a gradient norm counts as a spike.

    With ``tau`` set, the published fixed rule decides and ``window``, ``warmup``, ``floor`` and ``cap`` are not used. A
    non-finite norm is always a spike.
    """

    tau: float | None = setting(None, _TAU)
    """Per-token threshold: a mini-batch of N response tokens spikes at a norm of tau / sqrt(N). null: the adaptive
    rule."""
    window: int = setting(64, integer(8))
    """Trainer steps that the adaptive rule learns from, separately for each mini-batch position."""
    warmup: int = setting(16, integer(2))
    """Trainer steps before the adaptive rule may fire, at most ``window``."""
    floor: float = setting(4.0, number("a number greater than 1", lambda value: value > 1))
    """No norm below this many times the recent level is a spike."""
    cap: float = 10.0
    """Every norm above this many times the recent level is a spike; at least ``floor``."""
    cooldown_steps: int = setting(0, integer(0))
    """Trainer steps after an event during which no other is written; the action still applies."""
    max_events_per_step: int = setting(1, integer(1))
    """Most events written per trainer step; the action applies to every spike."""
    max_events: int = setting(100, integer(0))
    """Most events written per run; ``gradloc/unwritten`` counts the rest, and the action still applies to them."""
    force_step: int | None = setting(None, or_null(integer(1), "null or a global step of at least 1"))
    """Rehearsal: localize at this global step even if nothing spikes."""

    def check(self) -> None:
        """Check the settings that bound each other."""
        key, at_most = f"{_KEY}.gradloc.trigger", f"at most gradloc.trigger.window ({self.window})"
        require(self.warmup <= self.window, f"{key}.warmup", at_most, self.warmup)
        least = number(f"a number of at least gradloc.trigger.floor ({self.floor})", lambda cap: cap >= self.floor)
        least.check(f"{key}.cap", self.cap)


@checked(f"{_KEY}.gradloc.search")
@dataclass(frozen=True)
class SearchConfig:
    """How the culprits are looked for."""

    strategy: str = setting("auto", one_of(*STRATEGIES))
    """``auto``, or one method alone: ``share``, ``bisect`` (the published binary search)."""
    max_culprits: int = setting(MAX_CULPRITS, integer(1))
    """Stop after this many culprits."""
    max_steps: float = setting(MAX_STEPS, number("a number of at least 1", lambda value: value >= 1))
    """Most that a search may cost, in updates of this run (a forward and backward of every micro-batch of a mini-batch;
    one counts as ten forwards at least), in passes or in time, whichever comes first. At the limit, the event has what
    was found so far. ``bisect`` counts its passes by ``gradloc.budget``, and has a minute at least."""
    max_cures: int = setting(MAX_CURES, integer(0))
    """After the search, measure the step's norm under at most this many other settings, one pass over its micro-batches
    each, until one heals it (docs/cures.md); 0: none."""
    layer_window: int = setting(32, integer(0))
    """Optimizer steps of per-layer norms to remember, to spot a single exploding layer; 0 for none. As many as
    fit into 0.2 % of the time."""


@checked(f"{_KEY}.gradloc.action")
@dataclass(frozen=True)
class ActionConfig:
    """What happens to the optimizer step that spiked, to each one that does."""

    mode: str = setting("observe", one_of(*ACTIONS))
    """``observe``: take the step unchanged. ``mask``: take the step that the batch would have given without the
    culprits. ``heal``: take the step that the first setting measured to heal it gives, bit for bit; ``skip`` where none
    does. ``skip``: take none. ``abort``: take none, write the event, stop the run."""
    max_masked_tokens: int = setting(64, integer(1))
    """Skip the step rather than mask more tokens."""
    max_masked_share: float = setting(0.05, number("in (0, 1]", lambda value: 0 < value <= 1))
    """Skip the step rather than mask a larger share of the mini-batch's tokens."""
    max_searches_per_step: int | None = setting(None, or_null(integer(1)))
    """Skip the step rather than search more often than this in one update, which bounds the cost of ``mask``."""


@checked(f"{_KEY}.gradloc.evidence")
@dataclass(frozen=True)
class EvidenceConfig:
    """What an event keeps on disk."""

    context_tokens: int = setting(32, integer(0))
    """Tokens of text kept before and after each culprit."""
    text: str = setting("on", one_of("on", "off"))
    """``off`` leaves out prompts, their pictures and text. The culprits' own token ids stay in the event; a bundle
    holds all token ids and pixels, so see ``bundle``."""
    bundle: str = setting("culprits", one_of("culprits", "full", "off"))
    """What the replay bundle holds: the culprits' micro-batches, the whole mini-batch (``full``), or nothing
    (``off``)."""
    checkpoint: str = setting("off", one_of("off", "before_step"))
    """``before_step`` saves the weights at the event, in verl's own checkpoint format."""
    max_gb: float = setting(20.0, number("a number from 0 on", lambda value: value >= 0))
    """Write no more bundles or checkpoints once the folder holds this many gigabytes."""
    rerun: bool = setting(False, SWITCH)
    """Before searching, rerun the spike's micro-batches unchanged; if the norm does not come back, hardware or a race
    made it, and no token is searched for."""


@checked(f"{_KEY}.gradloc")
@dataclass(frozen=True)
class GradLocConfig:
    """Everything under ``actor.gradloc``."""

    enable: bool | None = setting(None, or_null(SWITCH, "null, true or false"))
    """``true``: detect gradient spikes and localize them to tokens. ``false``: everything under ``gradloc`` is off,
    stabilizers included. null: only what you switch on separately."""
    critic: str = setting("off", one_of("off", *ACTIONS))
    """Do the same for the critic: ``off``, or an action mode for its step. It uses the actor's trigger, search and
    evidence settings, but saves no weights; its metrics are ``gradloc/critic_*``."""
    dump_dir: str = setting("gradloc_events", _FOLDER)
    """Folder for events; made absolute at start."""
    budget: int = setting(BUDGET, integer(1))
    """Most forward/backward probes of the published search (``gradloc.search.strategy=bisect``) for up to 16
    micro-batches per rank; with M more than that, M / 16 times as many."""
    trigger: TriggerConfig = field(default_factory=TriggerConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    action: ActionConfig = field(default_factory=ActionConfig)
    evidence: EvidenceConfig = field(default_factory=EvidenceConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    stabilize: StabilizeConfig = field(default_factory=StabilizeConfig)

    def check(self) -> None:
        """Check that ``heal`` has a step to take: one that was measured."""
        is_searched = "heal" not in (self.action.mode, self.critic) or self.search.max_cures > 0
        require(is_searched, f"{_KEY}.gradloc.search.max_cures", "at least 1 with action.mode=heal", 0)

    @property
    def root(self) -> str:
        """Return the folder for events as an absolute path."""
        return os.path.abspath(os.path.expanduser(self.dump_dir))


def resolve(settings: GradLocConfig, actor: Any, default_dump_dir: str | None = None) -> GradLocConfig:
    """Return the effective settings: those under ``gradloc``, and the published keys where these are given.

    A key under ``gradloc`` that has its default counts as not given, since the config does not show the difference.

    Args:
        settings: the block ``gradloc`` as given.
        actor: has the four published keys, by ``get``; None: not given.
        default_dump_dir: the default of ``gradloc.dump_dir`` in this run; None: not known in this process.

    Returns:
        ``enable`` is True where spikes are looked for; where it was given as False, the stabilizers are off, too.

    Raises:
        ValueError: one sentence: a published key has a wrong value, or both names are given and differ.
    """
    known = {"enable": settings.enable, "trigger.tau": settings.trigger.tau, "budget": settings.budget}
    known["dump_dir"] = settings.dump_dir if default_dump_dir is not None else None
    defaults = {"budget": BUDGET, "dump_dir": default_dump_dir}  # of the others None, which says not given
    for name, (ours, allowed) in PUBLISHED.items():
        value = actor.get(name)
        if value is None:
            continue
        allowed.check(f"{_KEY}.{name}", value)
        other = f"left out or the same as its other name gradloc.{ours}={known[ours]}"
        require(known[ours] in (defaults.get(ours), value), f"{_KEY}.{name}", other, value)
        known[ours] = value
    is_off = settings.enable is False
    return replace(
        settings,
        enable=known["enable"] or settings.enable,
        dump_dir=known["dump_dir"] or settings.dump_dir,
        budget=known["budget"],
        trigger=replace(settings.trigger, tau=known["trigger.tau"]),
        stabilize=StabilizeConfig() if is_off else settings.stabilize,
        critic="off" if is_off else settings.critic,
    )


def settings_from(given: Mapping[str, Any], kind: Any = GradLocConfig) -> Any:
    """Read a block of a config and the blocks within; what it lacks takes its default.

    Raises:
        ValueError: one sentence, for an unknown name or a wrong value.
    """
    require(isinstance(given, Mapping), "gradloc", "a mode or settings by name", given)
    kinds = {each.name: each.default_factory for each in fields(kind) if is_dataclass(each.default_factory)}
    pairs = ((name, value) for name, value in given.items() if name != "_target_")  # Hydra's own
    return kind(**{name: settings_from(value, kinds[name]) if name in kinds else value for name, value in pairs})


def settings_without_verl(
    given: Any, dump_dir: str, where: str, features: Iterable[str] = ("buckets", "quartiles")
) -> GradLocConfig | None:
    """Return the settings of a run that is not verl's, with ``enable`` True; None where it was given as False.

    Args:
        given: blocks by name, or a GradLocConfig.
        dump_dir: the folder for events, unless it is given.
        where: the trainer's name in a refusal of what it does not have, such as a critic.
        features: further blocks that the caller has taken out, to be named where a name is unknown.

    Raises:
        ValueError: one sentence, for a wrong name or value, and for what only verl has.
    """
    if isinstance(given, Mapping):
        own = [*(each.name for each in fields(GradLocConfig))]
        refuse_unknown("gradloc", given, [*own, *features])
    try:
        settings = given if isinstance(given, GradLocConfig) else settings_from(given)
    except ValueError as error:  # settings say their names as verl has them
        raise ValueError(str(error).replace(f"{_KEY}.", "")) from None
    if settings.enable is False:
        return None
    require(settings.critic == "off", "gradloc.critic", f"off with {where}", settings.critic)
    why = "left as it is: the stabilizers need verl"
    require(settings.stabilize == StabilizeConfig(), "gradloc.stabilize", why, settings.stabilize)
    is_named = settings.dump_dir != GradLocConfig.dump_dir
    return replace(settings, enable=True, dump_dir=settings.root if is_named else os.path.abspath(dump_dir))


def settings_in(config: Any) -> GradLocConfig:
    """Return the effective settings of a run, the folder for events absolute: workers may have another folder.

    Args:
        config: the trainer's whole config; one without the block, of another trainer, has all off.

    Raises:
        ValueError: as :func:`resolve`.
    """
    from omegaconf import OmegaConf

    actor = config.actor_rollout_ref.actor
    block = actor.get("gradloc")
    if block is None:
        return GradLocConfig()
    run_folder = OmegaConf.select(config, "trainer.default_local_dir", default="outputs")
    given: Any = OmegaConf.to_container(block, resolve=True)
    settings = resolve(settings_from(given), actor, default_dump_dir=f"{run_folder}/gradloc")
    return replace(settings, dump_dir=settings.root)


def fix_dump_dir(config: Any, root: str) -> None:
    """Make the events' folder absolute in the config, before a worker in another folder gets it."""
    actor = config.actor_rollout_ref.actor
    if actor.get("gradloc") is not None:
        actor.gradloc.dump_dir = root
        if actor.get("bisect_dump_dir") is not None:
            actor.bisect_dump_dir = root
