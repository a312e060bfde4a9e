# SPDX-License-Identifier: Apache-2.0
"""What an event tells of the settings that were tried; the golden events have the words for each outcome."""

import re

from gradloc.explain.cures import cures_for, healer, how_healed
from gradloc.explain.next_step import next_step
from tests.explain import event

FORWARDS = {"forwards": 4, "backwards": 4}
HEALED = {"name": "clip_ratios", "verdict": "healed", "norm_after": 3.041, "changed_tokens": 0.25, **FORWARDS}


def test_how_a_setting_heals_is_told_with_its_price():
    for kept, figures in ((None, ["747.7", "3.04", "52.3", "25%"]), (0.9, ["747.7", "3.04", "52.3", "90%", "25%"])):
        made = event(cures=[HEALED | {"kept": kept}])
        assert re.findall(r"[\d.]+\d%?", how_healed(made, healer(made))) == figures


def test_a_setting_that_another_version_tried_is_told_by_its_line():
    made = event(cures=[HEALED | {"name": "newer", "line": "actor.newer=1"}])
    assert "actor.newer=1" in next_step(made).do


def test_what_was_not_measured_is_told_where_the_cause_calls_for_it():
    unmeasured = [{"name": name, "verdict": "not_healed", "norm_after": 99.0} for name in ("divide", "kl_cov")]
    told = event(cures=[*unmeasured, HEALED, HEALED | {"name": "dual_clip"}])  # of an extreme advantage
    assert [cured.name for cured in cures_for(told)] == ["divide", "clip_ratios", "dual_clip"]
    assert healer(told).name == "clip_ratios", "the first"
    assert cures_for(event()) is healer(event()) is healer(event(cures=unmeasured)) is None


def test_a_setting_that_heals_a_step_of_no_culprit_has_no_other_advice_s_reason():
    named, spread = (next_step(event(cures=[HEALED], **more)) for more in ({}, {"culprits": []}))
    assert spread.do == named.do and "No few tokens" in spread.why != named.why
    assert "hardware" not in spread.why and "threshold" in spread.check
