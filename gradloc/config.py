# SPDX-License-Identifier: Apache-2.0
"""The settings under ``actor_rollout_ref.actor.gradloc``, validated when the run starts.

The four published keys (``spike_detection``, ``grad_norm_threshold``, ``bisect_budget_steps``, ``bisect_dump_dir``)
live on the actor's own config and are other names of settings in here: :func:`resolve` puts them where they belong, and
the rest of the code knows one name. The defaults below mirror ``verl/trainer/config/actor/actor.yaml``; a test holds
the two and the documented table together.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from .checks import POSITIVE, SWITCH, Allowed, closed, integer, number, one_of, or_null, require, setting
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
"""The published keys, on the actor's own config: what each is another name of, under ``gradloc``, and may be."""


@closed(f"{_KEY}.gradloc.trigger")
@dataclass(frozen=True)
class TriggerConfig:
    """When a gradient norm counts as a spike.

    With ``tau`` set, the published fixed rule decides and ``window``, ``warmup``, ``floor`` and ``cap`` are not used. A
    non-finite norm is always a spike.
    """

    tau: float | None = setting(None, _TAU)
    """Per-token threshold; a mini-batch's own is tau / sqrt(tokens). None: the adaptive rule."""
    window: int = setting(64, integer(8))
    """Trainer steps whose norms the adaptive rule learns from, for each mini-batch position apart."""
    warmup: int = setting(16, integer(2))
    """Trainer steps before the adaptive rule may fire."""
    floor: float = setting(4.0, number("a number greater than 1", lambda value: value > 1))
    """No norm below this many times the recent level is a spike."""
    cap: float = 10.0
    """Every norm above this many times the recent level is a spike."""
    cooldown_steps: int = setting(0, integer(0))
    """Trainer steps after an event in which none is written; the action still applies."""
    max_events_per_step: int = setting(1, integer(1))
    """Events written of one trainer step; the action applies to every spike, written or not."""
    max_events: int = setting(100, integer(0))
    """Events written in one run; the action still applies to later spikes."""
    force_step: int | None = setting(None, or_null(integer(1), "null or a global step of at least 1"))
    """Rehearsal: localize at this global step even though nothing spikes there."""

    def check(self) -> None:
        """What a setting may be beside another one."""
        key, at_most = f"{_KEY}.gradloc.trigger", f"at most gradloc.trigger.window ({self.window})"
        require(self.warmup <= self.window, f"{key}.warmup", at_most, self.warmup)
        least = number(f"a number of at least gradloc.trigger.floor ({self.floor})", lambda cap: cap >= self.floor)
        least.check(f"{key}.cap", self.cap)


@closed(f"{_KEY}.gradloc.search")
@dataclass(frozen=True)
class SearchConfig:
    """How the culprits are looked for."""

    strategy: str = setting("auto", one_of(*STRATEGIES))
    """``auto``; or one method alone: ``share``, ``sketch``, ``bisect`` (the published binary search)."""
    max_culprits: int = setting(MAX_CULPRITS, integer(1))
    """Stop after this many culprits."""
    max_steps: float = setting(MAX_STEPS, number("a number of at least 1", lambda value: value >= 1))
    """No search costs more than so many of this run's own updates, in passes and in time; ``bisect`` has ``budget``."""
    max_cures: int = setting(MAX_CURES, integer(0))
    """Other settings that the step is measured under after its search, one pass each, until one heals it; 0: none."""
    layer_window: int = setting(32, integer(0))
    """Optimizer steps whose norm per layer is remembered, to tell a layer that explodes alone; 0 for none."""


@closed(f"{_KEY}.gradloc.action")
@dataclass(frozen=True)
class ActionConfig:
    """What happens to the optimizer step that spiked, to each one that does."""

    mode: str = setting("observe", one_of(*ACTIONS))
    """``observe``: the step is unchanged. ``mask``: take the step without the culprits. ``heal``: take it
    under the setting that was measured to heal it. ``skip``: take no step. ``abort``: take no step, write the event,
    stop the run."""
    max_masked_tokens: int = setting(64, integer(1))
    """Skip the step instead of masking more tokens than this."""
    max_masked_share: float = setting(0.05, number("in (0, 1]", lambda value: 0 < value <= 1))
    """Skip the step instead of masking more than this share of the mini-batch's tokens."""
    max_searches_per_step: int | None = setting(None, or_null(integer(1)))
    """Masking needs a search for every spike: skip the step instead of searching more often in one update."""


