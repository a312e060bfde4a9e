# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the applier's tests: a patches/ folder and a tree, both small."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from patchkit.errors import PatchkitError
from tests.patchkit import world

settings.register_profile("suite", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test can cut the power, so none waits for a disk; what is synced when has its own test.

    Runs that are to be killed halfway wait a moment instead: it gives the kill time to land.
    """
    is_killed = "kills" in request.node.nodeid
    monkeypatch.setattr(os, "fsync", (lambda handle: time.sleep(0.0003)) if is_killed else (lambda handle: None))


@pytest.fixture(autouse=True)
def every_refusal_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused in a test says what, why and what to do."""
    made = PatchkitError.__init__

    def checked(self: PatchkitError, reason: str, what: str, cause: str, next_: str, **data: object) -> None:
        made(self, reason, what, cause, next_, **data)
        assert what and not what.endswith("."), "a line of its own, not a sentence in a row"
        for text in (cause, next_):
            assert text and text.strip() == text and "reinstall" not in text
        assert self.text().startswith(f"refused: {what}\n") and f"\n  cause:    {cause}\n" in self.text()

    monkeypatch.setattr(PatchkitError, "__init__", checked)


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
