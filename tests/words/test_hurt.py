# SPDX-License-Identifier: Apache-2.0
"""Whether a spike hurt is read off what came after it, and not said before that is there."""

import math
from functools import partial

import pytest

from gradloc.words.hurt import did_it_hurt
from tests import words

STEP = 40
event = partial(words.event, STEP)


LEVELS = {
    "norm": ("actor/grad_norm_max", 1.0),
    "reward": ("critic/score/mean", 0.6),
    "entropy": ("actor/entropy", 0.8),
    "kl": ("actor/kl_loss", 0.01),
}


def series(last: int = 60, **after: float):
    """Metrics that wobble around their level, and are multiplied by ``after`` from the step on, whose norm is 900."""
    known = {}
    for title, (name, level) in LEVELS.items():
        values = {step: level * (1 + 0.03 * math.sin(1.7 * step)) for step in range(1, last + 1)}
        known[name] = {step: of * after.get(title, 1.0) if step > STEP else of for step, of in values.items()}
    known["actor/grad_norm_max"][STEP] = 900.0
    return lambda name: [*known.get(name, {}).items()]


def test_what_went_on_as_before_did_not_hurt():
    found = did_it_hurt(event(), series())
    assert (found.answer, found.why) == ("no", "Norm, reward, entropy and KL went on as before.")
    assert [part.title for part in found.parts] == ["norm", "reward", "entropy", "KL"]
    assert dict(found.parts[0].points)[STEP] == 900.0


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({"reward": 0.03}, "The reward fell from 0.6"),
        ({"norm": 40.0}, "The norm rose from 1"),
        ({"entropy": 0.2}, "The entropy fell from 0.8"),
        ({"kl": 9.0}, "The KL rose from 0.01"),
    ],
)
def test_a_metric_that_is_off_afterwards_is_named_with_its_numbers(after, said):
    found = did_it_hurt(event(), series(**after))
    assert found.answer == "yes" and found.why.startswith(said)


@pytest.mark.parametrize("after", [{"reward": 1.5}, {"reward": 0.95}, {"norm": 2.0}, {"entropy": 0.7}])
def test_what_rose_as_it_should_or_moved_a_little_is_no_harm(after):
    assert did_it_hurt(event(), series(**after)).answer == "no"


def test_another_spike_nearby_does_not_decide():
    def spiky(name: str) -> list[tuple[int, float]]:
        return [(step, 800.0 if step in (42, 45) and name.endswith("max") else of) for step, of in series()(name)]

    assert did_it_hurt(event(), spiky).answer == "no"


def test_too_few_steps_are_not_judged():
    found = did_it_hurt(event(), series(last=STEP + 2))
    assert (found.answer, found.why) == ("not yet known", "2 steps since; 3 are needed.")
    assert did_it_hurt(event(), lambda name: []).answer == "not yet known"


def test_weights_that_are_not_finite_hurt_whatever_else_is_known():
    cause = {"label": "non_finite_weights", "reason": "2 parameters", "numbers": {}, "names": [], "places": []}
    found = did_it_hurt(event(culprits=[], cause=cause), series(last=STEP))
    assert found.answer == "yes" and "no later step" in found.why


@pytest.mark.parametrize("taken", ["skip", "abort"])
def test_a_step_that_was_not_taken_did_not_hurt_unless_something_did(taken):
    not_taken = event(action={"requested": taken, "taken": taken, "reason": ""})
    found = did_it_hurt(not_taken, series(last=STEP))
    assert (found.answer, found.why) == ("no", "The step was not taken.")
    assert did_it_hurt(not_taken, series(reward=0.03)).answer == "yes", "something did"
    broken = event(trigger={"grad_norm": "NaN"})
    assert did_it_hurt(broken, series(last=STEP)).why == "The step was not taken."


@pytest.mark.parametrize(
    ("metric", "before", "after", "answer"),
    [
        ("critic/score/mean", 1.0, 0.9, "no"),
        ("critic/score/mean", 1.0, 0.89, "yes"),
        ("critic/score/mean", -0.5, -0.54, "no"),  # by its difference, not as a multiple
        ("critic/score/mean", -0.5, -0.56, "yes"),
        ("actor/grad_norm", 1.0, 3.0, "no"),
        ("actor/grad_norm", 1.0, 3.1, "yes"),
        ("actor/entropy", 1.0, 0.5, "no"),
        ("actor/entropy", 1.0, 0.49, "yes"),
        ("actor/entropy", 1.0, 2.1, "yes"),
    ],
)
def test_each_metric_s_bound(metric, before, after, answer):
    values = [(step, before if step <= STEP else after) for step in range(1, 60)]
    assert did_it_hurt(event(), lambda name: values if name == metric else []).answer == answer


@pytest.mark.parametrize(
    ("values", "titles"), [([1.0] * 2, []), ([1.0] * 3, ["norm"]), ([0.0] * 9, []), ([0.0] * 8 + [1.0], ["norm"])]
)
def test_a_metric_that_was_hardly_known_before_or_always_zero_says_nothing(values, titles):
    known = [(STEP - len(values) + index, value) for index, value in enumerate([*values, 900.0, 1.0, 1.0, 1.0])]
    found = did_it_hurt(event(), lambda name: known if name == "actor/grad_norm" else [])
    assert [part.title for part in found.parts] == titles and (titles or "no metrics" in found.why)


def test_twenty_steps_before_and_ten_after_are_compared():
    values = [(step, 1.0 if STEP - 20 <= step <= STEP + 10 else 500.0) for step in range(1, 90)]
    (part,) = did_it_hurt(event(), lambda name: values if name == "actor/grad_norm" else []).parts
    assert {value for _, value in part.points} == {1.0} and len(part.points) == 31
