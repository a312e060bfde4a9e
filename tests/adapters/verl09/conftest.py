# SPDX-License-Identifier: Apache-2.0
"""Worlds of ranks on an installed verl 0.9, which is an environment of its own: `scripts/test.sh verl09`."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.trainers import TRAINER
from tests.world import World

HARNESS = "tests.adapters.verl09.harness"


@pytest.fixture(scope="session", autouse=True)
def verl09() -> None:
    """Skips where another verl is installed, or none."""
    if TRAINER != "verl 0.9":
        pytest.skip(f"verl 0.9 is needed and {TRAINER} is what there is: run scripts/test.sh verl09")


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
