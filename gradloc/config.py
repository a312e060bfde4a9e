# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The settings under ``actor_rollout_ref.actor.gradloc``, validated when the run starts.

The four published knobs (``spike_detection``, ``grad_norm_threshold``, ``bisect_budget_steps``,
``bisect_dump_dir``) live on the actor's own config and are not repeated here. The defaults below mirror
``verl/trainer/config/actor/actor.yaml``; a test holds the two and the documented table together.
"""

from dataclasses import dataclass, field
from typing import Any

from .checks import is_int, is_number, require
from .core.actions import ACTIONS
from .search.find import STRATEGIES
from .stabilize.config import StabilizeConfig

__all__ = ["TriggerConfig", "SearchConfig", "ActionConfig", "EvidenceConfig", "GradLocConfig", "check_knobs"]

_KEY = "actor_rollout_ref.actor"


def _require(ok: bool, key: str, expected: str, found: Any) -> None:
    require(ok, f"{_KEY}.{key}", expected, found)


@dataclass(frozen=True)
class TriggerConfig:
    """When a gradient norm counts as a spike.

    With ``grad_norm_threshold`` set, the published fixed rule decides and ``window``, ``warmup``, ``floor`` and
    ``cap`` are not used. A non-finite norm is always a spike.
    """

    window: int = 64
    """Trainer steps whose norms the adaptive rule learns from, for each mini-batch position apart."""
    warmup: int = 16
    """Trainer steps before the adaptive rule may fire."""
    floor: float = 4.0
    """No norm below this many times the recent level is a spike."""
    cap: float = 10.0
    """Every norm above this many times the recent level is a spike."""
    num_deviations: float | None = None
    """Not used any more; a run that sets it is told so."""
    cooldown_steps: int = 0
    """Trainer steps after an event in which nothing is localized."""
    max_events_per_step: int = 1
    """Spiking mini-batches localized within one trainer step."""
    max_events: int = 100
    """Events localized within one run; later spikes are only counted."""
    force_step: int | None = None
    """Rehearsal: localize at this global step even though nothing spikes there."""

    def __post_init__(self):
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
            self.num_deviations is None or (is_number(self.num_deviations) and self.num_deviations > 0),
            "gradloc.trigger.num_deviations",
            "null or a positive number",
            self.num_deviations,
        )
        _require(
            self.force_step is None or is_int(self.force_step, 1),
            "gradloc.trigger.force_step",
            "null or a global step of at least 1",
            self.force_step,
        )


@dataclass(frozen=True)
class SearchConfig:
    """How the culprits are looked for."""

    strategy: str = "auto"
    """``auto``; or one method alone: ``share``, ``sketch``, ``bisect`` (the published binary search)."""
    max_culprits: int = 8
    """Stop after this many culprits."""
    layer_window: int = 32
    """Optimizer steps whose norm per layer is remembered, to tell a layer that explodes alone; 0 for none."""

    def __post_init__(self):
        _require(
            is_int(self.layer_window, 0), "gradloc.search.layer_window", "an integer of at least 0", self.layer_window
        )
        names = ", ".join(STRATEGIES)
        _require(self.strategy in STRATEGIES, "gradloc.search.strategy", f"one of {names}", self.strategy)
        _require(
            is_int(self.max_culprits, 1), "gradloc.search.max_culprits", "an integer of at least 1", self.max_culprits
        )


@dataclass(frozen=True)
class ActionConfig:
    """What happens to the optimizer step that spiked."""

    mode: str = "observe"
    """``observe``: the step is unchanged. ``mask``: take the step without the culprits. ``skip``:
    take no step. ``abort``: take no step, write the event, stop the run."""
    max_masked_tokens: int = 64
    """Skip the step instead of masking more tokens than this."""
    max_masked_share: float = 0.05
    """Skip the step instead of masking more than this share of the mini-batch's tokens."""

    def __post_init__(self):
        _require(self.mode in ACTIONS, "gradloc.action.mode", f"one of {', '.join(ACTIONS)}", self.mode)
        most = self.max_masked_tokens
        _require(is_int(most, 1), "gradloc.action.max_masked_tokens", "an integer of at least 1", most)
        share = self.max_masked_share
        _require(is_number(share) and 0 < share <= 1, "gradloc.action.max_masked_share", "in (0, 1]", share)


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
        _require(
            is_number(self.max_gb) and self.max_gb >= 0, "gradloc.evidence.max_gb", "a number from 0 on", self.max_gb
        )
        _require(
            is_int(self.context_tokens, 0),
            "gradloc.evidence.context_tokens",
            "an integer of at least 0",
            self.context_tokens,
        )


@dataclass(frozen=True)
class GradLocConfig:
    """Everything under ``actor.gradloc``."""

    trigger: TriggerConfig = field(default_factory=TriggerConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    action: ActionConfig = field(default_factory=ActionConfig)
    evidence: EvidenceConfig = field(default_factory=EvidenceConfig)
    stabilize: StabilizeConfig = field(default_factory=StabilizeConfig)


def check_knobs(actor: Any) -> None:
    """Refuse a wrong value of a published knob.

    Args:
        actor: verl's ``ActorConfig`` with the four published knobs and ``gradloc``.

    Raises:
        ValueError: one sentence that names the key, what it must be and what was found.
    """
    _require(isinstance(actor.spike_detection, bool), "spike_detection", "true or false", actor.spike_detection)
    threshold = actor.grad_norm_threshold
    _require(
        threshold is None or (is_number(threshold) and threshold > 0),
        "grad_norm_threshold",
        "null (adaptive) or a positive number (the published per-token threshold)",
        threshold,
    )
    budget = actor.bisect_budget_steps
    _require(is_int(budget, 1), "bisect_budget_steps", "an integer of at least 1", budget)
    _require(
        isinstance(actor.bisect_dump_dir, str) and actor.bisect_dump_dir.strip() != "",
        "bisect_dump_dir",
        "the path of a folder",
        actor.bisect_dump_dir,
    )
