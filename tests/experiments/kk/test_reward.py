# SPDX-License-Identifier: Apache-2.0
"""The reward's four values, each for what it is for."""

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lab.experiments.kk import puzzle, wording
from lab.rewards import kk

PUZZLES = [one for n in range(2, 8) for one in puzzle.draw(4, n, random.Random(f"reward {n}"))]
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
TRUTH = {"solution_text_format": "(1) Zoey is a knight\n(2) Oliver is a knave", "statements": ""}
RIGHT = "<think>Zoey must be.</think><answer>(1) Zoey is a knight\n(2) Oliver is a knave</answer>"

any_puzzle = st.sampled_from(PUZZLES)
# No tags, and no header of another turn.
any_thoughts = st.text(st.characters(exclude_characters="<>:"), max_size=40)


def truth(one):
    return wording.to_row(0, one, "test")["reward_model"]["ground_truth"]


def score(text, ground_truth=TRUTH):
    found = kk.compute_score(text, ground_truth)
    assert found["acc"] + found["wrong_answer"] + found["format_error"] == 1.0
    return found["score"]


@given(one=any_puzzle, thoughts=any_thoughts)
def test_the_generated_solution_scores_full(one, thoughts):
    text = wording.response(thoughts, wording.answer(one))
    assert score(text, truth(one)) == 3.0


@given(one=any_puzzle, data=st.data())
def test_any_flipped_role_scores_the_answer_error(one, data):
    flipped = data.draw(st.sets(st.integers(0, len(one.names) - 1), min_size=1))
    lines = wording.answer(one).splitlines()
    swap = {"knight": "knave", "knave": "knight"}
    for i in flipped:
        *rest, role = lines[i].split()
        lines[i] = " ".join([*rest, swap[role]])
    assert score(wording.response("hm", "\n".join(lines)), truth(one)) == -0.5


@given(one=any_puzzle, data=st.data())
def test_a_person_left_out_or_named_twice_scores_the_unreadable_answer(one, data):
    lines = wording.answer(one).splitlines()
    i = data.draw(st.integers(0, len(lines) - 1))
    for answer in (lines[:i] + lines[i + 1 :], [*lines, lines[i]]):
        assert score(wording.response("hm", "\n".join(answer)), truth(one)) == -1.0


@given(one=any_puzzle, tag=st.sampled_from(TAGS), place=st.floats(0, 1), add=st.booleans())
def test_a_tag_missing_or_twice_scores_the_format_error(one, tag, place, add):
    text = wording.response("hm", wording.answer(one))
    at = int(place * len(text))
    broken = text[:at] + tag + text[at:] if add else text.replace(tag, "")
    # An insertion within a tag that makes no second one of it leaves one tag less.
    assume([broken.count(tag) for tag in TAGS] != [1, 1, 1, 1])
    assert score(broken, truth(one)) == -3.0


@pytest.mark.parametrize(
    "text, expected",
    [
        (RIGHT, 3.0),
        (f"Well. {RIGHT} There.", 3.0),
        (RIGHT.replace("knight", "KNIGHT"), 3.0),
        (RIGHT.replace("(1) ", "").replace("(2) ", "and "), 3.0),
        ("Assistant: " + RIGHT, 3.0),
        # The published function begins after such a header, and so has lost the first tag.
        (RIGHT.replace("must be", "must be. Assistant: yes"), -3.0),
        (RIGHT.replace("is a knave", "is  a\nknave"), 3.0),
        (RIGHT.replace("knave", "knight"), -0.5),
        (RIGHT.replace("is a knave", "is no knave"), -1.0),
        (RIGHT.replace("is a knave", "is a liar"), -1.0),
        (RIGHT.replace("Oliver", "Olivier"), -1.0),
        (RIGHT.replace("knave<", "knave or a knight<"), -1.0),
        ("<think></think><answer></answer>", -1.0),
        (RIGHT.replace("<answer>", "<Answer>"), -3.0),
        (RIGHT.removeprefix("<think>"), -3.0),
        ("</think>hm<think><answer>(1) Zoey is a knight\n(2) Oliver is a knave</answer>", -3.0),
        ("Zoey is a knight, and so on", -3.0),
        ("", -3.0),
    ],
)
def test_the_published_values(text, expected):
    assert score(text) == expected


def test_a_solution_without_people_is_refused():
    with pytest.raises(ValueError, match="lab.experiments.kk.generate --check"):
        kk.compute_score(RIGHT, {"solution_text_format": ""})


def test_verl_calls_it_by_names():
    given = {"data_source": "kk_logic2", "extra_info": None, "ground_truth": TRUTH}
    assert kk.score(solution_str=RIGHT, **given)["score"] == 3.0
    assert kk.score(solution_str="", **given)["format_error"] == 1.0
