# SPDX-License-Identifier: Apache-2.0
"""The trainer that this environment has, and the marks of tests that not every trainer runs by default.

tests/adapters/conformance, and what scripts/test.sh adds, run by the same code on each: on verl 0.7's actor, on
verl 0.9's engine (`scripts/test.sh verl09`), and on TRL's trainer under DDP (`scripts/test.sh trl`). A case that asks
for what a trainer does not have is skipped by the scenario, see tests/world/settings.py.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from lab.experiments.environment import DEFAULT_VERL
from tests.world import PRELOADED, trainer_folder

ROOT = Path(__file__).resolve().parent.parent
VERL07, VERL09, TRL = "verl 0.7", "verl 0.9", "TRL"
TRAINER = {"verl07": VERL07, "verl09": VERL09, "trl": TRL}.get(trainer_folder(), trainer_folder())
VERSION = version("verl") if TRAINER == VERL09 else DEFAULT_VERL
"""Of verl."""
INSTALLED = {
    TRL: ("trl", "gradloc.trl"),
    VERL09: ("verl.workers.engine_workers", "verl.trainer.ppo.v1", "transfer_queue"),
}
"""Where a trainer is installed, most of a rank's start is importing it."""
SETTINGS: dict[str, Any] = {
    "preloaded": (*PRELOADED, *INSTALLED.get(TRAINER, ())),
    "timeout_s": 300 if TRAINER == VERL09 else 120,
}
"""Of a world there: the installed one, with ours or without. Without a flag it takes its own classes."""

EVERY = None
NONE: tuple[str, ...] = ()


def not_on(trainer: str, reason: str, *cases: str) -> pytest.MarkDecorator:
    """Skip a test on this trainer: the cases with one of these parameters, or all."""
    return pytest.mark.not_on(trainer, reason, *cases)


def default_on(verl07: tuple[str, ...] | None = EVERY, verl09: tuple[str, ...] | None = EVERY) -> pytest.MarkDecorator:
    """Keep the cases whose ids begin with these among the default tests of each verl; the others are slow there.

    Between them the two have nearly each promise once. A test without this mark is a default test on both.
    """
    return pytest.mark.default_on(**{VERL07: verl07, VERL09: verl09})


def mark(items: list[pytest.Item]) -> None:
    """Turn the two marks above into pytest's own.

    Raises:
        pytest.UsageError: where a mark names a case that its test does not have.
    """
    unused: dict[str, set[str]] = {}
    for item in items:
        case = item.callspec.id if hasattr(item, "callspec") else ""
        excepted = [each.args for each in item.iter_markers("not_on")]
        found = item.get_closest_marker("default_on")
        beginnings = {} if found is None else found.kwargs
        named = {each for cases in beginnings.values() for each in cases or ()}
        named |= {each for _, _, *cases in excepted for each in cases}
        left = unused.setdefault(item.nodeid.partition("[")[0], named)
        left -= {each for each in named if _has(case, each)}
        for trainer, reason, *cases in excepted:
            if trainer == TRAINER and (not cases or any(_has(case, each) for each in cases)):
                item.add_marker(pytest.mark.skip(reason=reason))
        defaults = beginnings.get(TRAINER, EVERY)
        if defaults is not EVERY and not any(_begins(case, each) for each in defaults):
            item.add_marker(pytest.mark.slow)
    if items and not any("::" in argument for argument in items[0].config.args):
        for name, cases in unused.items():
            if cases:
                raise pytest.UsageError(f"{name} has no case of {sorted(cases)}")


def _begins(case: str, name: str) -> bool:
    """Return whether this is a case's first parameter, or several from the first on."""
    return f"{case}-".startswith(f"{name}-")


def _has(case: str, name: str) -> bool:
    """Return whether this is one of a case's parameters, or several in a row."""
    return f"-{name}-" in f"-{case}-"
