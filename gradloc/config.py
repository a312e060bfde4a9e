# SPDX-License-Identifier: Apache-2.0
"""The settings under ``actor_rollout_ref.actor.gradloc``, validated when the run starts.

The four published keys (``spike_detection``, ``grad_norm_threshold``, ``bisect_budget_steps``, ``bisect_dump_dir``)
live on the actor's own config and are other names of settings in here: :func:`resolve` puts them where they belong, and
the rest of the code knows one name. The defaults below mirror ``verl/trainer/config/actor/actor.yaml``; a test holds
the two and the documented table together.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from .checks import closed, is_int, is_number, require
from .core.actions import ACTIONS
from .search.find import BUDGET, MAX_CULPRITS, MAX_STEPS, STRATEGIES
from .stabilize.config import StabilizeConfig
from .tell.config import NotifyConfig

__all__ = [
    "ActionConfig",
    "EvidenceConfig",
    "GradLocConfig",
    "PUBLISHED",
    "SearchConfig",
    "TriggerConfig",
    "fix_dump_dir",
    "resolve",
    "settings_in",
    "settle",
]

_KEY = "actor_rollout_ref.actor"
PUBLISHED = {
    "spike_detection": "enable",
    "grad_norm_threshold": "trigger.tau",
    "bisect_budget_steps": "budget",
    "bisect_dump_dir": "dump_dir",
}
"""The published keys, on the actor's own config, and what each is another name of, under ``gradloc``."""


def _require(ok: bool, key: str, expected: str, found: Any) -> None:
    require(ok, f"{_KEY}.{key}", expected, found)


@closed(f"{_KEY}.gradloc.trigger")
@dataclass(frozen=True)
class TriggerConfig:
    """When a gradient norm counts as a spike.

    With ``tau`` set, the published fixed rule decides and ``window``, ``warmup``, ``floor`` and ``cap`` are not used. A
    non-finite norm is always a spike.
    """

    tau: float | None = None
    """Per-token threshold; a mini-batch's own is tau / sqrt(tokens). None: the adaptive rule."""
    window: int = 64
    """Trainer steps whose norms the adaptive rule learns from, for each mini-batch position apart."""
    warmup: int = 16
    """Trainer steps before the adaptive rule may fire."""
    floor: float = 4.0
    """No norm below this many times the recent level is a spike."""
    cap: float = 10.0
    """Every norm above this many times the recent level is a spike."""
    cooldown_steps: int = 0
    """Trainer steps after an event in which none is written; the action still applies."""
    max_events_per_step: int = 1
    """Events written of one trainer step; the action applies to every spike, written or not."""
    max_events: int = 100
    """Events written in one run; the action still applies to later spikes."""
    force_step: int | None = None
    """Rehearsal: localize at this global step even though nothing spikes there."""

    def __post_init__(self):
        _require_tau("gradloc.trigger.tau", self.tau)
        for name, least in (("window", 8), ("warmup", 2), ("cooldown_steps", 0), ("max_events_per_step", 1)):
            value = getattr(self, name)
            _require(is_int(value, least), f"gradloc.trigger.{name}", f"an integer of at least {least}", value)
        _require(is_int(self.max_events, 0), "gradloc.trigger.max_events", "an integer of at least 0", self.max_events)
        _require(
            self.warmup <= self.window,
            "gradloc.trigger.warmup",
            f"at most gradloc.trigger.window ({self.window})",
            self.warmup,
        )
        _require(
            is_number(self.floor) and self.floor > 1, "gradloc.trigger.floor", "a number greater than 1", self.floor
        )
        _require(
            is_number(self.cap) and self.cap >= self.floor,
            "gradloc.trigger.cap",
            f"a number of at least gradloc.trigger.floor ({self.floor})",
            self.cap,
        )
        _require(
            self.force_step is None or is_int(self.force_step, 1),
            "gradloc.trigger.force_step",
            "null or a global step of at least 1",
            self.force_step,
        )


@closed(f"{_KEY}.gradloc.search")
@dataclass(frozen=True)
class SearchConfig:
    """How the culprits are looked for."""

    strategy: str = "auto"
    """``auto``; or one method alone: ``share``, ``sketch``, ``bisect`` (the published binary search)."""
    max_culprits: int = MAX_CULPRITS
    """Stop after this many culprits."""
    max_steps: float = MAX_STEPS
    """No search costs more than so many of this run's own updates, in passes and in time; ``bisect`` has ``budget``."""
    layer_window: int = 32
    """Optimizer steps whose norm per layer is remembered, to tell a layer that explodes alone; 0 for none."""

    def __post_init__(self):
        _require(
            is_int(self.layer_window, 0), "gradloc.search.layer_window", "an integer of at least 0", self.layer_window
        )
        is_limit = is_number(self.max_steps) and self.max_steps >= 1
        _require(is_limit, "gradloc.search.max_steps", "a number of at least 1", self.max_steps)
        names = ", ".join(STRATEGIES)
        _require(self.strategy in STRATEGIES, "gradloc.search.strategy", f"one of {names}", self.strategy)
        _require(
            is_int(self.max_culprits, 1), "gradloc.search.max_culprits", "an integer of at least 1", self.max_culprits
        )


