# SPDX-License-Identifier: Apache-2.0
"""Bounds of settings, and the one sentence that refuses a value beyond them."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import reduce, wraps
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T", bound=type)


def require(ok: bool, key: str, expected: str, found: Any) -> None:
    """Refuse a setting's value unless it is ok.

    Raises:
        ValueError: ``<key> must be <expected>, found <found>.``
    """
    if not ok:
        raise ValueError(f"{key} must be {expected}, found {found!r}.")


def is_number(value: Any) -> bool:
    """Return whether the value is a number; NaN, True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


@dataclass(frozen=True)
class Allowed:
    """A bound: which values a setting may have."""

    expected: str
    """How it reads after ``must be``."""
    holds: Callable[[Any], bool]
    words: tuple[str, ...] = ()
    """The allowed words, where only words are allowed."""

    def check(self, key: str, value: Any) -> None:
        """Refuse any other value by :func:`require`."""
        require(self.holds(value), key, self.expected, value)


SWITCH = Allowed("true or false", lambda value: isinstance(value, bool))
POSITIVE = Allowed("a positive number", lambda value: is_number(value) and value > 0)


def integer(least: int) -> Allowed:
    """Allow an integer from ``least`` on."""
    return Allowed(f"an integer of at least {least}", lambda value: type(value) is int and value >= least)


def number(expected: str, holds: Callable[[float], bool]) -> Allowed:
    """Allow a number for which ``holds`` is true, which ``expected`` describes."""
    return Allowed(expected, lambda value: is_number(value) and holds(value))


def one_of(*words: str) -> Allowed:
    """Allow these words; a bare ``on`` or ``off``, which YAML reads as a boolean, counts as the word."""
    return Allowed(f"one of {', '.join(words)}", lambda value: value in words, words)


def or_null(allowed: Allowed, expected: str = "") -> Allowed:
    """Allow null as well; ``expected`` replaces the sentence."""
    return Allowed(expected or f"null or {allowed.expected}", lambda value: value is None or allowed.holds(value))


def setting(default: Any, allowed: Allowed, key: str = "") -> Any:
    """Declare a field of a dataclass of settings, for :func:`check_fields`.

    Args:
        default: used by the code, Hydra's files and the docs.
        allowed: its bound.
        key: its full name, where it is one of the trainer's own settings.
    """
    return field(default=default, metadata={"allowed": allowed, "key": key})


def check_fields(settings: Any, prefix: str = "") -> None:
    """Check each :func:`setting` of a dataclass against its bound.

    Args:
        settings: frozen or not.
        prefix: what precedes a field's name in its full name; a key given in :func:`setting` has none.

    Raises:
        ValueError: one sentence.
    """
    for each in fields(settings):
        allowed, value = each.metadata.get("allowed"), getattr(settings, each.name)
        if allowed is None:
            continue
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) else ""
        if word in allowed.words:
            object.__setattr__(settings, each.name, word)
        else:
            allowed.check(each.metadata["key"] or f"{prefix}{each.name}", value)


def keys_by_field(settings: Any) -> dict[str, str]:
    """Return field -> full key of the fields that are among the trainer's own settings."""
    return {each.name: each.metadata["key"] for each in fields(settings) if each.metadata.get("key")}


def read_from_trainer(settings: type[S], config: Any) -> S:
    """Read settings that are among the trainer's own, and check them.

    Args:
        settings: a dataclass whose fields have keys.
        config: the trainer's whole config; a key that an older one lacks takes its default.

    Raises:
        ValueError: one sentence.
    """
    given = {}
    for name, key in keys_by_field(settings).items():
        *blocks, last = key.split(".")
        given[name] = reduce(getattr, blocks, config).get(last, getattr(settings, name))
    return settings(**given)


_SHOWN = 16
"""Most names that a refusal lists."""


def refuse_unknown(key: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names that the block of settings at ``key`` does not have.

    Raises:
        ValueError: one sentence that names the key and what was probably meant.
    """
    known = list(known)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
            hint = f"did you mean {key}.{close[0]}?" if close else f"there are {', '.join(known[:_SHOWN])}{more}."
            raise ValueError(f"unknown setting {key}.{name}: {hint}")


def checked(key: str) -> Callable[[T], T]:
    """Decorate a dataclass of settings, the block at ``key``: its ``__init__`` refuses unknown names and values beyond
    their bounds, and ends with the class's own ``check``, if there is one."""

    def decorate(cls: T) -> T:
        init, known = cls.__init__, [field.name for field in fields(cls)]

        @wraps(init)
        def init_and_check(self, *args: Any, **given: Any) -> None:
            refuse_unknown(key, given, known)
            init(self, *args, **given)
            check_fields(self, f"{key}.")
            if hasattr(self, "check"):
                self.check()

        cls.__init__ = init_and_check
        return cls

    return decorate
