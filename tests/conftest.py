# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every room shares: the pristine pinned verl, and the same with our patch on it."""

import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from patchkit.applier import Applier  # noqa: E402
from patchkit.base import ensure_base  # noqa: E402
from patchkit.checkout import resolve  # noqa: E402
from patchkit.library import Library  # noqa: E402


@pytest.fixture(scope="session")
def base_tree() -> Path:
    """The pinned verl, unpacked: a folder with ``verl/`` in it. Read only: copy before editing."""
    return ensure_base()


@pytest.fixture(scope="session")
def patched_tree(base_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned verl with patches/gradloc.patch on it, put there by the applier. Read only.

    VERL_REPO names a patched checkout to test instead: the one that is being edited.
    """
    if os.environ.get("VERL_REPO"):
        return Path(os.environ["VERL_REPO"]).resolve()
    tree = tmp_path_factory.mktemp("patched") / base_tree.name
    shutil.copytree(base_tree, tree)
    Applier(resolve(str(tree)), Library(ROOT / "patches")).apply()
    return tree
