# SPDX-License-Identifier: Apache-2.0
"""Actions against a spike, from the table ``actions.ini``, as config lines for the trainer that made the run.

Console, page, health and docs share them. A test composes every line with that verl's own config and checks that it
changes a setting that verl reads.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from configparser import ConfigParser, ExtendedInterpolation
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERLS = ("0.7", "0.9")
"""Versions of verl that the table has lines for."""
CHECKPOINT = "CHECKPOINTS/global_step_N"
"""Placeholder in a line where the run's own checkpoint is not known."""
_ACTOR, _ROLLOUT, _CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
_GRADLOC = f"{_ACTOR}.gradloc"
_OTHERS = ("0.9:", "trl:", "loop:")


Settings = Mapping[str, Any]
"""Values by a trainer's key: text as in a config, or blocks of settings."""


@dataclass(frozen=True)
class Option:
    """One way to take an action: the line to write, and its settings; none where the line is code."""

    line: str
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Advice:
    """One action, for every trainer."""

    do: str
    """A sentence."""
    cells: Mapping[str, "Settings | str"]
    """Settings by trainer: ``""`` for verl 0.7, and ``0.9``, ``trl`` and ``loop`` where theirs differ, or code."""
    is_of_rewards: bool = False
    """Whether it sets the loss on rewards, so that it does nothing where distillation is the whole loss."""

    def settings(self, verl: str) -> Settings:
        """Return the settings for a version in :data:`VERLS`; empty where it has none."""
        found = self.cells.get(verl, self.cells.get("", {}))
        return found if isinstance(found, Mapping) else {}

    def line(self, verl: str) -> str:
        """Return the settings as Hydra's overrides."""
        return _overrides(self.settings(verl))


def _overrides(settings: Settings) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


def read_table(name: str) -> dict[str, Mapping[str, str]]:
    """Read a table in this folder: its sections, without the shared texts of the default section."""
    parser = ConfigParser(interpolation=ExtendedInterpolation())
    parser.read_string((Path(__file__).parent / name).read_text(encoding="utf-8"), name)
    shared = parser.defaults()
    return {
        title: {key: value for key, value in rows.items() if key not in shared}
        for title, rows in parser.items()
        if title != parser.default_section
    }


def _action(row: str, is_of_rewards: bool) -> Advice:
    do, *cells = (cell.strip() for cell in row.split(" |"))
    named = (cell.partition(":") if cell.startswith(_OTHERS) else ("", "", cell) for cell in cells)
    return Advice(do, {trainer: _cell(cell.strip()) for trainer, _, cell in named}, is_of_rewards)


def _cell(text: str) -> Settings | str:
    words = text.split()
    if not all(re.fullmatch(r"[+\w.]+=\S+", word) for word in words):
        return text
    return dict(word.split("=", 1) for word in words)


ACTIONS = {
    name: _action(row, is_of_rewards=title == "of rewards")
    for title, rows in read_table("actions.ini").items()
    for name, row in rows.items()
}
"""The actions by name; the other tables refer to them by it."""


def verl_of(trainer: str | None) -> str | None:
    """Return the version in :data:`VERLS` of a record's trainer; None for another trainer.

    >>> [verl_of(trainer) for trainer in ("verl 0.9.1", "verl 0.10.0.dev0", "verl 0.7.0", "trl 1.16.0", None)]
    ['0.9', '0.9', '0.7', None, None]
    """
    version = re.match(r"verl (\d+)\.(\d+)", trainer or "")
    if not version:
        return None
    return "0.7" if (int(version[1]), int(version[2])) < (0, 8) else "0.9"


_BEYOND = {"longer": 2.0, "more_rollouts": 2.0, "smaller_steps": 0.5, "clip": 0.5, "clip_less": 2.0, "cooler": 0.8}
"""Actions that scale a setting of the run by this factor, where the table's value would not go beyond it."""
_ONE_WAY = ("warmer", "warm_up", "clip_higher")
"""Actions that are done where the run's own value is at least as high already."""


def options_of(name: str, trainer: str | None, own: Settings | None = None) -> dict[str, Option]:
    """Return the options to take an action on a record's trainer; empty where it has none or needs none.

    The one option has an empty name. Where the record does not say which verl made it, and the two differ, each has its
    version's name. ``own`` are the run's settings by verl's dotted names, as far as they are known.
    """
    action, verl = ACTIONS[name], verl_of(trainer)
    by_verl = {verl: _beyond(name, action.settings(verl), own or {}) for verl in VERLS}
    found: dict[str, Option | None] = {}
    if trainer == LOOP:
        found[""] = Option(code) if isinstance(code := action.cells.get("loop"), str) else _in_loop(by_verl["0.7"])
    elif is_trl(trainer):
        is_done = any(map(action.settings, VERLS)) and not any(by_verl.values())
        found[""] = None if is_done else _on_trl(action.cells.get("trl"), by_verl)
    elif not _is_other(trainer):
        same = verl or (VERLS[0] if by_verl["0.7"] == by_verl["0.9"] else None)
        named = {"": by_verl[same]} if same else {f"verl {verl}": by_verl[verl] for verl in reversed(VERLS)}
        found |= {label: Option(_overrides(made), made) for label, made in named.items() if made}
    return {label: option for label, option in found.items() if option is not None}


