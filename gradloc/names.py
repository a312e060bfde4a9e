# SPDX-License-Identifier: Apache-2.0
"""Refusals of mistyped settings, in one sentence that says what was probably meant.

GradLoc's own blocks check their names themselves (:func:`~.checks.checked`). This module checks GradLoc's names among
verl's, and the command line before Hydra does, whose error would not name the setting that was meant.
"""

import difflib
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any

from .analysis.config import BucketSettings, QuartileSettings
from .checks import keys_by_field, refuse_unknown
from .config import PUBLISHED, GradLocConfig
from .health.config import HealthConfig
from .notify.config import WEBHOOK_IS_NO_URL
from .rollout_filter.config import FilterSettings

_ACTOR = "actor_rollout_ref.actor"
_PRESET = "gradloc"
"""The group of Hydra's whose choice switches GradLoc on."""


def _names_in(block: str, settings: Any) -> dict[str, list[str]]:
    """Return the names in a block of settings and in the blocks within, by block."""
    found = {block: [each.name for each in fields(settings)]}
    for each in fields(settings):
        if is_dataclass(each.default_factory):
            found |= _names_in(f"{block}.{each.name}", each.default_factory)
    return found


_BLOCKS = {f"{_ACTOR}.gradloc": GradLocConfig, "trainer.health": HealthConfig}
_NAMES = {name: names for block, settings in _BLOCKS.items() for name, names in _names_in(block, settings).items()}
_SINGLE = [
    key for settings in (BucketSettings, QuartileSettings, FilterSettings) for key in keys_by_field(settings).values()
]
OURS = (*_BLOCKS, *_SINGLE, *(f"{_ACTOR}.{name}" for name in PUBLISHED))
"""GradLoc's names among verl's."""
_CLOSE_RATIO = 0.8
"""difflib's similarity from which a name is a mistyped one."""


def refuse_unknown_overrides(arguments: Sequence[str] | None = None) -> None:
    """End the program where an override on the command line mistypes one of GradLoc's names.

    Raises:
        SystemExit: with one sentence.
    """
    for argument in sys.argv[1:] if arguments is None else arguments:
        if argument.startswith("-"):
            continue
        key, _, value = argument.partition("=")
        key = key.lstrip("+~").partition("@")[0]
        if key == f"{_ACTOR}.gradloc.notify.webhook" and "://" in value:
            raise SystemExit(WEBHOOK_IS_NO_URL)  # before Hydra writes its overrides to a file
        if key != _PRESET and "." not in key and difflib.get_close_matches(key, [_PRESET], 1, _CLOSE_RATIO):
            # Hydra would add a setting of that name, and train without GradLoc
            raise SystemExit(f"unknown setting {key}: did you mean +{_PRESET}={value}?")
        try:
            _check(key)
        except ValueError as error:
            raise SystemExit(str(error)) from None


def refuse_unknown_names(config: Any) -> None:
    """Refuse a name among verl's settings in the whole config that is nearly one of GradLoc's.

    Raises:
        ValueError: one sentence.
    """
    for parent in {key.rpartition(".")[0] for key in OURS}:
        for name in reduce(lambda block, name: block.get(name) or {}, parent.split("."), config):
            _check(f"{parent}.{name}")


def _check(key: str) -> None:
    names = key.split(".")
    for depth in range(1, len(names)):
        parent, name = ".".join(names[:depth]), names[depth]
        if parent in _NAMES and name != "_target_":  # Hydra's own
            refuse_unknown(parent, [name], _NAMES[parent])
        ours = [known.rpartition(".")[2] for known in OURS if known.rpartition(".")[0] == parent]
        close = difflib.get_close_matches(name, ours, n=1, cutoff=_CLOSE_RATIO)
        if close and name not in ours:
            raise ValueError(f"unknown setting {parent}.{name}: did you mean {parent}.{close[0]}?")
