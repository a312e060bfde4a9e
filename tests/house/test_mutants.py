# SPDX-License-Identifier: Apache-2.0
"""What `make mutants` changes."""

import ast

import pytest

from scripts.mutants import mutants_of


def changed(source: str) -> list[str]:
    """The module after each change."""
    texts = [mutant.applied(source.encode()).decode() for mutant in mutants_of("m.py", source.encode())]
    return [ast.unparse(ast.parse(text)) for text in texts]


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
