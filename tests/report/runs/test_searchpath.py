# SPDX-License-Identifier: Apache-2.0
"""The flat path becomes the tree that the search walked."""

from dataclasses import replace

from gradloc.record import PathEntry, Search
from gradloc.report.runs.searchpath import LIMIT, cost, tree
from tests.report.builder import make_path


def outline(nodes):
    return [(node.label, outline(node.children)) for node in nodes]


def test_parts_stand_under_the_part_that_holds_them():
    roots, hidden = tree(Search(path=make_path()))
    assert hidden == 0
    assert outline(roots) == [
        ("micro-batch 0", []),
        (
            "micro-batch 2",
            [
                ("rank 0", []),
                ("rank 1", [("tokens 0 to 2", []), ("tokens 3 to 5", [("token 3", []), ("tokens 4 to 5", [])])]),
            ],
        ),
    ]


def test_a_norm_that_is_not_finite_is_over_its_threshold():
    first, *others = make_path()
    roots, _ = tree(Search(path=(replace(first, norm=float("nan")), *others)))
    assert [root.is_over for root in roots] == [True, True]


def test_a_long_path_is_cut_and_counted():
    roots, hidden = tree(Search(path=make_path()[:1] * (LIMIT + 5)))
    assert (len(roots), hidden) == (LIMIT, 5)


def test_a_path_of_an_unknown_phase_is_shown_by_its_name():
    assert outline(tree(Search(path=(PathEntry("closure", norm=1.0),)))[0]) == [("closure", [])]


def test_the_cost_is_said_in_words():
    found = Search(backwards=1, forwards=24, seconds=0.6557)
    assert cost(found) == "1 backward pass, 24 forward passes, 0.656 s"
