# SPDX-License-Identifier: Apache-2.0
"""The causes of single culprits, rule by rule: written out of what a culprit, its row and its group say."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradloc.record import BatchStatistics, Coefficients, Culprit, Event, Run, Sibling
from gradloc.words.causes import classify
from gradloc.words.meanings import group

SPURIOUS = Culprit(log_prob=math.log(0.001), entropy=0.2, advantage=1.0, coefficients=Coefficients(log_prob=-0.01))


@pytest.mark.parametrize(
    ("change", "label"),
    [
        ({}, "spurious_token"),
        ({"log_prob": math.log(0.011)}, "unknown"),
        ({"entropy": 0.31}, "unknown"),
        ({"entropy": None}, "unknown"),
        ({"advantage": -1.0}, "unknown"),
        ({"advantage": 4.0}, "extreme_advantage"),
        ({"is_weight": 4.0}, "is_weight"),
        ({"old_log_prob_used": math.log(0.0001)}, "token_mismatch"),
    ],
)
def test_a_spurious_token_is_unlikely_where_the_model_was_sure_and_rewarded(change, label):
    """STAPO's bounds (arXiv 2602.15620): a probability under 0.01, an entropy among the lowest fifth."""
    batch = BatchStatistics(advantage=1.0, one_minus_prob=0.5, jacobian=1.0, low_entropy=0.3)
    assert classify(replace(SPURIOUS, **change), batch).label == label
    assert classify(replace(SPURIOUS, **change), replace(batch, low_entropy=None)).label != "spurious_token"


WRITTEN = Culprit(
    log_prob=-12.0, old_log_prob_stored=-12.1, rollout_log_prob=-0.2, coefficients=Coefficients(log_prob=-0.01)
)
NEAR = [(-0.5 * place, -0.5 * place - 0.01) for place in range(9)]
FAR_OFF = [(now, written - 0.7) for now, written in NEAR]


@pytest.mark.parametrize(
    ("change", "row", "label"),
    [
        ({}, NEAR, "not_sampled"),
        ({}, [], "not_sampled"),
        ({}, FAR_OFF, "unknown"),  # an engine that is off everywhere
        ({"rollout_log_prob": -7.2}, NEAR, "unknown"),  # nor what engines differ by at one token
        ({"log_prob": -5.0}, NEAR, "unknown"),  # the policy has moved
        ({"log_prob": -1.0, "rollout_log_prob": 0.0}, NEAR, "not_sampled"),  # but none writes exactly 0
        ({"old_log_prob_stored": -0.01, "rollout_log_prob": 0.0}, NEAR, "unknown"),  # where the token was not certain
        ({"rollout_log_prob": -19.0}, NEAR, "unknown"),  # unlikely, and sampled
        ({"rollout_log_prob": -math.inf}, NEAR, "not_sampled"),
        ({"old_log_prob_stored": -0.2}, NEAR, "unknown"),  # bypass: drift or gap, nobody knows
        ({"old_log_prob_stored": 0.0, "rollout_log_prob": 0.0}, NEAR, "not_sampled"),
        ({"old_log_prob_stored": None}, NEAR, "unknown"),
        ({"rollout_log_prob": None}, [], "unknown"),
        ({"advantage": math.nan}, NEAR, "non_finite"),
        ({"advantage": 9.0}, NEAR, "extreme_advantage"),
    ],
)
def test_a_token_was_never_sampled_where_its_log_prob_is_none_that_sampling_gives(change, row, label):
    found = classify(replace(WRITTEN, **change), BatchStatistics(advantage=1.0), row)
    assert found.label == label
    if label == "not_sampled":
        assert abs(found.numbers["engine_gap"]) > 5


@pytest.mark.parametrize("shift", [1, 0, -1])
def test_a_row_is_shifted_where_the_neighbours_log_probs_are_by_far_nearer(shift):
    now = [math.log(0.1 + 0.8 * (place % 3 == 0)) for place in range(12)]
    row = list(zip(now, now[shift:] + now[:shift], strict=True))
    found = classify(replace(WRITTEN, old_log_prob_stored=-12.0, log_prob=-12.0), BatchStatistics(), row)
    assert (found.label, found.numbers.get("shift", 0)) == ("shifted_log_probs" if shift else "not_sampled", shift)


