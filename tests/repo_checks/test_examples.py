# SPDX-License-Identifier: Apache-2.0
"""What a docstring shows is what comes of it."""

import doctest
import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHOWING = [path.relative_to(ROOT) for path in sorted(ROOT.glob("gradloc/**/*.py")) if ">>> " in path.read_text("utf-8")]


def test_a_docstring_s_examples_hold():
    for path in SHOWING:
        found = doctest.testmod(importlib.import_module(".".join(path.with_suffix("").parts)))
        assert found.attempted and not found.failed, path
