# SPDX-License-Identifier: Apache-2.0
"""A name says what a thing is: no two classes share one, and none begins with `of_`."""

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "gradloc"
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def test_no_class_has_the_name_of_another():
    names = [node.name for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    assert [name for name, count in Counter(names).items() if count > 1] == [] and len(names) > 200


def test_nothing_is_called_of_something():
    found = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            name = getattr(node, "name", None) or getattr(node, "id", None) or getattr(node, "arg", None)
            if isinstance(name, str) and name.lstrip("_").startswith("of_"):
                found.append(f"{path.relative_to(PACKAGE)}: {name}")
    assert found == []
