# SPDX-License-Identifier: Apache-2.0
"""Short names for the arithmetic under test."""

import importlib
from types import ModuleType


def load(name: str, room: str = "analysis") -> ModuleType:
    """``gradloc.<room>.<name>``."""
    return importlib.import_module(f"gradloc.{room}.{name}")


def metrics() -> ModuleType:
    return load("metrics", "analysis.buckets")
