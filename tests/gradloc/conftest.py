# SPDX-License-Identifier: Apache-2.0
"""Worlds of gloo ranks, started once per session."""

import pytest

from tests.gradloc.world import World


def _world(size, tree):
    world = World(size, tree)
    yield world
    world.close()


@pytest.fixture(scope="session")
def world(patched_tree):
    """Two ranks on the patched tree."""
    yield from _world(2, patched_tree)


@pytest.fixture(scope="module")
def four_ranks(patched_tree):
    """Four ranks on the patched tree."""
    yield from _world(4, patched_tree)


@pytest.fixture(scope="session")
def single(patched_tree):
    """One rank on the patched tree."""
    yield from _world(1, patched_tree)


@pytest.fixture(scope="session")
def unpatched_world(base_tree):
    """Two ranks on verl as published."""
    yield from _world(2, base_tree)


@pytest.fixture
def dump_dir(tmp_path):
    return str(tmp_path / "gradloc")
