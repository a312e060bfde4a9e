# SPDX-License-Identifier: Apache-2.0
"""Every test that docs/compatibility.md names is there, and every row has one, a refusal or its reason."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("adapters/verl07", "adapters/verl07/layouts", "adapters/verl09", "adapters/trl")
ROWS = [
    line.strip("|").split("|")
    for line in (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| ---")
]
NOT_TESTED = (
    "after each",
    "as without",
    "the same test",
    "not run",
    "there are none",
    "no GPU",
    "benchmarks.md",
    "move on to 0.9",
)


@functools.cache
def functions_of(room: str, module: str) -> set[str]:
    body = ast.parse((ROOT / "tests" / room / module).read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_what_the_rows_name_is_there():
    for cell in (cell for row in ROWS for cell in row):
        for module, name in re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", cell):
            rooms = [room for room in ROOMS if (ROOT / "tests" / room / module).exists()]
            assert rooms, module
            assert not name or any(name in functions_of(room, module) for room in rooms), f"{module}::{name}"
        for folder in re.findall(r"`tests/(\w+)/`", cell):
            assert (ROOT / "tests" / folder).is_dir()


def test_every_cell_of_layouts_and_features_is_tested_refused_or_has_its_reason():
    for name, *cells in (row for row in ROWS if len(row) in (2, 3) and row[0].strip()):
        if re.match(r"\s*(of )?\d", name):  # a count
            continue
        for cell in cells:
            is_tested = "test_" in cell or "tests/" in cell
            assert is_tested or "refused" in cell or any(why in cell for why in NOT_TESTED), (name, cell)