@closed(f"{_KEY}.gradloc.action")
@dataclass(frozen=True)
class ActionConfig:
    """What happens to the optimizer step that spiked, to each one that does."""

    mode: str = "observe"
    """``observe``: the step is unchanged. ``mask``: take the step without the culprits. ``skip``:
    take no step. ``abort``: take no step, write the event, stop the run."""
    max_masked_tokens: int = 64
    """Skip the step instead of masking more tokens than this."""
    max_masked_share: float = 0.05
    """Skip the step instead of masking more than this share of the mini-batch's tokens."""
    max_searches_per_step: int | None = None
    """Masking needs a search for every spike: skip the step instead of searching more often in one update."""

    def __post_init__(self):
        _require(self.mode in ACTIONS, "gradloc.action.mode", f"one of {', '.join(ACTIONS)}", self.mode)
        most = self.max_masked_tokens
        _require(is_int(most, 1), "gradloc.action.max_masked_tokens", "an integer of at least 1", most)
        share = self.max_masked_share
        _require(is_number(share) and 0 < share <= 1, "gradloc.action.max_masked_share", "in (0, 1]", share)
        most = self.max_searches_per_step
        _require(
            most is None or is_int(most, 1),
            "gradloc.action.max_searches_per_step",
            "null or an integer of at least 1",
            most,
        )


@closed(f"{_KEY}.gradloc.evidence")
@dataclass(frozen=True)
class EvidenceConfig:
    """What an event keeps on disk."""

    context_tokens: int = 32
    """Tokens of text kept before and after each culprit."""
    text: str = "on"
    """``off`` keeps prompts and text out of events; a bundle still holds token ids, so see ``bundle``, too."""
    bundle: str = "culprits"
    """What the replay bundle holds: ``culprits`` (their micro-batches), ``full`` (the mini-batch) or ``off``."""
    checkpoint: str = "off"
    """``before_step`` saves the weights that the event happened at, in verl's own checkpoint format."""
    max_gb: float = 20.0
    """No bundle or checkpoint is written once the dump folder holds this many gigabytes."""
    rerun: bool = False
    """Run the spike's micro-batches again as they were, and record whether the norm came back; where it did not, the
    hardware or a race made the spike, and no token is looked for."""

    def __post_init__(self):
        if isinstance(self.text, bool):  # YAML reads a bare on/off as a boolean
            object.__setattr__(self, "text", "on" if self.text else "off")
        if self.bundle is False:
            object.__setattr__(self, "bundle", "off")
        if self.checkpoint is False:
            object.__setattr__(self, "checkpoint", "off")
        for name, allowed in (
            ("text", ("on", "off")),
            ("bundle", ("culprits", "full", "off")),
            ("checkpoint", ("off", "before_step")),
        ):
            value = getattr(self, name)
            _require(value in allowed, f"gradloc.evidence.{name}", f"one of {', '.join(allowed)}", value)
        _require(isinstance(self.rerun, bool), "gradloc.evidence.rerun", "true or false", self.rerun)
        _require(
            is_number(self.max_gb) and self.max_gb >= 0, "gradloc.evidence.max_gb", "a number from 0 on", self.max_gb
        )
        _require(
            is_int(self.context_tokens, 0),
            "gradloc.evidence.context_tokens",
            "an integer of at least 0",
            self.context_tokens,
        )


