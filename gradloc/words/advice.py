# SPDX-License-Identifier: Apache-2.0
"""What people do about a spike, as config lines for the trainer that ran: the table ``actions.ini``, which console,
page, health and docs share.

A test composes every line with that verl's own config, and checks that it changes a setting that verl reads.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from configparser import ConfigParser, ExtendedInterpolation
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERLS = ("0.7", "0.9")
"""The verls that there are lines for."""
CHECKPOINT = "CHECKPOINTS/global_step_N"
"""In a line, where the run's own checkpoint is not known."""
_ACTOR, _ROLLOUT, _CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
_GRADLOC = f"{_ACTOR}.gradloc"
_OTHERS = ("0.9:", "trl:", "loop:")


@dataclass(frozen=True)
class Advice:
    """One thing to do."""

    do: str
    """A sentence."""
    lines: Mapping[str, str]
    """Hydra overrides for verl 0.7 by an empty name; others for ``0.9``, ``trl`` and ``loop`` where theirs differ."""
    is_of_rewards: bool = False
    """Whether it is a setting of the loss on rewards, which does nothing where distillation is the whole loss."""

    def line(self, verl: str) -> str:
        """The overrides for one of :data:`VERLS`; empty where it has none."""
        return self.lines.get(verl, self.lines.get("", ""))


def read_table(name: str) -> dict[str, Mapping[str, str]]:
    """The sections of a table beside this file, without the names that its texts share."""
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
    return Advice(do, {trainer: line.strip() for trainer, _, line in named}, is_of_rewards)


ACTIONS = {
    name: _action(row, is_of_rewards=title == "of rewards")
    for title, rows in read_table("actions.ini").items()
    for name, row in rows.items()
}
"""By a name of our own, which the other tables here use."""


def verl_of(trainer: str | None) -> str | None:
    """Which of :data:`VERLS` a record's trainer is.

    >>> [verl_of(trainer) for trainer in ("verl 0.9.1", "verl 0.10.0.dev0", "verl 0.7.0", "trl 1.16.0", None)]
    ['0.9', '0.9', '0.7', None, None]
    """
    version = re.match(r"verl (\d+)\.(\d+)", trainer or "")
    if not version:
        return None
    return "0.7" if (int(version[1]), int(version[2])) < (0, 8) else "0.9"


_BEYOND = {"longer": 2.0, "more_rollouts": 2.0, "smaller_steps": 0.5, "clip": 0.5, "clip_less": 2.0, "cooler": 0.8}
"""Actions that go on from what the run has: where the table's value is no further, so many times the run's own."""
_ONE_WAY = ("warmer", "warm_up", "clip_higher")
"""Those that are done where the run's own value is as high already."""


def lines_of(name: str, trainer: str | None, settings: Mapping[str, Any] | None = None) -> dict[str, str]:
    """An action's config line for the trainer that made the run; empty where it has none.

    Args:
        name: of the action.
        trainer: as a record names it.
        settings: the run's own, by verl's dotted names, as far as they are known.

    Returns:
        The line, by an empty name. Where the record does not say which verl made it and the lines differ, both, by
        their verls' names.
    """
    action = ACTIONS[name]
    lines = {verl: _from(name, action.line(verl), settings or {}) for verl in VERLS}
    verl = verl_of(trainer)
    if _is_other(trainer):
        line: str | None = ""
    elif trainer == LOOP:
        line = action.lines.get("loop") or _loop_setting(lines["0.7"])
    elif is_trl(trainer):
        is_done = any(map(action.line, VERLS)) and not any(lines.values())
        line = "" if is_done else action.lines.get("trl") or trl_settings(lines["0.7"]) or trl_settings(lines["0.9"])
    elif verl is not None or len(set(lines.values())) == 1:
        line = lines[verl or VERLS[0]]
    else:
        return {f"verl {verl}": lines[verl] for verl in reversed(VERLS) if lines[verl]}
    return {"": line} if line else {}


def replay_line(bundle: str) -> str:
    """The command that runs an event's search again on one machine, whatever trainer made the run; ``bundle`` is the
    event's folder, quoted for a shell."""
    return f"python -m gradloc.replay {bundle} --model MODEL_PATH"


def _from(name: str, line: str, settings: Mapping[str, Any]) -> str:
    """A line with a value beyond the run's own; empty where the run has all of it already.

    >>> _from("longer", "data.max_response_length=4096", {"data.max_response_length": 4096})
    'data.max_response_length=8192'
    """
    made, is_new = [], False
    for override in line.split():
        key, _, wanted = override.partition("=")
        own: Any = settings.get(key)
        factor, is_there = _BEYOND.get(name, 1.0), False
        if name in _BEYOND or name in _ONE_WAY:
            with suppress(TypeError, ValueError):
                is_there = (float(own) - float(wanted)) * (-1 if factor < 1 else 1) >= 0
        if is_there and name in _BEYOND:
            made.append(f"{key}={float(own) * factor:.10g}")
            is_new = True
        else:
            made.append(override)
            is_new = is_new or not (is_there or str(own).lower() == wanted.lower())
    return " ".join(made) if is_new else ""