def lines_of(name: str, trainer: str | None, own: Settings | None = None) -> dict[str, str]:
    """Return the lines of an action's options, by the same names as :func:`options_of`."""
    return {label: option.line for label, option in options_of(name, trainer, own).items()}


def replay_line(bundle: str) -> str:
    """Return the command that replays an event's search; ``bundle`` is its folder, quoted for a shell."""
    return f"python -m gradloc.replay {bundle} --model MODEL_PATH"


def _beyond(name: str, settings: Settings, own: Settings) -> Settings:
    """Move the settings' values beyond the run's own; empty where the run has all of them already.

    >>> _beyond("longer", {"data.max_response_length": "4096"}, {"data.max_response_length": 4096})
    {'data.max_response_length': '8192'}
    """
    made, is_new = {}, False
    for key, wanted in settings.items():
        now: Any = own.get(key)
        factor, is_there = _BEYOND.get(name, 1.0), False
        if name in _BEYOND or name in _ONE_WAY:
            with suppress(TypeError, ValueError):
                is_there = (float(now) - float(wanted)) * (-1 if factor < 1 else 1) >= 0
        if is_there and name in _BEYOND:
            made[key], is_new = f"{float(now) * factor:.10g}", True
        else:
            made[key] = wanted
            is_new = is_new or not (is_there or str(now).lower() == wanted.lower())
    return made if is_new else {}


def in_verls_names(settings: Mapping[str, Any], trainer: str | None) -> dict[str, Any]:
    """Return a run's settings by verl's dotted names; of TRL's those that have one."""
    if not is_trl(trainer):
        return dict(settings)
    return {name: settings[own] for name, own in _IN_TRL.items() if own in settings}


def sampling_cut(settings: Mapping[str, Any], trainer: str | None) -> str:
    """Explain how a run's top_p, top_k or min_p biases importance ratios; empty where it samples without a cut."""
    prefix = "" if is_trl(trainer) else f"{_ROLLOUT}."
    if is_trl(trainer) and "num_generations" not in settings:
        return ""
    off = {"top_p": lambda value: value >= 1, "top_k": lambda value: value <= 0, "min_p": lambda value: value <= 0}
    on = []
    for name, is_off in off.items():
        value: Any = settings.get(f"{prefix}{name}")
        with suppress(TypeError, ValueError):
            on += [] if is_off(float(value)) else [f"{prefix}{name}={value}"]
    if not on:
        return ""
    return (
        f"The rollouts were sampled with {', '.join(on)}, which the trainer's softmax does not have: every ratio of "
        "trainer to rollout engine is off by the mass that was kept, and a sequence's by the product of its tokens'. "
        "Sample without the cut."
    )


def actions_of(
    names: Iterable[str], trainer: str | None = None, settings: Mapping[str, Any] | None = None
) -> list[tuple[str, str]]:
    """Return pairs of an action's sentence and its config line, without actions that the run has taken already.

    A sentence names the version of verl in brackets where lines differ. Lines are empty for a trainer that has none.
    """
    if _is_other(trainer):
        theirs = (name for name in names if not any(_GRADLOC in key for key in ACTIONS[name].settings("0.7")))
        return [(ACTIONS[name].do, "") for name in theirs]
    pairs = []
    for name in names:
        do = ACTIONS[name].do
        for version, line in lines_of(name, trainer, settings).items():
            pairs.append((f"{do[:-1]} ({version})." if version else do, line))
    return pairs


_OF_ROLLOUTS = frozenset(
    "keep_rollouts warmer cooler more_rollouts differing_groups longer shorter_prompts one_epoch eager log_probs veto "
    "veto_less drop_sequences truncate mean_weight by_sequence".split()
)


def supervised(names: Iterable[str]) -> list[str]:
    """Return the actions that a run without rollouts and rewards can take.

    >>> supervised(["localize", "keep_rollouts", "kl_mse", "clip"])
    ['localize', 'clip']
    """
    return [name for name in names if name not in _OF_ROLLOUTS and not ACTIONS[name].is_of_rewards]


