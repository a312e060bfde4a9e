# SPDX-License-Identifier: Apache-2.0
"""Which link broke, in words: what the golden events, each alone, cannot hold."""

import pytest

from gradloc.explain.faults import fault_sentences, is_new_since_update, step_before
from gradloc.record import Event
from gradloc.record.reading import read
from tests.report import events as golden


def test_an_update_at_fault_is_joined_with_the_event_of_the_step_that_made_it():
    late = read(Event, golden.event("The learning rate jumped"))
    said = "One token made the step-39 spike"
    token = read(Event, golden.event("cause spurious_token", late.fault.step, verdict=said))
    other = read(Event, golden.event("cause spurious_token", late.fault.step - 1, verdict="Another one"))
    assert "39" in step_before(late, [other, token, late]) and token.verdict in step_before(late, [other, token, late])
    assert step_before(late, [other, late]) == step_before(token, [other, token, late]) == ""


def test_the_setting_that_the_mechanism_is_of_is_in_the_cure():
    name = "Weight decay shrank the weights"
    fault = golden.parts(name)["fault"]
    evidence = fault["evidence"] | {"usual_weight_decay": 0.01, "norm_under_usual_update": 0.6123}
    found = read(Event, golden.event(name, fault=fault | {"evidence": evidence}))
    assert "weight decay at 0.01, as before, it would be 0.612." in " ".join(fault_sentences(found))


@pytest.mark.parametrize(
    ("loudest", "without", "is_new"),
    [(90.0, 8.0, True), (60.0, 8.0, False), (200.0, 20.0, False), (90.0, None, False)],
)
def test_a_batch_is_new_since_the_update_by_its_numbers_alone(loudest, without, is_new):
    evidence = {"norm": 100.0, "usual_norm": 1.0, "loudest_norm": loudest, "loudest_norm_without_update": without}
    assert is_new_since_update(evidence) is is_new


def test_a_batch_that_is_new_since_the_update_is_so_by_the_whole_step_where_its_loudest_part_is_not_known():
    evidence = {"norm": 100.0, "usual_norm": 1.0, "norm_without_update": 9.0}
    assert is_new_since_update(evidence) and not is_new_since_update(evidence | {"norm_without_update": 20.0})
    fault = {"at": "batch", "step": 3, "evidence": evidence}
    found = read(Event, golden.event("cause spurious_token", fault=fault))
    assert "It is loud only since the last update. So the weights are healthy" in " ".join(fault_sentences(found))
