# SPDX-License-Identifier: Apache-2.0
"""Worlds drawn from a seed: each kind of plant is drawn, and what is found is held against the truth."""

import pytest

from lab.benchmarks import worlds
from lab.benchmarks.worlds import PLANTS, PRECISIONS, markdown, measure, plan_of, world

ROW = {"precision": "bfloat16", "plant": "row", "micro_batches": 2, "cost": 10, "status": "found", "problems": []}


def test_a_seed_draws_the_same_world_again_and_seeds_draw_all_kinds():
    plans = [plan_of(seed) for seed in range(300)]
    assert plans == [plan_of(seed) for seed in range(300)]
    assert {(plan.precision, plan.plant) for plan in plans} == {(p, plant) for p in PRECISIONS for plant in PLANTS}
    assert {plan.precision for plan in map(lambda seed: plan_of(seed, "float16"), range(20))} == {"float16"}
    assert all(plan.rows % (plan.ranks * plan.micro_batches) == 0 for plan in plans)


def test_the_table_counts_what_is_right_and_what_it_costs():
    text = markdown([ROW, {**ROW, "cost": 20, "problems": ["names an innocent"]}, {**ROW, "status": "no spike"}])
    assert "| bfloat16 | 2 | 1 | 50.0% | 1 | 0 | 15.0 |" in text and "float32" not in text


def test_an_error_in_a_world_is_a_problem_and_ends_nothing(monkeypatch):
    monkeypatch.setattr(worlds, "world", lambda *given: 1 / 0)
    (problem,) = worlds.tried(1)["problems"]
    assert "ZeroDivisionError" in problem and world is not worlds.world


@pytest.mark.full
def test_a_world_of_each_kind_is_searched_as_its_truth_wants():
    kinds = dict.fromkeys(PLANTS)
    seeds = [next(s for s in range(1100, 3000) if plan_of(s).plant == k and plan_of(s).ranks == 1) for k in kinds]
    rows = measure(seeds)
    assert [(row["seed"], row["problems"]) for row in rows if row["problems"]] == []
    assert {row["plant"] for row in rows} == set(kinds)


@pytest.mark.slow
def test_worlds_that_failed_once_are_right():
    """Culprits that a loud one of another micro-batch hid, and a segment of a row that its loss pulled anyway."""
    rows = measure([594680264077, 740540015202, 614242241952], "float32")
    assert [(row["seed"], row["problems"]) for row in rows if row["problems"]] == []
