# SPDX-License-Identifier: Apache-2.0
"""The plain arithmetic of ``verl.gradloc``'s rooms, imported from its source with no verl."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).resolve().parents[2] / "verl_overrides" / "verl" / "gradloc"


def load(name: str, room: str = "analysis") -> ModuleType:
    """``<room>.<name>`` under a package name of its own."""
    package = "gradloc_source"
    for part, folder in ((package, SOURCE), (f"{package}.{room}", SOURCE / room)):
        if part not in sys.modules:
            sys.modules[part] = _package(part, folder)
    return importlib.import_module(f"{package}.{room}.{name}")


def _package(name: str, folder: Path) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    return module


def metrics() -> ModuleType:
    return load("metrics")
