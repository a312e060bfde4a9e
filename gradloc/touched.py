# SPDX-License-Identifier: Apache-2.0
"""Whether something of another package is still as we know it: what an adapter touches, it lists and asks about."""

import functools
import importlib
import inspect
from typing import Any


def find(place: str) -> Any:
    """The thing at ``module:name``, the name dotted."""
    module, _, path = place.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


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
