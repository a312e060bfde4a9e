# SPDX-License-Identifier: Apache-2.0
"""The localization core, and what of it was measured."""

import hashlib
import importlib
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).resolve().parents[1] / "gradloc"


def core(module: str) -> ModuleType:
    """A module of the package, e.g. ``core("search.find").localize``."""
    return importlib.import_module(f"gradloc.{module}")


def digest() -> str:
    """What was measured: sha256 over the sources of core and search."""
    found = hashlib.sha256()
    for path in sorted([*(SOURCE / "core").glob("*.py"), *(SOURCE / "search").glob("*.py")]):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()
