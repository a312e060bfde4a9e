# SPDX-License-Identifier: Apache-2.0
"""The private parts of other packages that adapters use: checks that they are unchanged, and replaces them for a
while.
"""

import ast
import functools
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def find(place: str) -> Any:
    """Return the thing at ``module:name``, the name dotted."""
    module, _, path = place.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def differences(touched: Mapping[str, str | None]) -> list[str]:
    """Return the places that changed, the start of a sentence each: see :func:`difference`."""
    return [said for place, expected in touched.items() if (said := difference(place, expected)) is not None]


def difference(place: str, expected: str | None) -> str | None:
    """Compare a private function or attribute with the expected one; return the start of a sentence, None if equal.

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


def digest(place: str) -> str:
    """Return a hash of a function's code without comments, docstring, decorators, signature and blank lines."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(find(place))))
    except (ImportError, AttributeError, OSError, TypeError):
        return "gone"
    statements: list[Any] = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    has_docstring = isinstance(statements[0], ast.Expr) and isinstance(statements[0].value, ast.Constant)
    first = statements[1 if has_docstring and len(statements) > 1 else 0]
    lines = [line.rstrip() for line in source.splitlines()[first.lineno - 1 :]]
    code = "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def extended(kind: type, mixin: type) -> type:
    """Return a subclass of ``kind`` with ``mixin`` in front, for an object's ``__class__``; ``kind`` where that
    is one.
    """
    return kind if issubclass(kind, mixin) else type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


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
