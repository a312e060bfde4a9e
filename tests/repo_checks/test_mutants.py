# SPDX-License-Identifier: Apache-2.0
"""What `make mutants` changes, and that its record is kept and good enough."""

import ast
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "lab" / "benchmarks" / "results" / "mutants.json"

sys.path.append(str(ROOT / "scripts" / "mutants"))
from changes import mutants_of  # noqa: E402


def changed(source: str) -> list[str]:
    """The module after each change."""
    found = [mutant.applied(source.encode()).decode() for mutant in mutants_of("m.py", source.encode())]
    return [ast.unparse(ast.parse(text)) for text in found]


@pytest.mark.parametrize(
    ("source", "others"),
    [
        ("x = a < b", ["x = a <= b"]),
        ("x = a < b == c", ["x = a <= b == c", "x = a < b != c"]),
        ("x = a and b", ["x = a or b"]),
        ("x = a + b * c", ["x = a - b * c", "x = a + b / c"]),
        ("x = -a", ["x = a"]),
        ("x = 3, 0.5, True, 'text', None", [f"x = ({values}, 'text', None)" for values in (
            "4, 0.5, True", "3, 1.0, True", "3, 0.5, False")]),
        ("x = min(a)", ["x = max(a)"]),
        ("x.y = a", ["pass"]),
        ("x = zip(a, strict=True)", []),
        ("if a:\n    b()", ["if a:\n    pass", "if not a:\n    b()"]),
        ("def f(x: 3) -> 4:\n    'Text.'\n    assert x > 1\n    return x", [
            "def f(x: 3) -> 4:\n    'Text.'\n    assert x > 1\n    return None"]),
        ("x = f'{1}' + 'é' if not c else a", ["x = f'{1}' + 'é' if c else a"]),
    ],
)  # fmt: skip
def test_one_thing_is_changed_at_a_time(source, others):
    assert sorted(changed(source)) == sorted(ast.unparse(ast.parse(other)) for other in others)


def test_a_mutant_is_the_same_one_on_another_line():
    source = "def f(a):\n    return a > 1, a > 1\n"
    before, after = (mutants_of("m.py", text.encode()) for text in (source, f"# é\n{source}"))
    assert [mutant.name for mutant in before] == [mutant.name for mutant in after]
    assert len({mutant.name for mutant in before}) == 5 and after[0].line == before[0].line + 1


def test_the_record_adds_up():
    record = json.loads(RECORD.read_text())
    lived = [mutant for mutant in record["survivors"] if not mutant["equivalent"]]
    assert record["counted"] - record["killed"] == len(lived)
