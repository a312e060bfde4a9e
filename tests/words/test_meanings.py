# SPDX-License-Identifier: Apache-2.0
"""Every cause that a record can have is explained, with what people do about it."""

import pytest

from gradloc.record import CAUSES
from gradloc.words.meanings import MEANINGS, meaning_of


@pytest.mark.parametrize("label", CAUSES)
@pytest.mark.parametrize("trainer", ["verl 0.7.0", "verl 0.9.1", None])
def test_every_cause_has_a_meaning_and_a_config_line_for_every_trainer(label, trainer):
    found = meaning_of(label)
    assert found is MEANINGS[label]
    assert found.title and found.means.endswith(".")
    assert found.advice(trainer)


def test_an_unknown_cause_gets_what_is_said_when_nothing_stands_out():
    assert meaning_of("from the future") is MEANINGS["unknown"]


def test_more_of_a_search_is_more_of_what_limits_it():
    lines = {
        strategy: [line for _, line in MEANINGS["unknown"].advice("verl 0.7.0", strategy)]
        for strategy in ("auto", "bisect")
    }
    assert "actor_rollout_ref.actor.gradloc.search.max_steps=8" in lines["auto"]
    assert "actor_rollout_ref.actor.bisect_budget_steps=512" in lines["bisect"]
