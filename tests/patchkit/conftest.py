# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the applier's tests: a patches/ folder and a tree, both small."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from tests.patchkit import world

settings.register_profile("suite", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("suite")


@pytest.fixture(scope="session")
def patches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """patches/ from BASE to RESULT, with the edition 0.0.9 (OLDER) known. Read only."""
    return world.make_patches(tmp_path_factory.mktemp("world"), older=world.OLDER)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An unpacked archive of the small verl."""
    return world.write_tree(tmp_path / "verl-tree", world.BASE)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of the small verl."""
    return world.make_clone(tmp_path / "clone")


@pytest.fixture
def apply(capsys: pytest.CaptureFixture[str], patches: Path) -> Callable[..., world.Outcome]:
    """Runs the command line with the session's patches."""
    return lambda *arguments: world.run(capsys, patches, *arguments)
