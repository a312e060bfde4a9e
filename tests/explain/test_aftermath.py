# SPDX-License-Identifier: Apache-2.0
"""Whether a spike hurt is read off what came after it, and not said before that is there."""

import math
from functools import partial

import pytest

from gradloc.explain.aftermath import impact_of
from tests import explain

STEP = 40
event = partial(explain.event, STEP)
LEVELS = {
    "norm": ("actor/grad_norm_max", 1.0),
    "reward": ("critic/score/mean", 0.6),
    "entropy": ("actor/entropy", 0.8),
    "KL": ("actor/kl_loss", 0.01),
}
BROKEN = {"label": "non_finite_weights", "reason": "2", "numbers": {}, "names": [], "places": []}
MASKED = {"trigger": {"grad_norm": "NaN"}, "action": {"requested": "mask", "taken": "mask", "reason": ""}}
NOT_TAKEN = [{"action": {"requested": taken, "taken": taken, "reason": ""}} for taken in ("skip", "abort")]


def series(last: int = 60, **after: float):
    """Metrics that wobble around their level, and are multiplied by ``after`` from the step on, whose norm is 900."""
    known = {}
    for title, (name, level) in LEVELS.items():
        values = {step: level * (1 + 0.03 * math.sin(1.7 * step)) for step in range(1, last + 1)}
        known[name] = {step: of * after.get(title, 1.0) if step > STEP else of for step, of in values.items()}
    known["actor/grad_norm_max"][STEP] = 900.0
    return lambda name: [*known.get(name, {}).items()]


def spiky(name: str) -> list[tuple[int, float]]:
    """Other spikes nearby."""
    return [(step, 800.0 if step in (42, 45) and name.endswith("max") else of) for step, of in series()(name)]


@pytest.mark.parametrize(
    ("found", "known", "answer", "worse"),
    [
        ({}, series(), "no", []),
        ({}, series(reward=0.03), "yes", ["reward"]),
        ({}, series(norm=40.0), "yes", ["norm"]),
        ({}, series(entropy=0.2, KL=9.0), "yes", ["entropy", "KL"]),
        *(
            ({}, series(**calm), "no", [])
            for calm in ({"reward": 1.5}, {"reward": 0.95}, {"norm": 2.0}, {"entropy": 0.7})
        ),
        ({}, spiky, "no", []),
        ({}, series(last=STEP + 2), "not yet known", []),
        ({}, lambda name: [], "not yet known", []),
        ({"culprits": [], "cause": BROKEN}, series(last=STEP), "yes", []),
        *((changes, series(last=STEP), "no", []) for changes in [*NOT_TAKEN, {"trigger": {"grad_norm": "NaN"}}]),
        *((changes, series(reward=0.03), "yes", ["reward"]) for changes in NOT_TAKEN),
        ({"trigger": {"grad_norm": "NaN"}, "consequence": {"is_taken": True}}, series(last=STEP), "yes", []),
        (MASKED, series(), "no", []),
        (MASKED, series(last=STEP + 2), "not yet known", []),
    ],
)
def test_what_came_after_says_whether_it_hurt(found, known, answer, worse):
    hurt = impact_of(event(**found), known)
    assert (hurt.answer, [part.title for part in hurt.parts if part.is_worse]) == (answer, worse)
    ways = {"norm": "rose", "KL": "rose", "reward": "fell", "entropy": "fell"}
    assert all(f"The {title} {ways[title]} from " in hurt.why for title in worse)
    assert hurt.why.endswith(".")


@pytest.mark.parametrize(
    ("metric", "before", "after", "answer"),
    [
        ("critic/score/mean", -0.5, -0.52, "no"),  # by its difference, not as a multiple
        ("critic/score/mean", -0.5, -0.7, "yes"),
        ("actor/entropy", 1.0, 3.0, "yes"),
    ],
)
def test_a_reward_below_0_and_an_entropy_that_rises_are_judged_too(metric, before, after, answer):
    values = [(step, before if step <= STEP else after) for step in range(1, 60)]
    assert impact_of(event(), lambda name: values if name == metric else []).answer == answer


@pytest.mark.parametrize(
    ("values", "titles"), [([1.0] * 2, []), ([1.0] * 3, ["norm"]), ([0.0] * 9, []), ([0.0] * 8 + [1.0], ["norm"])]
)
def test_a_metric_that_was_hardly_known_before_or_always_zero_says_nothing(values, titles):
    known = [(STEP - len(values) + index, value) for index, value in enumerate([*values, 900.0, 1.0, 1.0, 1.0])]
    found = impact_of(event(), lambda name: known if name == "actor/grad_norm" else [])
    assert [part.title for part in found.parts] == titles


def test_twenty_steps_before_and_ten_after_are_compared():
    values = [(step, 1.0 if STEP - 20 <= step <= STEP + 10 else 500.0) for step in range(1, 90)]
    (part,) = impact_of(event(), lambda name: values if name == "actor/grad_norm" else []).parts
    assert {value for _, value in part.points} == {1.0} and len(part.points) == 31


def test_before_enough_is_known_it_says_how_many_steps_there_are():
    assert impact_of(event(), series(last=STEP + 2)).why.startswith("2 steps since; ")
