# SPDX-License-Identifier: Apache-2.0
"""How metrics of several updates of one step are joined."""

import math

import pytest

from gradloc.loop.metrics import _event_metrics, is_ours, joined
from gradloc.record import Event
from gradloc.record.reading import read
from gradloc.reweighting.stages import merged
from tests.report.builder import make_event


@pytest.mark.parametrize("whose", ["gradloc/", "gradloc/critic_"])
def test_counts_add_up_and_norms_are_the_largest(whose):
    first = {f"{whose}spikes": 1, f"{whose}unwritten": 2, f"{whose}norm_after": 0.5, f"{whose}failures": 1}
    second = {f"{whose}spikes": 4, f"{whose}unwritten": 3, f"{whose}norm_after": math.nan, f"{whose}failures": 1}
    found = joined([first, second])
    assert (found[f"{whose}spikes"], found[f"{whose}unwritten"], found[f"{whose}failures"]) == (5, 5, 1)
    assert math.isnan(found[f"{whose}norm_after"]), "what is not finite is the largest"


def test_of_several_steps_of_a_log_the_worst_health_is_told():
    worst = {"health/state": 2, "health/reasons": 3}
    assert joined([worst, dict.fromkeys(worst, 0)]) == worst


@pytest.mark.parametrize("order", [1, -1])
def test_what_belongs_together_is_of_the_update_nearest_its_threshold(order):
    near = {"gradloc/threshold": 8.0, "gradloc/norm_over_threshold": 2.0, "gradloc/healthy_norm": 0.1}
    far = {"gradloc/threshold": 2.0, "gradloc/norm_over_threshold": 0.5}
    assert joined([near, far][::order]) == near


def test_the_stages_of_lopti_are_joined_so_too():
    near = {"gradloc/unwritten": [2], "gradloc/threshold": [3.0], "gradloc/norm_over_threshold": [0.5]}
    nearest = {"gradloc/unwritten": [3], "gradloc/threshold": [9.0], "gradloc/norm_over_threshold": [2.0]}
    both = merged(["low", "high"], [near | {"actor/pg_loss": [1.0]}, nearest | {"actor/pg_loss": [0.5]}])
    assert (both["gradloc/unwritten"], both["gradloc/threshold"]) == ([5], [9.0])
    assert both["gradloc/norm_over_threshold"] == [2.0] and both["actor/pg_loss"] == [1.5]
    assert not is_ours("actor/pg_loss")


def test_an_event_whose_consequence_is_not_known_gives_the_rest_of_its_metrics():
    made = make_event()
    known = read(Event, made | {"consequence": {"grad_clip": 1.0, "clip_scale": 0.25}})
    found = _event_metrics([read(Event, made | {"consequence": None}), known])
    assert found["gradloc/events"] == 2 and found["gradloc/clip_scale"] == 0.25
    nothing_left = read(Event, made | {"consequence": {"grad_clip": 1.0, "clip_scale": 0.0}})
    assert _event_metrics([known, nothing_left])["gradloc/clip_scale"] == 0.0
