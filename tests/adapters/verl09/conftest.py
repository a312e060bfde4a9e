# SPDX-License-Identifier: Apache-2.0
"""Worlds of ranks on an installed verl 0.9, which is an environment of its own: `scripts/test.sh verl09`."""

import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from experiments.verl09 import ENVIRONMENT
from tests.world import DEVICE, World

HARNESS = "tests.adapters.verl09.harness"
# Where it is installed, most of a rank's start is importing it.
PRELOADED = ("verl.workers.engine_workers", "verl.trainer.ppo.v1", "transfer_queue")


@pytest.fixture(scope="session", autouse=True)
def verl09() -> Iterator[None]:
    """Skips where another verl is installed, or none; else sets what a machine without an accelerator needs."""
    try:
        found = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if not found.startswith("0.9."):
        pytest.skip(f"verl 0.9 is needed and {found} is installed: run scripts/test.sh verl09")
    with mock.patch.dict(os.environ, ENVIRONMENT if DEVICE == "cpu" else {}):
        yield


@pytest.fixture(scope="session")
def world_settings(verl09: None) -> Callable[..., dict[str, Any]]:
    """The installed verl, with ours or without: without a flag it takes its own engine."""
    return lambda *_, **__: {"preloaded": PRELOADED, "timeout_s": 300}


@pytest.fixture(scope="session")
def model_dir(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder, which is what verl 0.9 takes."""
    folder = tmp_path_factory.mktemp("model")
    world.run(f"{HARNESS}.save_model", folder=str(folder))
    return folder


@pytest.fixture(scope="session")
def call(world: World, model_dir: Path) -> Callable[..., list[Any]]:
    """``call(name, overrides, ...)``: that function of the harness on two ranks; each rank's answer."""

    def run(name: str, overrides: Iterable[str] = (), **given: Any) -> list[Any]:
        return world.run(f"{HARNESS}.{name}", overrides=list(overrides), model_dir=str(model_dir), **given)

    return run


@pytest.fixture(scope="session")
def train(call: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """``train(overrides, ...)``: :func:`harness.train` on two ranks; what verl alone leaves is computed once."""
    kept: dict[str, list[Any]] = {}

    def run(overrides: Iterable[str] = (), **given: Any) -> list[Any]:
        key = repr((overrides, given))
        if not given.get("stock") or key not in kept:
            kept[key] = call("train", overrides, **given)
        return kept[key]

    return run