@closed(f"{_KEY}.gradloc.evidence")
@dataclass(frozen=True)
class EvidenceConfig:
    """What an event keeps on disk."""

    context_tokens: int = setting(32, integer(0))
    """Tokens of text kept before and after each culprit."""
    text: str = setting("on", one_of("on", "off"))
    """``off`` keeps prompts and text out of events; a bundle still holds token ids, so see ``bundle``, too."""
    bundle: str = setting("culprits", one_of("culprits", "full", "off"))
    """What the replay bundle holds: ``culprits`` (their micro-batches), ``full`` (the mini-batch) or ``off``."""
    checkpoint: str = setting("off", one_of("off", "before_step"))
    """``before_step`` saves the weights that the event happened at, in verl's own checkpoint format."""
    max_gb: float = setting(20.0, number("a number from 0 on", lambda value: value >= 0))
    """No bundle or checkpoint is written once the dump folder holds this many gigabytes."""
    rerun: bool = setting(False, SWITCH)
    """Run the spike's micro-batches again as they were, and record whether the norm came back; where it did not, the
    hardware or a race made the spike, and no token is looked for."""


@closed(f"{_KEY}.gradloc")
@dataclass(frozen=True)
class GradLocConfig:
    """Everything under ``actor.gradloc``."""

    enable: bool | None = setting(None, or_null(SWITCH, "null, true or false"))
    """True: look for spikes. False: everything under ``gradloc`` is off. None: only what is switched on by itself."""
    critic: str = setting("off", one_of("off", *ACTIONS))
    """Look for spikes of the critic's gradient, too, and what to do with them: ``off`` or an ``action.mode``."""
    dump_dir: str = setting("gradloc_events", _FOLDER)
    """The folder for events; made absolute when the run starts."""
    budget: int = setting(BUDGET, integer(1))
    """Largest number of forward/backward probes of the published search, ``search.strategy=bisect``."""
    trigger: TriggerConfig = field(default_factory=TriggerConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    action: ActionConfig = field(default_factory=ActionConfig)
    evidence: EvidenceConfig = field(default_factory=EvidenceConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    stabilize: StabilizeConfig = field(default_factory=StabilizeConfig)

    def check(self) -> None:
        """``heal`` takes a step that was measured."""
        is_searched = "heal" not in (self.action.mode, self.critic) or self.search.max_cures > 0
        require(is_searched, f"{_KEY}.gradloc.search.max_cures", "at least 1 with action.mode=heal", 0)

    @property
    def root(self) -> str:
        """The folder for events as an absolute path."""
        return os.path.abspath(os.path.expanduser(self.dump_dir))


def resolve(settings: GradLocConfig, actor: Any, default_dump_dir: str | None = None) -> GradLocConfig:
    """The effective settings: those under ``gradloc``, and the published keys where these are given.

    A key under ``gradloc`` that has its default counts as not given: the config does not tell whether it was.

    Args:
        settings: the block ``gradloc`` as given.
        actor: has the four published keys, by ``get``; None: not given.
        default_dump_dir: what ``gradloc.dump_dir`` is where nobody has given it; None: not known in this process.

    Returns:
        ``enable`` is True where spikes are looked for; where it was given as False, the stabilizers are off, too.

    Raises:
        ValueError: one sentence: a published key has a wrong value, or both names are given and differ.
    """
    known = {"enable": settings.enable, "trigger.tau": settings.trigger.tau, "budget": settings.budget}
    known["dump_dir"] = settings.dump_dir if default_dump_dir is not None else None
    defaults = {"budget": BUDGET, "dump_dir": default_dump_dir}
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
    """The settings that a block of a config holds, and those of the blocks within; what it lacks takes its default.

    Raises:
        ValueError: one sentence, for an unknown name or a wrong value.
    """
    require(isinstance(given, Mapping), "gradloc", "a mode or settings by name", given)
    kinds = {each.name: each.default_factory for each in fields(kind) if is_dataclass(each.default_factory)}
    pairs = ((name, value) for name, value in given.items() if name != "_target_")  # Hydra's own
    return kind(**{name: settings_from(value, kinds[name]) if name in kinds else value for name, value in pairs})


def settings_without_verl(given: Any, dump_dir: str, where: str) -> GradLocConfig | None:
    """The settings of a run of another trainer's than verl, with ``enable`` True; None where it was given as False.

    Args:
        given: blocks by name, or a GradLocConfig.
        dump_dir: the folder for events, unless it is given.
        where: the trainer without a critic, as a refusal calls it.

    Raises:
        ValueError: one sentence, for a wrong name or value, and for what only verl has.
    """
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
    """The effective settings of a run, with the folder for events as an absolute path: workers may stand elsewhere.

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
    """Make the events' folder absolute before any worker gets the config: on another node it has another folder."""
    actor = config.actor_rollout_ref.actor
    if actor.get("gradloc") is not None:
        actor.gradloc.dump_dir = root
        if actor.get("bisect_dump_dir") is not None:
            actor.bisect_dump_dir = root
