# SPDX-License-Identifier: Apache-2.0
"""A step that spiked gets the action that was asked for, or a safer one where its limits forbid that."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradloc.config import ActionConfig
from gradloc.core.selection import Token
from gradloc.loop.actions import decide, decide_without_search
from gradloc.record import ACTIONS, Certificate
from gradloc.trigger import Spike

QUICK = settings(max_examples=100)
NORMS = st.floats(0, 100) | st.just(math.nan) | st.none()


def decided(
    limits, num_masked=1, verdict="explained", after=1.0, kind="fixed", num_tokens=1000, obstacle=None, healed_by=None,
    threshold=5.0,
):  # fmt: skip
    spike = Spike(kind, 90.0, threshold, 1.0, num_tokens)
    tokens = [Token(0, 0, number) for number in range(num_masked)]
    certificate = Certificate(90.0, after, 0.0, threshold, "swap", verdict, "for this")
    return decide(limits, spike, certificate, tokens, obstacle, healed_by)


@QUICK
@given(
    st.integers(0, 70), st.sampled_from(["explained", "undecided", "not_explained"]), NORMS, st.integers(0, 300),
    st.sampled_from(ACTIONS), st.sampled_from(["fixed", "adaptive", "non_finite", "forced"]),
)  # fmt: skip
def test_a_step_is_masked_only_where_that_helps_and_leaves_enough(num_masked, verdict, after, num_tokens, mode, kind):
    found = decided(ActionConfig(mode), num_masked, verdict, after, kind, num_tokens)
    assert found.requested == mode and found.reason
    if kind == "forced":
        assert found.taken == "observe", "a rehearsal changes nothing"
    elif mode == "heal":
        assert found.taken == "skip", "no setting was measured to heal it"
    elif mode != "mask":
        assert found.taken == mode
    else:
        helps = verdict == "explained" or (verdict == "undecided" and after is not None and after < 5.0)
        is_little = 0 < num_masked <= min(64, 0.05 * num_tokens)
        assert found.taken == ("mask" if helps and is_little else "skip")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"obstacle": "of this"}, "masking is not possible: of this"),
        ({"num_masked": 0}, "there is no token to mask: for this"),
        ({"verdict": "not_explained"}, "masking the culprits would not help: for this"),
        ({"verdict": "undecided", "after": 5.0}, "masking the culprits would not help: for this"),
        ({"verdict": "undecided", "after": 0.5, "threshold": None}, "masking the culprits would not help: for this"),
        ({"num_masked": 65, "num_tokens": 10**6}, "65 tokens would be masked, action.max_masked_tokens allows 64"),
        ({"num_masked": 6, "num_tokens": 100}, "6.0% of the tokens would be masked, action.max_masked_share allows"),
        ({"num_tokens": 0}, "100.0% of the tokens would be masked"),
    ],
)
def test_why_a_step_is_skipped_instead_is_said(changes, reason):
    found = decided(ActionConfig("mask"), **changes)
    assert found.taken == "skip" and found.reason.startswith(reason)


@pytest.mark.parametrize(
    ("changes", "taken", "reason"),
    [
        ({"healed_by": "a=1"}, "heal", "the step is taken under a=1"),
        ({"healed_by": "a=1", "num_masked": 0, "verdict": "not_explained"}, "heal", "the step is taken under a=1"),
        ({}, "skip", "no setting that was measured brings the norm under the threshold"),
        ({"healed_by": "a=1", "obstacle": "of this"}, "skip", "healing is not possible: of this"),
        ({"healed_by": "a=1", "kind": "forced"}, "observe", "a rehearsal: nothing spiked, so the step goes on"),
    ],
)
def test_a_step_is_healed_where_a_setting_was_measured_to(changes, taken, reason):
    found = decided(ActionConfig("heal"), **changes)
    assert (found.requested, found.taken) == ("heal", taken) and found.reason.startswith(reason)


def test_exactly_as_many_as_may_be_are_masked():
    assert decided(ActionConfig("mask"), num_masked=64, num_tokens=10**6).taken == "mask"
    assert decided(ActionConfig("mask"), num_masked=5, num_tokens=100).taken == "mask"
    assert decided(ActionConfig("mask"), verdict="undecided", after=4.9).taken == "mask", "its error is of no concern"


@pytest.mark.parametrize(("num_searches", "taken"), [(1, None), (2, "skip"), (3, "skip")])
def test_masking_searches_as_often_as_it_may(num_searches, taken):
    limits, spike = ActionConfig("mask", max_searches_per_step=2), Spike("fixed", 90.0, 5.0, 1.0, 1000)
    found = decide_without_search(limits, spike, num_searches)
    assert (found and found.taken) == taken
    if found is not None:
        assert found.requested == "mask" and "max_searches_per_step allows 2 searches" in found.reason
    assert decide_without_search(ActionConfig("mask"), spike, 1000) is None
    assert decide_without_search(ActionConfig("heal"), spike, 1000) is None
    for mode in ("observe", "skip", "abort"):
        assert decide_without_search(ActionConfig(mode), spike, num_searches).taken == mode
    rehearsal = decide_without_search(limits, Spike("forced", 1.0, None, None, 1000), 9)
    assert (rehearsal.requested, rehearsal.taken) == ("mask", "observe")
