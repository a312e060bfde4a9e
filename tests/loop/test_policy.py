# SPDX-License-Identifier: Apache-2.0
"""When to look, as the driver decides it: thresholds, the rehearsal, and how many events may still be written."""

import json
import math

import pytest

from gradloc.config import GradLocConfig, TriggerConfig
from gradloc.core.trigger import Spike
from gradloc.loop.policy import PolicyMaker


def maker(**trigger):
    return PolicyMaker(GradLocConfig(trigger=TriggerConfig(**trigger)))


def of(made, step=1, num_tokens=(100,), num_epochs=1, **more):
    return made.policy(step, list(num_tokens), num_epochs, **more)


def test_the_published_rule_is_of_each_optimizer_step_s_own_tokens():
    found = of(maker(tau=10.0), num_tokens=[100, 400], num_epochs=2)
    assert found.kind == "fixed" and found.thresholds == [1.0, 0.5, 1.0, 0.5] and found.tau == [10.0] * 4
    assert found.num_tokens == [100, 400] and found.history == []
    assert of(maker(tau=10.0), num_tokens=[0]).thresholds == [math.inf]


def test_the_adaptive_rule_has_a_threshold_for_each_position_once_it_is_warm():
    made = maker(warmup=2, window=8)
    assert of(made, num_tokens=[100, 400]).thresholds == [None, None] == of(made, num_tokens=[100, 400]).tau
    for _ in range(8):
        made.learn([1.0, 3.0], 0)
    found = of(made, num_tokens=[100, 400], num_epochs=2)
    assert found.kind == "adaptive" and found.thresholds[:2] == pytest.approx([4.0, 12.0])
    assert found.tau[:2] == pytest.approx([40.0, 240.0]), "what a token may have, under the same noise"
    places = [found.place(number) for number in range(3)]
    assert [place.history["median_norm"] for place in places[:2]] == pytest.approx([1.0, 3.0]) and places[2].epoch == 1
    assert of(made, num_tokens=[0, 400]).tau[0] == pytest.approx(4.0)


def test_each_stage_of_lopti_has_a_history_of_its_own():
    made = maker(warmup=2, window=8)
    for _ in range(3):
        assert of(made, stage="low").stage == "low"
        made.learn([1.0], 0)
        of(made, stage="high")
        made.learn([5.0], 0)
    assert of(made, stage="low").thresholds[0] * 5 == pytest.approx(of(made, stage="high").thresholds[0])
    assert of(made).thresholds == [None] and of(made).stage is None


def written(made, per_step, updates=1):
    """The steps in which an event is written, where each step has so many spikes."""
    found = []
    for step in range(1, len(per_step) + 1):
        for _ in range(updates):
            events = min(of(made, step).max_events, per_step[step - 1])
            made.learn([1.0], events)
            found += [step] * events
    return found


def test_so_many_events_are_written_of_a_step_and_of_a_run_and_none_while_it_cools_down():
    always = [5] * 10
    assert written(maker(), always[:3]) == [1, 2, 3]
    assert written(maker(max_events_per_step=2), always[:2]) == [1, 1, 2, 2]
    assert written(maker(max_events=3), always) == [1, 2, 3]
    assert written(maker(max_events=3, max_events_per_step=2), always) == [1, 1, 2]
    assert written(maker(max_events=0), always) == []
    assert written(maker(cooldown_steps=3), always) == [1, 5, 9], "three steps after each"
    assert written(maker(cooldown_steps=3), [0, 1, 0, 1, 1, 1]) == [2, 6]


def test_the_updates_of_one_step_share_its_events_and_no_cooldown_parts_them():
    always = [1] * 6
    assert written(maker(max_events_per_step=1), always, updates=2) == [1, 2, 3, 4, 5, 6]
    assert written(maker(max_events_per_step=2, cooldown_steps=1), always, updates=2) == [1, 1, 3, 3, 5, 5]


def test_the_rehearsal_is_at_its_step_and_each_update_has_a_number():
    made = maker(force_step=2)
    found = [of(made, step) for step in (1, 2, 3)]
    assert [policy.force for policy in found] == [False, True, False]
    assert [policy.update for policy in found] == [1, 2, 3] and [policy.global_step for policy in found] == [1, 2, 3]
    assert not maker().policy(0, [1], 1).force
    typical = {"advantage": (1.0, 3.0)}
    assert of(made, typical=typical).typical is typical and of(made).settings is made.settings


def test_a_run_goes_on_from_its_checkpoint_with_its_histories_and_its_count():
    made, resumed = maker(warmup=2, window=8, max_events=3), maker(warmup=2, window=8, max_events=3)
    for stage in ("", "low"):
        for norm in (1.0, 2.0):
            of(made, stage=stage)
            made.learn([norm], 1)
    resumed.load_state(json.loads(json.dumps(made.state())))
    assert resumed.num_events == 4 and of(resumed, 9).max_events == 0
    for stage in ("", "low"):
        assert of(resumed, stage=stage).thresholds == of(made, stage=stage).thresholds != [None]


def test_an_update_s_policy_says_of_each_optimizer_step_whether_and_where_it_spikes():
    found = of(maker(tau=10.0, force_step=3), 3, num_tokens=[100, 400], num_epochs=2, stage="low")
    assert [found.threshold(number) for number in range(5)] == [1.0, 0.5, 1.0, 0.5, 1.0]
    spike = found.spike(0.75, 3)
    assert spike == Spike("fixed", 0.75, 0.5, 10.0, 400)
    assert found.spike(0.75, 2) is None and found.spike(math.nan, 2).kind == "non_finite"
    rehearsal = found.spike(0.75, 0)
    assert (rehearsal.kind, rehearsal.threshold, rehearsal.num_tokens) == ("forced", None, 100)
    assert found.spike(1.5, 0).kind == "fixed", "what spikes is no rehearsal"
    place = found.place(3)
    assert (place.global_step, place.epoch, place.mini_batch, place.num_mini_batches) == (3, 1, 1, 2)
    assert place.stage == "low" and place.history is None
    assert of(maker(tau=10.0)).spike(0.5, 0) is None
