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
from tests.world import World

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
    with mock.patch.dict(os.environ, ENVIRONMENT):
        yield


def _world(size: int) -> Iterator[World]:
    with World(size, preloaded=PRELOADED, timeout_s=300) as world:
        yield world


@pytest.fixture(scope="session")
def engine_world(verl09: None) -> Iterator[World]:
    """Two ranks."""
    yield from _world(2)


@pytest.fixture(scope="session")
def four_engines(verl09: None) -> Iterator[World]:
    """Four ranks."""
    yield from _world(4)


@pytest.fixture(scope="session")
def model_dir(engine_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder, which is what verl 0.9 takes."""
    folder = tmp_path_factory.mktemp("model")
    engine_world.run(f"{HARNESS}.save_model", folder=str(folder))
    return folder


@pytest.fixture(scope="session")
def train(engine_world: World, model_dir: Path) -> Callable[..., list[Any]]:
    """``train(overrides, **kwargs)``: :func:`harness.train` on two ranks; each rank's answer.

    What verl alone leaves is computed once, unless ``is_again`` is given.
    """
    kept: dict[str, list[Any]] = {}

    def run(overrides: Iterable[str] = (), is_again: bool = False, **kwargs: Any) -> list[Any]:
        given = {"overrides": list(overrides), **kwargs}
        if is_again or not kwargs.get("stock") or repr(given) not in kept:
            kept[repr(given)] = engine_world.run(f"{HARNESS}.train", model_dir=str(model_dir), **given)
        return kept[repr(given)]

    return run
