# SPDX-License-Identifier: Apache-2.0
"""Which factor of a token's gradient is its cause, from its numbers alone."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradloc.explain.causes import APART, classify
from gradloc.explain.story import odd_number
from gradloc.record import BatchStatistics, Run, Sibling
from tests.explain import a_culprit

TOKEN = a_culprit(
    advantage=1.0, log_prob=-0.5, old_log_prob_used=-0.5, loss_weight=0.01, grad_norm=0.01, coefficient=-0.01
)
BATCH = BatchStatistics(advantage=1.0, one_minus_prob=0.4, jacobian=1.0)


def label(batch=BATCH, **changes):
    return classify(a_culprit(TOKEN, **changes), batch).label


def test_a_ratio_is_clamped_at_e_to_the_20_as_verl_clamps_it():
    found = classify(a_culprit(TOKEN, log_prob=-0.1, old_log_prob_used=-90.1), BATCH)
    assert found.label == "token_mismatch" and found.numbers["ratio_over_typical"] == pytest.approx(math.exp(20))


OFF = {"old_log_prob_used": -0.5 - math.log(4.0)}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        # the KL term: the larger part of the coefficient, the same way
        *(
            ({"coefficient": 0.1, "kl_coefficient": kl, "grad_norm": 0.1}, found)
            for kl, found in ((0.04, "unknown"), (0.06, "kl_term"), (-0.06, "unknown"))
        ),
        ({"coefficient": 9.1, "kl_coefficient": 9.0, "grad_norm": 9.1, "loss_weight": None}, "unknown"),
        # the entropy term: however it points
        *(({"entropy_coefficient": of}, found) for of, found in ((0.02, "unknown"), (-0.04, "entropy_term"))),
        ({"advantage": -4.0}, "extreme_advantage"),
        # the whole sequence, or the token alone
        *(({**OFF, "sequence_ratio": of}, "token_mismatch") for of in (1.5, None)),
        ({**OFF, "sequence_ratio": 3.0}, "sequence_mismatch"),
        # what is not finite first
        *(({"log_prob": of}, "non_finite_forward") for of in (math.nan, -math.inf)),
        *((of, "non_finite") for of in ({"advantage": math.inf}, {"coefficient": math.nan})),
        ({"grad_norm": math.nan}, "non_finite_backward"),
        *((of, "unknown") for of in ({"grad_norm": None}, {"coefficient": None})),
    ],
)
def test_a_factor_is_the_cause_where_it_makes_the_gradient(changes, found):
    assert label(**changes) == found


def test_terms_are_told_as_parts_of_the_coefficient():
    share = classify(a_culprit(TOKEN, coefficient=0.1, kl_coefficient=0.025, entropy_coefficient=-0.3), BATCH).numbers
    assert share["kl_share_of_coefficient"] == pytest.approx(0.25)
    assert share["entropy_over_log_prob"] == pytest.approx(3.0)


def test_a_large_jacobian_is_a_low_probability_s_as_far_as_that_predicts_it():
    unlikely, likely = ({"log_prob": value, "old_log_prob_used": value} for value in (math.log(0.2), math.log(0.8)))
    assert label(**unlikely, grad_norm=0.05) == "low_probability"
    assert label(**unlikely, grad_norm=0.07) == label(**likely, grad_norm=0.05) == "large_jacobian"
    spread = (replace(BATCH, layer_spread=of) for of in (11.0, 9.0))
    found = [label(batch, **unlikely, grad_norm=0.05) for batch in spread]
    assert found == ["layer_heterogeneity", "low_probability"]
    assert label(span="segment", grad_norm=9.0) == "unknown", "several tokens have no single one"


@pytest.mark.parametrize(
    ("advantage", "of_batch", "found"),
    [
        (-227.0, 523.0, "extreme_advantage"),  # less than what is typical of a batch in the reward's own unit
        (5.0, 523.0, "unknown"),
        (40.0, 9.0, "extreme_advantage"),  # beside a batch of another scale
    ],
)
def test_a_batch_whose_advantages_have_a_reward_s_unit_is_told_from_one_where_nothing_stands_out(
    advantage, of_batch, found
):
    made = classify(a_culprit(TOKEN, advantage=advantage), replace(BATCH, advantage=of_batch))
    assert made.label == found
    is_batch_s = found == "extreme_advantage" and of_batch > 10
    assert made.numbers.get("batch_advantage") == (of_batch if is_batch_s else None)
    told = odd_number(a_culprit(advantage=advantage, cause=made))
    assert (told == f"half of the batch's are over {of_batch:g}") == is_batch_s


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.floats(0.1, 100), st.floats(0.1, 100))
def test_the_factor_that_is_furthest_above_typical_is_the_cause(advantage, ratio, weight, jacobian):
    culprit = a_culprit(
        TOKEN,
        advantage=advantage,
        old_log_prob_used=-0.5 - math.log(ratio),
        is_weight=weight,
        grad_norm=0.01 * jacobian,
    )
    found = classify(culprit, BATCH)
    size = {"extreme_advantage": advantage, "token_mismatch": ratio, "is_weight": weight, "jacobian": jacobian}
    largest = max(size, key=size.__getitem__)
    if size[largest] < 3.0 * (1 - 1e-9):
        assert found.label == "unknown"
    elif sorted(size.values())[-2] < size[largest] * (1 - 1e-9) and size[largest] > 3.0 * (1 + 1e-9):
        assert found.label == largest or (
            largest == "jacobian" and found.label in ("large_jacobian", "low_probability")
        )


# ---- against the engine that wrote the token

SAMPLED = a_culprit(log_prob=-12.0, old_log_prob=-12.0, rollout_log_prob=-0.2, coefficient=1e-3)


def engine(row=(), **changes):
    return classify(a_culprit(SAMPLED, **changes), BatchStatistics(advantage=1.0), row)


AT_ONCE = {"rollout_log_prob": 0.0, "old_log_prob": 0.0}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, "not_sampled"),
        ({"rollout_log_prob": -9.0}, "unknown"),  # engines may differ by that
        ({"log_prob": -12.0 + 2 * APART}, "unknown"),  # the policy has moved
        ({"rollout_log_prob": -19.0}, "unknown"),  # that rarely it may be drawn,
        ({"rollout_log_prob": -21.0}, "not_sampled"),  # and that it is not
        ({"rollout_log_prob": -math.inf}, "not_sampled"),
        ({"rollout_log_prob": 0.0, "old_log_prob": -1.0, "log_prob": -1.0}, "unknown"),
        ({"rollout_log_prob": 0.0, "old_log_prob": -1.5, "log_prob": -1.0}, "not_sampled"),
        ({**AT_ONCE, "log_prob": -6.0}, "not_sampled"),
        ({**AT_ONCE, "log_prob": -4.0}, "unknown"),
        ({"log_prob": -1.0, "rollout_log_prob": 0.0}, "not_sampled"),  # which none writes, wherever the policy is now
        ({"old_log_prob": -0.2}, "unknown"),  # bypass: drift or gap
        *(({name: None}, "unknown") for name in ("old_log_prob", "rollout_log_prob", "log_prob")),
        ({"advantage": math.nan}, "non_finite"),
        ({"advantage": 9.0}, "extreme_advantage"),
    ],
)
def test_a_token_that_the_engine_cannot_have_drawn_was_never_sampled(changes, found):
    assert engine(**changes).label == found


def test_a_token_that_was_never_sampled_is_so_in_a_batch_of_large_advantages_too():
    made = classify(a_culprit(SAMPLED, advantage=200.0), BatchStatistics(advantage=100.0))
    assert made.label == "not_sampled" and "batch_advantage" not in made.numbers


def test_an_engine_that_is_a_twentieth_as_far_off_everywhere_may_have_sampled_it():
    gap = 11.8
    for usual, found in ((gap / 20 * 1.01, "unknown"), (gap / 20 * 0.99, "not_sampled")):
        row = [(-1.0, -1.0 - usual)] * 5
        made = engine(row)
        assert made.label == found and made.numbers["engine_gap_of_response"] == pytest.approx(usual)
        assert made.numbers["engine_gap"] == pytest.approx(gap) and made.numbers["drift"] == 0.0


@pytest.mark.parametrize("shift", [1, -1])
def test_one_pair_at_the_end_is_enough_where_all_others_agree(shift):
    now, engines = [-1.0] * 6 + [-9.0], [-1.0] * 5 + [-9.0, -3.0]
    row = list(zip(now, engines, strict=True))[::shift]
    assert engine(row).numbers["shift"] == shift


def test_a_token_that_both_agree_on_is_no_shift_s():
    now = [-0.5 if place % 3 else -4.0 for place in range(9)]
    row = list(zip(now[:-1], now[1:], strict=True))
    assert engine(row, rollout_log_prob=-12.5).label == "unknown"


# ---- against its group


def grouped(estimator="grpo", advantage=50.0, rewards=(1.0, 0.0, 0.0), rollouts=3, **run):
    siblings = tuple(Sibling(row, reward=reward, advantage=-1.0) for row, reward in enumerate(rewards[1:]))
    culprit = a_culprit(TOKEN, advantage=advantage, reward=rewards[0], siblings=siblings)
    return classify(culprit, BATCH, (), Run(estimator=estimator, rollouts=rollouts, **run)).numbers


def test_a_group_that_is_not_whole_has_no_spread_and_an_advantage_that_is_usual_no_group():
    assert grouped(rewards=(1.0, None, 2.0))["group_spread"] is None
    assert grouped(rewards=(1.0, math.nan, 2.0))["group_spread"] is None
    assert grouped(advantage=math.inf)["group_mean"] is None
    assert "group_size" not in grouped(advantage=1.0) and "group_size" not in grouped("gae")
    assert "group_size" not in grouped(rollouts=8, trainer="trl 1.0") and grouped(rollouts=8)["rollouts"] == 8
    assert grouped(rollouts=8, trainer="trl 1.0")["advantage_bound"] == pytest.approx(7 / 8**0.5)
    assert grouped(rollouts=None)["rollouts"] == 3
