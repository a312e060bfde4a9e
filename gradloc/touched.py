# SPDX-License-Identifier: Apache-2.0
"""What an adapter touches of another package: is it still as we know it; and something else in its place."""

import functools
import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def find(place: str) -> Any:
    """The thing at ``module:name``, the name dotted."""
    module, _, path = place.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def differences(touched: Mapping[str, str | None]) -> list[str]:
    """The places that changed, the start of a sentence each: see :func:`difference`."""
    return [said for place, expected in touched.items() if (said := difference(place, expected)) is not None]


def difference(place: str, expected: str | None) -> str | None:
    """How a thing differs from what is known of it, as a sentence's start; None where it does not.

    Args:
        place: as :func:`find` takes it.
        expected: a function's parameters, ``self, model``; None: the thing only has to be there.
    """
    try:
        found = find(place)
    except (ImportError, AttributeError):
        return f"{place} is gone"
    parameters = None if expected is None else ", ".join(inspect.signature(inspect.unwrap(found)).parameters)
    return None if parameters == expected else f"{place} takes ({parameters}), expected ({expected})"


@contextmanager
def replaced(owner: Any, **instead: Any) -> Iterator[None]:
    """Give an object, class or module other attributes for a while; what it had of its own comes back."""
    own = {name: vars(owner)[name] for name in instead if name in vars(owner)}
    for name, value in instead.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in instead:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)