def in_force(settings: Settings, actor: Mapping[str, Any]) -> bool:
    """Return whether a run's ``actor_rollout_ref.actor`` has all these settings; False where it is not known, or where
    there are none, as of a line of code."""
    return bool(settings) and all(_is_set(key, wanted, actor) for key, wanted in settings.items())


def _is_set(key: str, wanted: Any, actor: Mapping[str, Any]) -> bool:
    value: Any = actor if key.startswith(f"{_ACTOR}.") else None
    for name in key.removeprefix(f"{_ACTOR}.").split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    try:
        return math.isclose(float(value), float(wanted))
    except (TypeError, ValueError):
        return str(value).lower() == str(wanted).lower()  # on TRL GradLoc's settings are a dict


# ---- a loop's lines

LOOP = "loop"
"""Name in a record for a user's own training loop."""


def _is_other(trainer: str | None) -> bool:
    """Return whether the table has no lines for a trainer.

    >>> [_is_other(trainer) for trainer in ("mine 1.0", "verl 0.9.1", "trl 1.16.0", LOOP, None)]
    [True, False, False, False, False]
    """
    return bool(trainer) and trainer != LOOP and not (trainer or "").startswith(("verl", "trl"))


def _in_loop(settings: Settings) -> Option | None:
    """Return GradLoc's settings as arguments of ``gradloc.Watch``; None where one is the trainer's.

    >>> _in_loop({"actor_rollout_ref.actor.gradloc.search.max_steps": "8"}).line
    'Watch(..., search={"max_steps": 8})'
    """
    found = in_trl(settings) or {}
    if found.keys() != {"gradloc"} or any(key.endswith(".checkpoint") for key in settings):
        return None
    own = found["gradloc"]
    return Option(f"Watch(..., {_arguments({'action': own} if isinstance(own, str) else own)})")


# ---- TRL's settings

_IN_TRL = {
    f"{_ACTOR}.clip_ratio_low": "epsilon",
    f"{_ACTOR}.clip_ratio_high": "epsilon_high",
    f"{_ACTOR}.clip_ratio_c": "delta",
    f"{_ACTOR}.entropy_coeff": "entropy_coef",
    f"{_ACTOR}.grad_clip": "max_grad_norm",
    f"{_ACTOR}.kl_loss_coef": "beta",
    f"{_ACTOR}.optim.lr": "learning_rate",
    f"{_ACTOR}.optim.lr_warmup_steps": "warmup_steps",
    f"{_ACTOR}.ppo_epochs": "num_iterations",
    f"{_ROLLOUT}.n": "num_generations",
    f"{_ROLLOUT}.temperature": "temperature",
    f"{_CORRECTION}.rollout_is_threshold": "vllm_importance_sampling_clip_max",
    "data.max_response_length": "max_completion_length",
}
"""TRL's names of the same settings, with the same values."""
_BLOCKS_IN_TRL = ("action", "evidence", "search", "trigger")
"""Blocks of GradLoc's settings that TRL's trainers take; the stabilizers and the critic need verl."""


def is_trl(trainer: str | None) -> bool:
    """Return whether a record's trainer is TRL."""
    return (trainer or "").startswith("trl")


def _on_trl(cell: Settings | str | None, by_verl: Mapping[str, Settings]) -> Option | None:
    if isinstance(cell, str):
        return Option(cell)
    found = cell or in_trl(by_verl["0.7"]) or in_trl(by_verl["0.9"])
    return Option(_arguments(found), found) if found else None


def in_trl(settings: Settings) -> Settings | None:
    """Translate verl's settings to TRL's; None where TRL lacks one of them.

    >>> in_trl({"actor_rollout_ref.actor.grad_clip": "0.5"})
    {'max_grad_norm': '0.5'}
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        block, _, name = key.removeprefix(f"{_GRADLOC}.").partition(".")
        if key in _IN_TRL:
            found[_IN_TRL[key]] = value
        elif key.startswith(f"{_GRADLOC}.") and block in _BLOCKS_IN_TRL:
            found["gradloc"] = value if (block, name) == ("action", "mode") else {block: {name: value}}
        else:
            return None
    return found or None


def _arguments(settings: Settings) -> str:
    """Return settings as arguments of a Python call."""
    return ", ".join(f"{key}={_python(value)}" for key, value in settings.items())


def _python(value: Any) -> str:
    found = parsed(value) if isinstance(value, str) else value
    if isinstance(found, Mapping):
        return f"{{{', '.join(f'{json.dumps(key)}: {_python(item)}' for key, item in found.items())}}}"
    return json.dumps(found) if isinstance(found, str) else repr(found)


def parsed(value: str) -> Any:
    """Parse an override's value: a number, true, false or null, else its text."""
    try:
        return json.loads(value)
    except ValueError:
        return value