def in_group(advantage: float, others: tuple[float, ...], rewards: tuple[float, ...] | None = None, **run: Any) -> str:
    """What is said of a culprit with this advantage, among siblings with these, by 4 responses of GRPO."""
    made_by = Run(**{"trainer": "verl 0.9.1", "estimator": "grpo", "rollouts": 4, **run})
    own, *theirs = rewards or (1.0, *(0.25 * number for number, _ in enumerate(others)))
    siblings = tuple(Sibling(reward=reward, advantage=a) for reward, a in zip(theirs, others, strict=True))
    culprit = Culprit(advantage=advantage, reward=own, siblings=siblings, coefficients=Coefficients(log_prob=-0.01))
    cause = classify(culprit, BatchStatistics(advantage=0.1), (), made_by)
    return group(Event(run=made_by, culprits=(replace(culprit, cause=cause),)))


HALF = (-0.5, -0.5, -0.5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((1.5, HALF), ""),
        ((1.52, HALF), "GRPO gives at most 1.5 with 4 responses."),
        ((-9.0, HALF), "GRPO gives at most 1.5 with 4 responses."),
        ((math.nan, HALF), ""),
        ((1.4, (0.4, 0.9, 0.1)), "The advantages of its group have a mean of 0.7, not 0."),
        ((1.4, (-0.6, -0.4, -0.1)), ""),  # as weights on unlikely tokens leave it
        ((0.9, HALF, (0.3, 0.3, 0.3, 0.3)), "All rewards of its group are 0.3, and then its advantage is 0."),
        ((0.9, (-0.3, -0.3, -0.3), (0.3, 0.3, 0.3, 0.300001)), ""),
        ((1.0, ()), "Its prompt has no other response in the batch, though 4 are drawn"),
        ((9.0, HALF, (9.0, 1.0, 0.0, 0.0)), "GRPO gives at most 1.5 with 4 responses."),
    ],
)
def test_an_advantage_is_held_against_what_its_estimator_gives_for_its_group(given, said):
    found = in_group(*given)
    assert found.startswith(said) and bool(found) == bool(said)


@pytest.mark.parametrize(
    ("run", "advantage", "said"),
    [
        ({"estimator": "grpo_mean"}, 6.0, ""),
        ({"estimator": "grpo_mean"}, 6.1, "GRPO without the division gives at most 6 with 4 responses."),
        ({"estimator": "rloo"}, 8.0, ""),
        ({"estimator": "rloo"}, 8.1, "RLOO gives at most 8 with 4 responses."),
        ({"estimator": "gae"}, 1e4, ""),
        ({"estimator": None}, 1e4, ""),
        ({"rollouts": 8}, 2.4, ""),
        ({"rollouts": 8}, 2.6, "GRPO gives at most 2.47 with 8 responses."),
        ({"rollouts": 8, "trainer": "trl 1.16.0"}, 2.4, ""),
        ({"rollouts": 8, "trainer": "trl 1.16.0"}, 2.6, "GRPO gives at most 2.47 with 8 responses."),
    ],
)
def test_each_estimator_has_its_own_bound(run, advantage, said):
    others = (-advantage / 3,) * 3
    assert in_group(advantage, others, (8.0, 0.0, 0.0, 0.0), **run) == said


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_bounds_are_reached_by_the_reward_that_is_unlike_all_others(size):
    rewards = torch.zeros(size, dtype=torch.float64)
    rewards[0] = 8.0
    centred = rewards - rewards.mean()
    reached = {"grpo": centred / rewards.std(), "grpo_mean": centred, "rloo": centred * size / (size - 1)}
    for estimator, advantages in reached.items():
        for factor, is_said in ((1.0, False), (1.02, True)):
            first, *others = (factor * advantages).tolist()
            given = {"estimator": estimator, "rollouts": size}
            assert ("gives at most" in in_group(first, tuple(others), tuple(rewards.tolist()), **given)) == is_said


def test_a_group_of_which_a_step_has_a_part_is_not_judged():
    run = {"trainer": "trl 1.16.0", "rollouts": 8}
    assert in_group(1.4, (), (0.3,), **run) == in_group(1.4, (0.4, 0.9, 0.1), **run) == ""


def test_a_critics_culprit_is_explained_by_its_error_or_by_the_values_own_gradient():
    typical = BatchStatistics(value_error=0.5, jacobian=1.0)

    def cause(**changed):
        given = dict(value=0.1, value_target=0.4, grad_norm=1.0, coefficients=Coefficients(log_prob=1.0))
        return classify(Culprit(**{**given, **changed}), typical)

    assert cause().label == "unknown"
    far = cause(value_target=100.1)
    assert far.label == "value_outlier" and far.numbers["error_over_typical"] == pytest.approx(200)
    assert cause(grad_norm=50.0).label == "large_jacobian"
    assert cause(value=float("nan")).label == "non_finite_forward"
    assert cause(value_target=float("inf")).label == "non_finite"
