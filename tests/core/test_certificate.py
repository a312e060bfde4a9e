# SPDX-License-Identifier: Apache-2.0
"""What a certificate says of the norm that is left, and what is done to the step by it."""

import math
from types import SimpleNamespace

import pytest

from gradloc.core import actions
from gradloc.core.certificate import Certificate, judge
from gradloc.core.selection import Token
from gradloc.core.trigger import Spike


@pytest.mark.parametrize(
    ("norm", "bound", "threshold", "verdict"),
    [
        (1.0, 0.0, 10.0, "explained"),
        (1.0, 4.4, 10.0, "explained"),
        (1.0, 4.6, 10.0, "undecided"),
        (19.0, 4.4, 10.0, "not_explained"),
        (19.0, 4.6, 10.0, "undecided"),
        (10.0, 0.0, 10.0, "undecided"),
        (math.nan, 0.0, 10.0, "not_explained"),
        (1.0, math.nan, 10.0, "undecided"),
        (1.0, 0.0, None, "undecided"),
    ],
)
def test_a_verdict_needs_a_bound_below_half_the_distance_to_the_threshold(norm, bound, threshold, verdict):
    assert judge(norm, bound, threshold)[0] == verdict


@pytest.mark.parametrize(("norm_after", "verdict"), [(3.0, "explained"), (math.inf, "not_explained")])
def test_what_was_not_finite_is_explained_by_being_finite_where_there_is_no_threshold_yet(norm_after, verdict):
    assert judge(norm_after, 0.1, None, was_finite=False)[0] == verdict


def decide(mode, verdict="explained", num_masked=1, kind="fixed", obstacle=None, norm_after=1.0):
    limits = SimpleNamespace(mode=mode, max_masked_tokens=8, max_masked_share=0.05)
    spike = Spike(kind, 9.0, 5.0, 1.0, 1000)
    certificate = Certificate(9.0, norm_after, 0.0, 5.0, "swap", verdict, "because")
    tokens = [Token(0, 0, index) for index in range(num_masked)]
    return actions.decide(limits, spike, certificate, tokens, obstacle).taken


def test_actions_are_taken_as_configured_or_fall_back_to_skip():
    assert decide("observe") == "observe"
    assert decide("skip") == "skip"
    assert decide("abort") == "abort"
    assert decide("mask") == "mask"
    assert decide("mask", verdict="not_explained", norm_after=6.0) == "skip"
    assert decide("mask", verdict="undecided", norm_after=5.1) == "skip"
    assert decide("mask", verdict="undecided", norm_after=4.9) == "mask"
    assert decide("mask", num_masked=9) == "skip"
    assert decide("mask", obstacle="overflow") == "skip"
    assert decide("abort", kind="forced") == "observe"
