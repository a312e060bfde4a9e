# SPDX-License-Identifier: Apache-2.0
"""``lab.rewards.math_verify`` scores what Math-Verify scores.

pytest tests/reward/test_answers.py
"""

import pytest
from math_verify.metric import math_metric
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

from lab.rewards import math_verify
from tests.reward.answers import boxed, boxed_gold

CASES = {
    "a boxed integer": (boxed("42"), "42", 1.0),
    "another boxed integer": (boxed("41"), "42", 0.0),
    "a plain last number": ("I add 40 and 2. The answer is 42", "42", 1.0),
    "the last of two boxes": (boxed("1") + " No: " + boxed("2"), "2", 1.0),
    "a fraction for a decimal": (boxed(r"\frac{1}{2}"), "0.5", 1.0),
    "a decimal cut too early": (boxed("0.33"), r"\frac{1}{3}", 0.0),
    "a set in another order": (boxed(r"\{3, 1, 2\}"), r"\{1, 2, 3\}", 1.0),
    "a pair the other way round": (boxed(r"\left(\frac{\pi}{2}, 3\right)"), r"(3, \pi/2)", 0.0),
    "no answer": ("I do not know.", "42", 0.0),
    "nothing": ("", "42", 0.0),
    "half a surrogate pair": ("\ud83d " + boxed("42"), "42", 1.0),
}


METRIC = math_metric(
    gold_extraction_target=(LatexExtractionConfig(),),
    pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
)


@pytest.mark.parametrize("answer, truth, expected", CASES.values(), ids=CASES.keys())
def test_an_answer_scores_what_it_is_worth_and_what_math_verifys_own_metric_gives(answer, truth, expected, pool_module):
    score = math_verify.score("", answer, truth)
    assert isinstance(score, float) and score == expected == METRIC([boxed_gold(truth)], [answer])[0]


def test_a_ground_truth_without_an_answer_is_an_error_and_scores_0(pool_module):
    before = pool_module.counts()
    assert math_verify.compute_score(boxed("42"), "") == 0.0
    assert pool_module.counts() == {**before, "errors": before["errors"] + 1}
