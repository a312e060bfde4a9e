# SPDX-License-Identifier: Apache-2.0
"""The collection of spikes: each kind spikes where its fault is, and answers are scored as its truth says."""

import pytest

from lab.benchmarks.links import HEALTHY, Plan
from lab.benchmarks.spikes.collection import KINDS, Truth, spike_of
from lab.benchmarks.spikes.natural import NATURAL, first_spike
from lab.benchmarks.spikes.scoring import measure, measure_plan, score
from lab.benchmarks.spikes.tools import Answer

SMALL = Plan("gpt", 3, 32, 2, 1e-3, 0.01, 0.99, 2, 4)
TEN = ("token", "row", "group", "whole batch", "off-policy ratio", "stale rollouts", "not finite", "router")
TEN += ("one gradient", "head scale")
TOKEN = Truth(frozenset({"batch"}), frozenset({(1, 0)}), 7)


@pytest.mark.full
@pytest.mark.parametrize("kind", TEN)
def test_two_tools_answer_to_a_spike_of_each_kind(kind):
    found = measure_plan(kind, SMALL, ["GradLoc", "largest loss"])
    assert found["spike"] == HEALTHY
    assert all(answer["noticed"] for answer in found["answers"].values())
    assert not found["answers"]["GradLoc"]["innocent"] and found["answers"]["GradLoc"]["place"]


def test_every_kind_has_a_sentence():
    assert all(kind.__doc__ for kind in (*KINDS.values(), *NATURAL.values()))


@pytest.mark.slow
def test_a_natural_spike_is_judged_by_running_its_step_again():
    found = measure("sorted data", "gpt", 13, ["GradLoc", "largest loss"])
    assert found["spike"] == 61 and found["truth"]["links"] == ["batch"]
    assert found["truth"]["rows"] == [], "no half of the rows makes it"
    assert found["answers"]["GradLoc"]["place"] and found["answers"]["largest loss"]["link"]


def test_a_natural_spike_is_a_norm_far_over_those_of_the_steps_before():
    assert first_spike([1.0] * 47 + [9.0]) is None, "nothing is known of so young a run"
    assert first_spike([1.0] * 50 + [3.9, 4.0]) == 51
    assert first_spike([1.0] * 50 + [float("nan")]) == 50


@pytest.mark.parametrize(
    ("faulty", "healthy", "step"),
    [
        ([1.0] * 50, [1.0] * 50, None),
        ([1.0] * 48 + [5.0], [1.0] * 49, 48),
        ([1.0] * 48 + [float("nan")], [1.0] * 49, 48),
        ([1.0] * 48 + [5.0], [1.0] * 48 + [5.0], None),  # the batch's own
    ],
)
def test_a_spike_is_a_norm_that_the_run_without_the_fault_has_not(faulty, healthy, step):
    assert spike_of(faulty, healthy) == step


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(), (False, False, False, False)),
        (Answer(30, "batch"), (False, True, False, False)),  # before the fault
        (Answer(48, "batch", [(1, 0)], [(1, 0, 7)]), (True, True, True, False)),
        (Answer(48, "batch", [(1, 0), (0, 1)], [(1, 0, 7), (0, 1, 3)]), (True, True, True, True)),
        (Answer(48, "batch", [(1, 0), (0, 1)], [(1, 0, 7), (0, 1, 3)], num_accused=1), (True, True, True, False)),
        (Answer(48, "batch", [(1, 0)], [(1, 0, 8)]), (True, True, False, False)),
        (Answer(48, "weights", parameters=["head.weight"]), (True, False, False, False)),
        (Answer(60, "batch", [(1, 0)], [(1, 0, 7)]), (False, True, True, False)),  # named, where asked for
    ],
)
def test_an_answer_is_scored_against_the_truth(answer, expected):
    assert tuple(score(TOKEN, answer, 48).values()) == expected


def test_where_two_links_heal_a_spike_either_is_right():
    truth = Truth(frozenset({"batch", "last_update"}), frozenset({(0, 1)}), involved=frozenset({(0, 2)}))
    given = [Answer(50, "last_update"), Answer(50, "batch", [(0, 1), (0, 2)]), Answer(50, "batch", [(0, 3)])]
    found = [tuple(score(truth, answer, 50, 50).values()) for answer in given]
    assert found == [(True, True, True, False), (True, True, True, False), (True, True, False, True)]
