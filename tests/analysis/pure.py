# SPDX-License-Identifier: Apache-2.0
"""The plain arithmetic of ``verl.gradloc.analysis``, imported from its source with no verl."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).resolve().parents[2] / "verl_overrides" / "verl" / "gradloc"


def load(name: str) -> ModuleType:
    """``analysis.<name>`` under a package name of its own."""
    package = "gradloc_source"
    if package not in sys.modules:
        sys.modules[package] = _package(package, SOURCE)
        sys.modules[f"{package}.analysis"] = _package(f"{package}.analysis", SOURCE / "analysis")
    return importlib.import_module(f"{package}.analysis.{name}")


def _package(name: str, folder: Path) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    return module


def metrics() -> ModuleType:
    return load("metrics")
