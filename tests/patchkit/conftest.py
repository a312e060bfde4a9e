# SPDX-License-Identifier: Apache-2.0
"""A repository with a patch, and trees to put it on, all small."""

import os
from functools import partial

import pytest

from patchkit import apply as applier
from patchkit import build
from patchkit.refusal import Refusal
from tests.patchkit import world


@pytest.fixture(autouse=True)
def small_world(monkeypatch, request, tmp_path):
    """The small verl is where its repository keeps it, no test waits for a disk, and each refusal is complete."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    if "real_bases" not in request.fixturenames:
        monkeypatch.setattr(build, "ensure_base", lambda base: tmp_path / "repo/base" / f"verl-{base.tag[1:]}")
    made = Refusal.__init__

    def checked(self, reason, **data):
        made(self, reason, **data)
        assert self.what and not self.what.endswith(".") and self.cause and self.next
        assert "None" not in self.what + self.next

    monkeypatch.setattr(Refusal, "__init__", checked)


@pytest.fixture
def real_bases():
    """What the real repository starts from."""


@pytest.fixture
def repo(tmp_path):
    """A repository of ours whose patch leads from BASE to RESULT."""
    return world.make_repo(tmp_path / "repo")


@pytest.fixture
def tree(tmp_path):
    """An unpacked archive of the small verl."""
    return world.put(tmp_path / "verl-tree", world.BASE)


@pytest.fixture
def clone(tmp_path):
    """A clone of the small verl."""
    return world.make_clone(tmp_path / "clone")


@pytest.fixture
def apply(capsys, repo):
    """The applier's command line."""
    return partial(world.run, capsys, applier.main, "--patches", repo / "patches")


@pytest.fixture
def make(capsys, repo):
    """The builder's command line."""
    return partial(world.run, capsys, build.main, "--root", repo)
