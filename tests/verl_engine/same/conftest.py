# SPDX-License-Identifier: Apache-2.0
"""The tests of verl 0.7's actor, run by the same code on verl 0.9's engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verl_engine.conftest import PRELOADED
from tests.world import World

HERE = Path(__file__).parent

NOT_HERE = {
    "a_mode_that_its_own_config_cannot_express": "verl 0.9's config can express it",
    "cause_of_its_kind[padding]": "verl 0.9's batches have no padding",
}
"""Part of a test's name, and why verl 0.9 has nothing to test there."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        for name, reason in NOT_HERE.items():
            if name in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def world(engine_world: World) -> World:
    """Two ranks on the installed verl."""
    return engine_world


@pytest.fixture(scope="session")
def unpatched_world(engine_world: World) -> World:
    """The same: without spike_detection they take verl's own engine."""
    return engine_world


@pytest.fixture(scope="session")
def four_ranks(four_engines: World) -> World:
    """Four ranks on the installed verl."""
    return four_engines


@pytest.fixture(scope="session")
def single(verl09: None) -> Iterator[World]:
    """One rank on the installed verl."""
    with World(1, preloaded=PRELOADED) as world:
        yield world


@pytest.fixture
def doomed(verl09: None) -> Iterator[World]:
    """Two ranks on the installed verl that a test may lose."""
    with World(2, preloaded=PRELOADED) as world:
        yield world
