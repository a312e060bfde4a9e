# SPDX-License-Identifier: Apache-2.0
"""What an event tells of the settings that were tried."""

import re

from gradloc.explain.advice import ACTIONS
from gradloc.explain.cures import cures_for, healer, how_healed, tried
from gradloc.explain.next_step import next_step
from tests.explain import event

FORWARDS = {"forwards": 4, "backwards": 4}
HEALED = {"name": "clip_ratios", "verdict": "healed", "norm_after": 3.041, "changed_tokens": 0.25, **FORWARDS}
OTHERS = [
    ({"name": "gspo", "verdict": "no_change"}, []),
    ({"name": "gspo", "verdict": "undecided", "norm_after": 52.0, "error_bound": 0.5, **FORWARDS}, ["52", "0.5"]),
    ({"name": "gspo", "verdict": "not_healed", "norm_after": 99.0, **FORWARDS}, ["99"]),
    ({"name": "gspo", "verdict": "not_healed", "norm_after": 99.0}, ["99", "at least"]),
]


def test_each_setting_that_does_not_heal_is_told_apart_and_the_first_that_does_is_the_healer():
    told = []
    for other, figures in OTHERS:
        made = event(cures=[other, HEALED, HEALED | {"name": "dual_clip"}])
        (said,) = tried(made)
        assert healer(made).name == "clip_ratios" and healer(event(cures=[other])) is None
        assert said.startswith(ACTIONS["gspo"].do) and all(figure in said for figure in figures)
        assert ("at least" in said) == ("at least" in figures)
        told.append(said)
    assert len({*told}) == len(told) and healer(event()) is None


def test_how_a_setting_heals_is_told_with_its_price():
    for kept, figures in ((None, ["747.7", "3.04", "52.3", "25%"]), (0.9, ["747.7", "3.04", "52.3", "90%", "25%"])):
        made = event(cures=[HEALED | {"kept": kept}])
        assert re.findall(r"[\d.]+\d%?", how_healed(made, healer(made))) == figures


def test_a_setting_that_another_version_tried_is_told_by_its_line():
    made = event(cures=[HEALED | {"name": "newer", "line": "actor.newer=1"}])
    assert "actor.newer=1" in next_step(made).do


def test_what_was_not_measured_is_told_where_the_cause_calls_for_it():
    unmeasured = [{"name": name, "verdict": "not_healed", "norm_after": 99.0} for name in ("divide", "kl_cov")]
    told = event(cures=[*unmeasured, HEALED])  # of an extreme advantage
    assert [cured.name for cured in cures_for(told)] == ["divide", "clip_ratios"] and cures_for(event()) is None
