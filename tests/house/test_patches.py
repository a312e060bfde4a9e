# SPDX-License-Identifier: Apache-2.0
"""A patch that one reads in five minutes: its limits."""

from pathlib import Path

import pytest

PATCHES = sorted((Path(__file__).resolve().parents[2] / "patches").glob("*.patch"))


def code_added(patch: Path) -> list[str]:
    """The lines that the patch adds to files of Python, without blank ones and comments."""
    found, is_python = [], False
    for line in patch.read_text(encoding="utf-8").splitlines():
        if line.startswith("+++ "):
            is_python = line.endswith(".py")
        elif line.startswith("+") and is_python and line[1:].strip() and not line[1:].lstrip().startswith("#"):
            found.append(line)
    return found


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_is_short_and_most_of_it_is_context(patch):
    assert len(patch.read_text(encoding="utf-8").splitlines()) <= 450
    assert 50 < len(code_added(patch)) < 150


def test_all_patches_together_are_short():
    assert len(PATCHES) == 2
    lines = [len(path.read_bytes().splitlines()) for path in PATCHES[0].parent.iterdir()]
    assert sum(lines) <= 1000