@closed(f"{_KEY}.gradloc")
@dataclass(frozen=True)
class GradLocConfig:
    """Everything under ``actor.gradloc``."""

    enable: bool | None = None
    """True: look for spikes. False: everything under ``gradloc`` is off. None: only what is switched on by itself."""
    critic: str = "off"
    """Look for spikes of the critic's gradient, too, and what to do with them: ``off`` or an ``action.mode``."""
    dump_dir: str = "gradloc_events"
    """The folder for events; made absolute when the run starts."""
    budget: int = BUDGET
    """Largest number of forward/backward probes of the published search, ``search.strategy=bisect``."""
    trigger: TriggerConfig = field(default_factory=TriggerConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    action: ActionConfig = field(default_factory=ActionConfig)
    evidence: EvidenceConfig = field(default_factory=EvidenceConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    stabilize: StabilizeConfig = field(default_factory=StabilizeConfig)

    def __post_init__(self):
        is_switch = self.enable is None or isinstance(self.enable, bool)
        _require(is_switch, "gradloc.enable", "null, true or false", self.enable)
        if self.critic is False:  # YAML reads a bare off as a boolean
            object.__setattr__(self, "critic", "off")
        _require(self.critic in ("off", *ACTIONS), "gradloc.critic", f"one of off, {', '.join(ACTIONS)}", self.critic)
        _require_budget("gradloc.budget", self.budget)
        _require_folder("gradloc.dump_dir", self.dump_dir)

    @property
    def root(self) -> str:
        """The folder for events as an absolute path."""
        return os.path.abspath(os.path.expanduser(self.dump_dir))


def resolve(settings: GradLocConfig, actor: Any, default_dump_dir: str | None = None) -> GradLocConfig:
    """The settings that hold: those under ``gradloc``, and the published keys where these are given.

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
    checks = dict(zip(PUBLISHED, (_require_switch, _require_tau, _require_budget, _require_folder), strict=True))
    given = {name: actor.get(name) for name in PUBLISHED}
    given = {name: value for name, value in given.items() if value is not None}
    ours = {"enable": settings.enable, "trigger.tau": settings.trigger.tau, "budget": settings.budget}
    defaults = {"enable": None, "trigger.tau": None, "budget": BUDGET, "dump_dir": default_dump_dir}
    ours["dump_dir"] = settings.dump_dir if default_dump_dir is not None else None
    for name, value in given.items():
        checks[name](name, value)
        same = PUBLISHED[name]
        require(
            ours[same] in (defaults[same], value),
            f"{_KEY}.{name}",
            f"left out or the same as its other name gradloc.{same}={ours[same]}",
            value,
        )
    return replace(
        settings,
        enable=given.get("spike_detection") or settings.enable,
        dump_dir=given.get("bisect_dump_dir", settings.dump_dir),
        budget=given.get("bisect_budget_steps", settings.budget),
        trigger=replace(settings.trigger, tau=given.get("grad_norm_threshold", settings.trigger.tau)),
        stabilize=StabilizeConfig() if settings.enable is False else settings.stabilize,
        critic="off" if settings.enable is False else settings.critic,
    )


def settings_in(config: Any, to_dataclass: Callable[[Any], Any]) -> GradLocConfig:
    """The settings that hold, from the trainer's whole config.

    Args:
        config: verl's; one without the block, of another trainer, has all off.
        to_dataclass: verl's ``omega_conf_to_dataclass``.

    Raises:
        ValueError: one sentence, for a wrong value and for two names of one setting that differ.
    """
    from omegaconf import OmegaConf

    actor = config.actor_rollout_ref.actor
    block = actor.get("gradloc")
    if block is None:
        return GradLocConfig()
    run_folder = OmegaConf.select(config, "trainer.default_local_dir", default="outputs")
    return resolve(to_dataclass(block), actor, default_dump_dir=f"{run_folder}/gradloc")


def settle(actor: Any) -> GradLocConfig:
    """Make both names of every setting say the same from here on, in each process that builds the actor's config.

    Args:
        actor: verl's ``ActorConfig`` with the four published keys and ``gradloc``.

    Returns:
        The settings that hold.

    Raises:
        ValueError: as :func:`resolve`.
    """
    settings = resolve(actor.gradloc, actor)
    values = (bool(settings.enable), settings.trigger.tau, settings.budget, settings.dump_dir)
    for name, value in {**dict(zip(PUBLISHED, values, strict=True)), "gradloc": settings}.items():
        object.__setattr__(actor, name, value)  # verl freezes its configs
    return settings


def fix_dump_dir(config: Any, root: str) -> None:
    """Make the events' folder absolute before any worker gets the config: on another node it has another folder.

    Args:
        config: the trainer's whole config.
        root: of the settings that hold.
    """
    actor = config.actor_rollout_ref.actor
    if actor.get("gradloc") is not None:
        actor.gradloc.dump_dir = root
        if actor.get("bisect_dump_dir") is not None:
            actor.bisect_dump_dir = root


def _require_switch(key: str, value: Any) -> None:
    _require(isinstance(value, bool), key, "true or false", value)


def _require_tau(key: str, value: Any) -> None:
    expected = "null (adaptive) or a positive number (the published per-token threshold)"
    _require(value is None or (is_number(value) and value > 0), key, expected, value)


def _require_budget(key: str, value: Any) -> None:
    _require(is_int(value, 1), key, "an integer of at least 1", value)


def _require_folder(key: str, value: Any) -> None:
    _require(isinstance(value, str) and value.strip() != "", key, "the path of a folder", value)
