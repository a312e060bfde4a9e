# SPDX-License-Identifier: Apache-2.0
"""What a setting may be: the tests, and the one sentence that refuses what fails them."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, TypeVar

__all__ = [
    "SEARCHABLE",
    "WEIGHTS_ON_DEVICE",
    "Requirement",
    "check_requirements",
    "closed",
    "is_int",
    "is_number",
    "refuse_unknown",
    "require",
]

T = TypeVar("T", bound=type)


def require(ok: bool, key: str, expected: str, found: Any) -> None:
    """Refuse a setting unless it is as it must be.

    Args:
        ok: whether it is.
        key: the setting's full name.
        expected: what it must be, as it reads after ``must be``.
        found: its value.

    Raises:
        ValueError: one sentence that names the key, what it must be and what was found.
    """
    if not ok:
        raise ValueError(f"{key} must be {expected}, found {found!r}.")


def is_int(value: Any, least: int) -> bool:
    """Whether this is an integer of at least ``least``; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Whether this is a number; NaN, True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def refuse_unknown(key: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a name that a block of settings does not have.

    Args:
        key: the block's full name.
        given: names.
        known: all that there are.

    Raises:
        ValueError: one sentence that names the key and what was probably meant.
    """
    known = list(known)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {key}.{close[0]}?" if close else f"there are {', '.join(known)}."
            raise ValueError(f"{key}.{name} is no setting: {hint}")


def closed(key: str) -> Callable[[T], T]:
    """Decorate a dataclass of settings: a name that it does not have is refused by :func:`refuse_unknown`.

    Args:
        key: the block's full name.
    """

    def decorate(cls: T) -> T:
        init, known = cls.__init__, [field.name for field in fields(cls)]

        @wraps(init)
        def checked(self, *args: Any, **given: Any) -> None:
            refuse_unknown(key, given, known)
            init(self, *args, **given)

        cls.__init__ = checked
        return cls

    return decorate


@dataclass(frozen=True)
class Requirement:
    """What one setting of the run has to be for a feature."""

    key: str
    allowed: tuple[Any, ...]
    default: Any
    """Where the config does not have the key."""
    expected: str
    because: str
    only_with: str = ""
    """A switch, at the same prefix: where it is off, the setting may be anything."""


_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
WEIGHTS_ON_DEVICE = Requirement(
    f"{_ACTOR}.fsdp_config.offload_policy",
    (False, None),
    False,
    "false",
    "use param_offload and optimizer_offload instead",
)
SEARCHABLE = (
    WEIGHTS_ON_DEVICE,
    Requirement(
        f"{_MODEL}.enable_activation_offload",
        (False,),
        False,
        "false",
        "its handler counts a backward for every forward, and a search runs forwards alone",
    ),
    Requirement(
        f"{_MODEL}.fused_kernel_options.impl_backend",
        ("torch",),
        "torch",
        "torch",
        "no search was tested with the others, whose kernels are for GPUs",
        only_with=f"{_MODEL}.use_fused_kernels",
    ),
)
"""What a search needs on every verl."""


def check_requirements(feature: str, needs: Iterable[Requirement], config: Any, prefix: str = "") -> None:
    """Refuse a run in which a feature that is on could not work.

    Args:
        feature: the setting that switches it on, by its full name.
        needs: the feature's; those whose keys do not begin with ``prefix`` are left out.
        config: what stands at ``prefix``.
        prefix: ends with a dot; "" for the trainer's whole config.

    Raises:
        ValueError: one sentence that names the key, what it must be, what was found and which feature needs it.
    """
    for need in needs:
        if need.key.startswith(prefix) and (not need.only_with or _at(config, need.only_with, prefix)):
            found = _at(config, need.key, prefix)
            found = need.default if found is None else found
            require(found in need.allowed, need.key, f"{need.expected} while {feature} is on ({need.because})", found)


def _at(config: Any, key: str, prefix: str) -> Any:
    for name in key.removeprefix(prefix).split("."):
        config = getattr(config, name, None)
    return config
