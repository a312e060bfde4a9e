# SPDX-License-Identifier: Apache-2.0
"""A repository with a patch, and trees to put it on, all small."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from patchkit import apply as applier
from patchkit import build
from patchkit.refusal import Refusal
from tests.patchkit import world


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test can cut the power, so none waits for a disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(autouse=True)
def bases_that_lie_ready(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The small verl is where its repository keeps it; nothing is fetched."""
    if "real_bases" not in request.fixturenames:
        monkeypatch.setattr(build, "ensure_base", lambda base: tmp_path / "repo/base" / f"verl-{base.tag[1:]}")


@pytest.fixture(autouse=True)
def every_refusal_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused in a test says what, why and what to do."""
    made = Refusal.__init__

    def checked(self, code: int, reason: str, what: str, cause: str, next_: str, **data: object) -> None:
        made(self, code, reason, what, cause, next_, **data)
        assert reason and what and not what.endswith(".") and cause and next_

    monkeypatch.setattr(Refusal, "__init__", checked)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository of ours whose patch leads from BASE to RESULT."""
    return world.make_repo(tmp_path / "repo")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An unpacked archive of the small verl."""
    return world.write_tree(tmp_path / "verl-tree", world.BASE)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of the small verl."""
    return world.make_clone(tmp_path / "clone")


@pytest.fixture
def apply(capsys: pytest.CaptureFixture[str], repo: Path) -> Callable[..., world.Outcome]:
    """The applier's command line."""
    return partial(world.run, capsys, applier.main, "--patches", repo / "patches")


@pytest.fixture
def make(capsys: pytest.CaptureFixture[str], repo: Path) -> Callable[..., world.Outcome]:
    """The builder's command line."""
    return partial(world.run, capsys, build.main, "--root", repo)
