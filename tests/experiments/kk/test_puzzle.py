# SPDX-License-Identifier: Apache-2.0
"""Solutions, against what Python makes of the statements; what is drawn and said."""

import itertools
import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.experiments.errors import ExperimentError
from lab.experiments.kk import puzzle, wording

pytestmark = pytest.mark.full


def any_statement(num_people):
    leaf = st.tuples(st.sampled_from(puzzle.LEAVES), st.integers(0, num_people - 1))
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.tuples(st.just("not"), inner),
            st.tuples(st.sampled_from(puzzle.MANY + puzzle.BINARY), inner, inner),
            st.tuples(st.sampled_from(puzzle.MANY), inner, inner, inner),
        ),
        max_leaves=5,
    )


def any_claims():
    return st.integers(2, 5).flatmap(lambda n: st.tuples(*[any_statement(n)] * n))


def as_python(statement):
    """The statement as an expression of Python about `k`, who is a knight."""
    kind, *parts = statement
    if kind in puzzle.LEAVES:
        return f"k[{parts[0]}]" if kind == "telling-truth" else f"(not k[{parts[0]}])"
    sign = {"not": "not ", "->": " <= ", "<=>": " == "}.get(kind, f" {kind} ")
    said = [as_python(part) for part in parts]
    return f"({sign}{said[0]})" if kind == "not" else f"({sign.join(said)})"


@given(any_claims())
def test_the_solutions_are_exactly_the_consistent_assignments(said):
    claims = [as_python(statement) for statement in said]
    ways = itertools.product((True, False), repeat=len(said))
    assert puzzle.solutions(said) == [k for k in ways if [eval(claim, {"k": k}) for claim in claims] == list(k)]


@given(any_claims())
def test_statements_survive_being_written_and_read(said):
    assert puzzle.parse(repr(said)) == said


@pytest.mark.parametrize("num_people", range(2, 8))
def test_drawn_puzzles_have_one_solution_and_are_all_different(num_people):
    drawn = puzzle.draw(12, num_people, random.Random(num_people))
    assert len(set(drawn)) == 12
    for one in drawn:
        assert puzzle.solutions(one.said) == [one.solution]
        assert len(set(one.names)) == len(one.said) == num_people


def test_more_puzzles_than_there_are_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setattr(puzzle, "PATIENCE", 500)
    with pytest.raises(ExperimentError, match="only .* different puzzles of 2 people"):
        puzzle.draw(99, 2, random.Random(0), names=("Ava", "Zoey"), kinds=(puzzle.SIMPLE, "and"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no tuple",
        "()",
        "1",
        "(('lying', 2), ('lying', 0))",
        "(('lying', True), ('lying', 0))",
        "(('lying',), ('lying', 0))",
        "(('not', ('lying', 0), ('lying', 1)), ('lying', 0))",
        "(('->', ('lying', 0)), ('lying', 0))",
        "(('xor', ('lying', 0), ('lying', 1)), ('lying', 0))",
        "((), ('lying', 0))",
        "(([], 0), ('lying', 0))",
        "__import__('os')",
        "(" * 500,
        repr((("lying", 0),) * 17),
    ],
)
def test_what_is_no_statement_is_refused(text):
    with pytest.raises(ExperimentError):
        puzzle.parse(text)


@pytest.mark.parametrize(
    "statement, said",
    [
        (("telling-truth", 1), "Zoey is a knight"),
        (("not", ("lying", 1)), "Zoey is not a knave"),
        (("not", ("and", ("lying", 0), ("lying", 1))), "it is not the case that Ava is a knave"),
        (("->", ("lying", 0), ("lying", 1)), "if Ava is a knave then Zoey is a knave"),
        (("<=>", ("lying", 0), ("lying", 1)), "Ava is a knave if and only if Zoey is a knave"),
    ],
)
def test_a_statement_in_english(statement, said):
    assert puzzle.english(statement, ["Ava", "Zoey"]).startswith(said)


def test_the_published_prompt_and_answer_format():
    one = puzzle.draw(1, 3, random.Random(1))[0]
    row = wording.to_row(0, one, "train")
    system, user = row["prompt"]
    assert (system["role"], user["role"]) == ("system", "user")
    assert "(1) Zoey is a knight\n(2) ... </answer>" in system["content"]
    assert user["content"].startswith("A very special island is inhabited only by knights")
    assert user["content"].endswith("So who is a knight and who is a knave?")
    lines = wording.answer(one).splitlines()
    for i, (line, name, is_knight) in enumerate(zip(lines, one.names, one.solution, strict=True)):
        assert line == f"({i + 1}) {name} is a {'knight' if is_knight else 'knave'}"
    assert row["data_source"] == "kk_logic3"


def test_a_puzzle_of_seven_fits_the_published_prompt_length():
    for one in puzzle.draw(20, 7, random.Random(7)):
        text = wording.SYSTEM + wording.question(one)
        marks = sum(text.count(mark) for mark in string.punctuation)
        # Every word and every mark a token of its own is more than Qwen2.5 makes of them.
        assert len(text.split()) + marks < 400
