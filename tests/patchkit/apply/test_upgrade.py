# SPDX-License-Identifier: Apache-2.0
"""The real verl with the released 0.2.0 on it: upgraded in one step, and reversed to the exact base.

tests/data/ has that patch, compressed; many of its paths are others now.
"""

import hashlib
import lzma
import shutil
from pathlib import Path

import pytest

from tests.patchkit import world
from tests.patchkit.build.test_roundtrip import contents

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[3]
OLD = ROOT / "tests/data/gradloc-0.2.0.patch.xz"
GONE = "verl/gradloc/core/localizer.py"
SHA256 = "39edf2ee7739039cb8eb345ec1fec8c5eb906e4fcc1ca4c7bd7e85232fee1de2"


@pytest.fixture
def old_tree(capsys, base_tree, tmp_path) -> Path:
    """A copy of the base with 0.2.0 on it, put there by ``--patch-file``."""
    data = lzma.decompress(OLD.read_bytes())
    assert hashlib.sha256(data).hexdigest() == SHA256
    (tmp_path / "old.patch").write_bytes(data)
    root = Path(shutil.copytree(base_tree, tmp_path / "verl"))
    options = ("--repo", root, "--patch-file", tmp_path / "old.patch", "--patch-sha256", SHA256)
    assert world.run(capsys, ROOT / "patches", *options).code == 0
    assert (root / GONE).is_file()
    return root


@pytest.mark.parametrize("has_copy", [True, False])
def test_0_2_0_is_upgraded_in_one_step_and_then_reversed_to_the_exact_base(
    capsys, old_tree, base_tree, patched_tree, has_copy
):
    if not has_copy:
        shutil.rmtree(old_tree / ".gradloc-patch")
    world.run(capsys, ROOT / "patches", old_tree).expect(0, "upgraded from 0.2.0")
    assert contents(old_tree) == contents(patched_tree)
    assert not (old_tree / GONE).exists()
    assert world.run(capsys, ROOT / "patches", old_tree, "--reverse").code == 0
    assert world.picture(old_tree).keys() == world.picture(base_tree).keys()
    assert contents(old_tree) == contents(base_tree)


def test_0_2_0_is_reversed_without_its_copy(capsys, old_tree, base_tree):
    """By what is kept of it alone: the ids of its files, and its edits of verl's."""
    shutil.rmtree(old_tree / ".gradloc-patch")
    assert world.run(capsys, ROOT / "patches", old_tree, "--reverse").code == 0
    assert contents(old_tree) == contents(base_tree)
