# SPDX-License-Identifier: Apache-2.0
"""A scenario's settings, which have verl 0.7's names, for trainers with other names."""

from collections.abc import Container, Iterable, Mapping
from typing import Any
from unittest import SkipTest

_PUBLISHED = {"grad_norm_threshold": "gradloc.trigger.tau", "bisect_budget_steps": "gradloc.budget"}


class Unsupported(SkipTest):
    """A scenario asks for what this trainer does not have: its case is skipped."""


def require(has_it: bool, why: str) -> None:
    """Skip the case of a scenario that asks for what this trainer does not have.

    Raises:
        Unsupported: with this reason.
    """
    if not has_it:
        raise Unsupported(why)


class Given(dict[str, Any]):
    """Settings by name, the actor's without its prefix. An adapter takes what its trainer has, and refuses the rest.

    Raises:
        Unsupported: from each method, with a setting that the trainer does not have.
    """

    def __init__(self, overrides: list[str]):
        pairs = (override.split("=", 1) for override in overrides if "=" in override)
        super().__init__({name.removeprefix("actor_rollout_ref.actor."): value_of(text) for name, text in pairs})
        for name in ("experts", "ppo_mini_batch_size"):  # which the harness sees to
            self.pop(name, None)

    def take_gradloc(self) -> dict[str, Any] | None:
        """Return GradLoc's blocks; None where it is off."""
        is_on, blocks = self.pop("spike_detection", False), {}
        for name in [each for each in self if each in _PUBLISHED or each.startswith("gradloc.")]:
            *path, key = _PUBLISHED.get(name, name).split(".")[1:]
            inner = blocks
            for block in path:
                inner = inner.setdefault(block, {})
            inner[key] = self.pop(name)
        return blocks if is_on else None

    def take(self, names: Mapping[str, str | tuple[str, Mapping[Any, Any]]]) -> dict[str, Any]:
        """Return the trainer's settings: of each name here the trainer's, and where values differ those."""
        found = {}
        for ours, theirs in names.items():
            if ours in self:
                value = self.pop(ours)
                name, values = (theirs, {value: value}) if isinstance(theirs, str) else theirs
                require(value in values, f"this trainer has no {ours}={value}")
                found[name] = values[value]
        return found

    def take_own(self, names: Container[str]) -> dict[str, Any]:
        """Return settings with these names, which are the trainer's own."""
        return {name: self.pop(name) for name in [*self] if name in names}

    def end(self, without_effect: Iterable[str] = ()) -> None:
        """Skip the case if settings are left, except those (or ``NAME=VALUE``) that this trainer does anyway."""
        left = sorted(name for name in self if not {name, f"{name}={self[name]}"} & {*without_effect})
        require(not left, f"this trainer has no {', '.join(left)}")


def value_of(text: str) -> Any:
    """Return the value of a word in YAML."""
    text = text.strip("\"'")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)
