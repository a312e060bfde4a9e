# SPDX-License-Identifier: Apache-2.0
"""What an event says beyond its cause's name."""

import math

import pytest

from gradloc.explain.next_step import FACTS, Evidence
from tests.explain import event
from tests.report.builder import make_culprit

INF = math.inf


@pytest.mark.parametrize(
    ("log_probs", "drift", "do_differ"),
    [
        ((-1.0, -1.0, -5.0), 0.0, True),
        ((-1.0, -3.0, -5.0), 2.0, True),
        ((-1.0, -4.0, -5.0), 3.0, False),
        ((-1.0, -1.0, -1.1), 0.0, False),
        ((-1.0, None, -5.0), 0.0, False),
        ((-INF, -1.0, -5.0), 0.0, True),
        ((-1.0, -1.0, "-Infinity"), 0.0, False),
    ],
)
def test_engines_differ_where_they_did_before_the_update_and_by_more_than_the_policy_moved(log_probs, drift, do_differ):
    now, old, rollout = ("-Infinity" if value == -INF else value for value in log_probs)
    culprit = make_culprit(log_prob=now, old_log_prob_stored=old, rollout_log_prob=rollout)
    evidence = Evidence(event(culprits=[culprit]))
    assert (evidence.drift, evidence.do_engines_differ) == (drift, do_differ)
    assert FACTS["engines_differ"](evidence) == do_differ


@pytest.mark.parametrize(
    ("norm", "verdict", "is_judged"),
    [
        (747.66, "explained", True),
        (None, "explained", True),
        ("Infinity", "explained", False),
        (9.0, "undecided", False),
    ],
)
def test_a_certificate_judges_culprits_of_a_norm_that_is_finite_or_not_told(norm, verdict, is_judged):
    trigger = {"kind": "relative", "grad_norm": norm, "threshold": 52.26}
    made = event(trigger=trigger, certificate={"verdict": verdict})
    assert Evidence(made).is_judged("explained") == is_judged
    assert not Evidence(event(culprits=[], trigger=trigger)).is_judged("explained")


def test_the_pull_is_the_teacher_s_the_weight_or_the_advantage():
    assert Evidence(event()).as_text()["Pull"] == "Advantage (10,000)"
    culprit = make_culprit(teacher_log_prob=-0.25)
    told = Evidence(event(culprits=[culprit], batch={"teacher_gap": 0.1})).as_text()
    assert told["Pull"] == "The teacher's (-0.25)" and "teacher" in told["pull"]
    assert "teacher" not in Evidence(event()).as_text()["pull"]


@pytest.mark.parametrize(("advantage", "is_punished"), [(-0.5, True), (0.0, False), (0.5, False), (None, False)])
def test_a_token_is_punished_by_a_negative_advantage(advantage, is_punished):
    assert FACTS["punished"](Evidence(event(culprits=[make_culprit(advantage=advantage)]))) == is_punished
