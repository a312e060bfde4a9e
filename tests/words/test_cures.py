# SPDX-License-Identifier: Apache-2.0
"""What an event tells of the settings that were tried."""

import pytest

from gradloc.words.cures import cures_for, healer, how_healed, tried
from tests.words import event

FORWARDS = {"forwards": 4, "backwards": 4}
HEALED = {"name": "clip_ratios", "verdict": "healed", "norm_after": 3.04, "changed_tokens": 0.25, **FORWARDS}
OTHERS = [
    (
        {"name": "gspo", "verdict": "no_change"},
        "It would change nothing here: no token's coefficient would be another.",
    ),
    (
        {"name": "gspo", "verdict": "undecided", "norm_after": 52.0, "error_bound": 0.5, **FORWARDS},
        "The norm would be 52 (within 0.5), too near the threshold to say.",
    ),
    ({"name": "gspo", "verdict": "not_healed", "norm_after": 99.0, **FORWARDS}, "The norm would still be 99."),
    ({"name": "gspo", "verdict": "not_healed", "norm_after": 99.0}, "The norm would still be at least 99."),
]


@pytest.mark.parametrize(("other", "said"), OTHERS)
def test_each_setting_that_does_not_heal_has_a_sentence_and_the_first_that_does_is_the_healer(other, said):
    told = event(cures=[other, HEALED, HEALED | {"name": "dual_clip"}])
    (sentence,) = tried(told)
    assert sentence.endswith(f". {said}") and healer(told).name == "clip_ratios"
    assert healer(event(cures=[other])) is None is healer(event())


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (None, "It changes 25% of the tokens' coefficients."),
        (0.9, "It keeps 90% of the healthy step's direction and changes 25% of the tokens' coefficients."),
    ],
)
def test_how_a_setting_heals_is_told_with_its_price(kept, said):
    told = event(cures=[HEALED | {"kept": kept}])
    assert how_healed(told, healer(told)) == f"On this step: 747.7 → 3.04, threshold 52.3. {said}"


def test_what_was_not_measured_is_told_where_the_cause_calls_for_it():
    unmeasured = [{"name": name, "verdict": "not_healed", "norm_after": 99.0} for name in ("divide", "kl_cov")]
    told = event(cures=[*unmeasured, HEALED])  # of an extreme advantage
    assert [cured.name for cured in cures_for(told)] == ["divide", "clip_ratios"] and cures_for(event()) is None