def in_verls_names(settings: Mapping[str, Any], trainer: str | None) -> dict[str, Any]:
    """A run's settings by verl's dotted names, those of TRL that there are names for translated."""
    if not is_trl(trainer):
        return dict(settings)
    return {name: settings[own] for name, own in _IN_TRL.items() if own in settings}


def sampling_cut(settings: Mapping[str, Any], trainer: str | None) -> str:
    """What a cut of the sampling does to importance ratios, where a run's settings have one; else empty."""
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
    """Pairs of what to do and its config line; a verl that a line is for stands in brackets where that matters.

    For a trainer of which there are no lines they are empty. What the run has on already is left out.
    """
    if _is_other(trainer):
        return [(ACTIONS[name].do, "") for name in names if _GRADLOC not in ACTIONS[name].line("0.7")]
    pairs = [
        (ACTIONS[name].do, label, line) for name in names for label, line in lines_of(name, trainer, settings).items()
    ]
    return [(f"{do[:-1]} ({label})." if label else do, line) for do, label, line in pairs]


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


def in_force(line: str, actor: Mapping[str, Any]) -> bool:
    """Whether a run's ``actor_rollout_ref.actor`` has all settings of a line already; False where it is not known."""
    return all(_is_set(override, actor) for override in line.split())


def _is_set(override: str, actor: Mapping[str, Any]) -> bool:
    key, _, wanted = override.partition("=")
    value: Any = actor if key.startswith(f"{_ACTOR}.") else None
    for name in key.removeprefix(f"{_ACTOR}.").split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    try:
        return math.isclose(float(value), float(wanted))
    except (TypeError, ValueError):
        return str(value).lower() == wanted.lower()


# ---- a loop's lines

LOOP = "loop"
"""The trainer of a loop of one's own, in a record."""


def _is_other(trainer: str | None) -> bool:
    """Whether it is a trainer that there are no lines for.

    >>> [_is_other(trainer) for trainer in ("mine 1.0", "verl 0.9.1", "trl 1.16.0", LOOP, None)]
    [True, False, False, False, False]
    """
    return bool(trainer) and trainer != LOOP and not (trainer or "").startswith(("verl", "trl"))


def _loop_setting(line: str) -> str | None:
    """A setting of ours as ``gradloc.Watch`` takes it; None where it is the trainer's.

    >>> _loop_setting("actor_rollout_ref.actor.gradloc.search.max_steps=8")
    'Watch(..., search={"max_steps": 8})'
    """
    if ".checkpoint=" in line:
        return None
    return _own_setting(line, 'Watch(..., action="{value}")', 'Watch(..., {block}={{"{key}": {python}}})')


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
"""Blocks of our own settings that TRL's trainers take; the stabilizers and the critic are verl's."""


def is_trl(trainer: str | None) -> bool:
    """Whether a record's trainer is TRL."""
    return (trainer or "").startswith("trl")


def trl_settings(line: str) -> str | None:
    """verl's Hydra overrides as settings of TRL; None where it lacks one of them.

    >>> trl_settings("actor_rollout_ref.actor.grad_clip=0.5")
    'max_grad_norm=0.5'
    """
    settings = [_trl_setting(override) for override in line.split()]
    return ", ".join(map(str, settings)) if settings and None not in settings else None


def _trl_setting(override: str) -> str | None:
    name, _, value = override.partition("=")
    if name in _IN_TRL:
        return f"{_IN_TRL[name]}={_python(value)}"
    return _own_setting(override, 'gradloc="{value}"', 'gradloc={{"{block}": {{"{key}": {python}}}}}')


def _own_setting(override: str, mode: str, other: str) -> str | None:
    """A setting of ours in a trainer's form, that of ``action.mode`` in its own; None where it is the trainer's."""
    name, _, value = override.partition("=")
    block, _, key = name.removeprefix(f"{_GRADLOC}.").partition(".")
    if not name.startswith(f"{_GRADLOC}.") or block not in _BLOCKS_IN_TRL:
        return None
    form = mode if (block, key) == ("action", "mode") else other
    return form.format(block=block, key=key, value=value, python=_python(value))


def _python(value: str) -> str:
    found = parsed(value)
    return json.dumps(found) if isinstance(found, str) else repr(found)


def parsed(value: str) -> Any:
    """An override's value: a number, true, false or null, else its text."""
    try:
        return json.loads(value)
    except ValueError:
        return value
