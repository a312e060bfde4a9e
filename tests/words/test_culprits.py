# SPDX-License-Identifier: Apache-2.0
"""Console, verdict and page begin with the same culprit, whatever is known of each."""

import pytest

from gradloc.tell.lines import announcement
from gradloc.words.culprits import by_size, leader
from gradloc.words.story import cause_of
from gradloc.words.verdict import verdict_sentences
from tests.report.builder import make_culprit
from tests.words import event

FIRST = {"share": 0.2, "grad_norm": 3.0}
CASES = {
    "shares": ({"share": -0.79, "grad_norm": 2.0}, FIRST),
    "one share is not known": ({"share": None, "grad_norm": 4.0}, FIRST),
    "one norm is not finite": ({"share": None, "grad_norm": "NaN"}, {"share": None, "grad_norm": 9.0}),
    "no share is known": ({"share": None, "grad_norm": 4.0}, {"share": None, "grad_norm": 3.0}),
}


@pytest.mark.parametrize(("larger", "smaller"), CASES.values(), ids=CASES)
def test_everyone_begins_with_the_same_token(larger, smaller):
    culprits = [
        make_culprit(3, token=" one", **smaller, cause={"label": "ratio", "numbers": {}}),
        make_culprit(7, token=" other", **larger, cause={"label": "advantage", "numbers": {}}),
    ]
    found = event(culprits=culprits)
    assert leader(found.culprits).positions == (7,)
    assert '" other" (rank 1) and 1 more' in announcement(found)
    assert 'The largest is the token " other"' in verdict_sentences(found)
    assert cause_of(found) == "advantage"


def test_without_any_there_is_none():
    assert leader([]) is None and by_size([]) == []
