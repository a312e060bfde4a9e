# SPDX-License-Identifier: Apache-2.0
"""The judge copes with what runs really log, and resumes where it stopped."""

import json
import random

import pytest

from gradloc.report.runs.health import HealthConfig, Judge
from tests.health.histories import TROUBLES, healthy, named, run, with_trouble

EMPTY = (None, float("nan"), float("inf"), "text", True, [1.0], {"a": 1})


@pytest.mark.parametrize("value", EMPTY, ids=repr)
def test_a_value_that_is_no_number_is_no_fault_but_the_non_finite_rules(value):
    for name in healthy(1):
        verdict = run([{**healthy(1), name: value}])[0]
        is_faulty = isinstance(value, float) and name in (
            "actor/grad_norm", "actor/grad_norm_max", "actor/pg_loss", "actor/kl_loss",
            "actor/entropy", "critic/score/mean", "critic/vf_loss",
        )  # fmt: skip
        assert named(verdict) == ({"non_finite": "warning"} if is_faulty else {}), name


def test_a_metric_may_be_missing_always_or_now_and_then():
    for name in healthy(1):
        for every in (1, 3):
            rows = [healthy(step) for step in range(1, 60)]
            for row in rows[::every]:
                del row[name]
            assert all(not verdict.reasons for verdict in run(rows)), name


def test_any_order_of_nonsense_is_judged_without_an_exception():
    draw = random.Random(0)
    values = [*EMPTY, 0.0, -1.0, 1e-300, 1e300, -1e300, 1, 10**400]
    judge, step = Judge(HealthConfig(warmup=2, window=8, recent=2, clip_window=2), 1.0), 0
    for _ in range(3000):
        step = max(step + draw.choice([-3, 0, 1, 1, 1, 7]), 0)
        judge.observe(step, {name: draw.choice(values) for name in healthy(1) if draw.random() < 0.8})
    json.dumps(judge.state(), allow_nan=False)


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda t: f"{t.rule}-{t.state}")
def test_a_resumed_judge_says_what_an_uninterrupted_one_does(trouble):
    rows = with_trouble(trouble, after=5)
    whole = run(rows)
    for cut in (3, 28, 32):
        judge, resumed = (Judge(HealthConfig(), 1.0) for _ in range(2))
        run(rows[:cut], judge=judge)
        resumed.load_state(json.loads(json.dumps(judge.state())))
        assert run(rows[cut:], judge=resumed, first=cut + 1) == whole[cut:]


def test_a_state_of_other_rules_is_taken_as_far_as_it_goes():
    few = Judge(HealthConfig(spikes=None, policy_kl=None), None)
    run([healthy(step) for step in range(1, 30)], judge=few)
    every = Judge(HealthConfig(), 1.0)
    every.load_state(few.state())
    assert named(every.observe(30, {**healthy(30), "actor/grad_norm_max": 200.0})) == {"gradient_jump": "danger"}


def test_steps_that_come_again_break_a_streak_and_keep_what_was_learned():
    still = {"actor/grad_norm": 0.0, "actor/grad_norm_max": 0.0, "actor/pg_loss": 0.0}
    judge = Judge(HealthConfig(), 1.0)
    run([healthy(step) for step in range(1, 31)], judge=judge)
    run([{**healthy(1), **still}] * 2, judge=judge, first=31)
    again = judge.observe(31, {**healthy(31), **still})
    assert named(again) == {"no_gradient": "warning"}  # the first in a row, not the third
    assert named(judge.observe(32, {**healthy(32), "actor/grad_norm_max": 200.0})) == {"gradient_jump": "danger"}


def test_memory_is_bounded():
    judge = Judge(HealthConfig(), 1.0)
    run([healthy(step) for step in range(1, 300)], judge=judge)
    size = len(json.dumps(judge.state()))
    run([healthy(step) for step in range(300, 900)], judge=judge, first=300)
    assert len(json.dumps(judge.state())) < 1.2 * size < 30_000
