# SPDX-License-Identifier: Apache-2.0
"""The driver: when it looks, what it learns from the reports, says and counts, and when it ends the run."""

import json
import math
import re

import pytest
import torch

from gradloc.config import ActionConfig, GradLocConfig, TriggerConfig
from gradloc.loop.actions import Outcome
from gradloc.loop.batch import BatchView
from gradloc.loop.driver import AbortedBySpike, Driver, sequence_ids
from gradloc.loop.messages import RankReport
from gradloc.record import Run, Step
from gradloc.trigger import Spike
from tests.watch.loops import PLANT, Loop, batches
from tests.world.events import events_in


def driver(tmp_path, model="actor", **trigger):
    settings = GradLocConfig(dump_dir=str(tmp_path), trigger=TriggerConfig(**trigger), action=ActionConfig("skip"))
    return Driver(settings, tokenizer=None, run=Run(), trained={}, model=model)


def batch(advantage=1.0, length=4):
    mask = (torch.arange(8) < length).expand(2, 8)
    tensors = {"response_mask": mask.long(), "advantages": torch.full((2, 8), advantage)}
    return BatchView(tensors | {"values": torch.zeros(2, 8), "returns": torch.full((2, 8), 5.0)}, {})


def update(driver, step, norms=(1.0,), outcomes=(), coefficients=(0.5,), of=None):
    """One update without events; the reports come in any order, the first process knows the norms."""
    driver.before_update([16] * len(norms), step)
    heads = (2.0,) * len(norms)
    others = [RankReport(n, (), heads, value, num_failures=n) for n, value in enumerate(coefficients)][1:]
    first = RankReport(0, tuple(norms), heads, coefficients[0], outcomes=tuple(outcomes))
    metrics = driver.after_update([*others, first], of or batch())
    return {name: value for name, (value,) in metrics.items()}


def test_rollouts_of_a_prompt_are_told_apart_by_their_order():
    assert sequence_ids(["a", "b", "a", "a", "b"]) == ["a:0", "b:0", "a:1", "a:2", "b:1"]


def test_it_learns_from_each_update_s_norms_and_flags_by_those_before(tmp_path):
    made = driver(tmp_path, warmup=4, window=8)
    for step in range(1, 9):
        assert update(made, step)["gradloc/spikes"] == 0
    assert made.before_update([16], 9).thresholds == pytest.approx([4.0])
    found = update(made, 9, norms=[8.0])
    assert (found["gradloc/spikes"], found["actor/grad_norm_max"]) == (1, 8.0)
    assert found["gradloc/norm_over_threshold"] == pytest.approx(2.0)


def test_a_batch_that_cannot_be_read_is_counted_and_ends_nothing(tmp_path, caplog):
    made = driver(tmp_path)
    broken = BatchView({"response_mask": torch.ones(2, 8), "advantages": torch.ones(2, 3)}, {})
    assert [update(made, step, of=broken)["gradloc/write_failures"] for step in (1, 2)] == [1, 2]
    assert update(made, 3)["gradloc/write_failures"] == 2 and caplog.text.count("the batch's scale is not known") == 1


def test_it_counts_failures_and_the_median_of_the_ranks(tmp_path):
    found = update(driver(tmp_path), 1, coefficients=[0.5, 3.0, 0.7])
    assert found["gradloc/failures"] == 2 and found["gradloc/median_coefficient"] == 0.7
    assert found["gradloc/head_grad_norm"] == pytest.approx(6**0.5), "over all ranks"
    assert found["gradloc/write_failures"] == found["gradloc/events"] == found["gradloc/unwritten"] == 0


def test_the_critic_s_metrics_have_its_name(tmp_path):
    found = update(driver(tmp_path, model="critic", tau=1.0), 1)
    assert {"critic/grad_norm_max", "gradloc/critic_spikes", "gradloc/critic_threshold"} <= found.keys()
    assert not any(re.match("gradloc/(?!critic_)|actor/", name) for name in found)


def test_what_is_typical_of_the_run_s_batches_is_sent_down_from_the_fifth_step(tmp_path):
    made = driver(tmp_path)
    for step in range(1, 5):
        assert made.before_update([16], step).typical == {}
        update(made, step, of=batch(advantage=2.0, length=step + 1))
    typical = made.before_update([16], 5).typical
    assert {name: center for name, (center, _) in typical.items()} == pytest.approx(
        {"advantage": 2.0, "coefficient": 0.5, "length": 3.0, "tokens": 6.0}
    )
    critic = driver(tmp_path, model="critic")
    for step in range(1, 5):
        seen = BatchView(batch().tensors, {}, is_critics=True)
        update(critic, step, of=seen)
    assert critic.before_update([16], 5).typical["value_error"][0] == pytest.approx(5.0)


def test_spikes_that_no_event_is_written_of_are_named_with_what_limits_them(tmp_path, caplog):
    made = driver(tmp_path, tau=1.0, max_events=7)
    spikes = [Outcome(0, 9.0, "skip", False), Outcome(1, 9.0, "skip", False), Outcome(2, 9.0, "mask", False)]
    found = update(made, 12, norms=[9.0, 9.0, 9.0], outcomes=spikes)
    assert (found["gradloc/spikes"], found["gradloc/unwritten"], found["gradloc/skip"]) == (3, 3, 2)
    assert "step 12 has 3 spikes" in caplog.text and "(mask, skip)" in caplog.text and "max_events=7 (0" in caplog.text
    caplog.clear()
    update(made, 13)
    assert not caplog.text


def test_abort_without_an_event_ends_the_run_too(tmp_path):
    with pytest.raises(AbortedBySpike, match="No event of it was written"):
        update(driver(tmp_path, tau=1.0), 1, norms=[9.0], outcomes=[Outcome(0, 9.0, "abort", False)])


class WithAdvantages(Loop):
    """A loop whose tokens have advantages."""

    def micro_batch(self, x, mask, weight):
        (-(self.log_probs(x, mask, advantages=weight) * mask * weight).sum() / 96).backward()


def test_an_event_is_held_against_the_run_s_earlier_batches(tmp_path):
    made = WithAdvantages(tmp_path, "skip", lr=0.0)
    ids, mask = next(batches(1))
    worth = torch.ones_like(mask, dtype=torch.float32)
    planted = worth.clone()
    planted[PLANT] = 4000.0
    for weight in (*[worth] * 5, planted, 10 * planted):
        made.step(ids, mask, weight)
    first, second = (event["batch"]["over_run"] for event in events_in(tmp_path))
    assert first["advantage"] == pytest.approx(1.0)
    assert second["advantage"] == pytest.approx(10.0)
    assert math.isclose(second["length"], 1.0)


# ---- when to look


@pytest.fixture
def maker(tmp_path):
    return lambda **trigger: driver(tmp_path, **trigger)


def of(made, step=1, num_tokens=(100,), num_epochs=1, **more):
    made.num_epochs = num_epochs
    return made.before_update(list(num_tokens), step, **more)


def test_the_published_rule_is_of_each_optimizer_step_s_own_tokens(maker):
    found = of(maker(tau=10.0), num_tokens=[100, 400], num_epochs=2)
    assert found.kind == "fixed" and found.thresholds == [1.0, 0.5, 1.0, 0.5] and found.tau == [10.0] * 4
    assert found.num_tokens == [100, 400] and found.history == []
    assert of(maker(tau=10.0), num_tokens=[0]).thresholds == [math.inf]


def test_the_adaptive_rule_has_a_threshold_for_each_position_once_it_is_warm(maker):
    made = maker(warmup=2, window=8)
    assert of(made, num_tokens=[100, 400]).thresholds == [None, None] == of(made, num_tokens=[100, 400]).tau
    for _ in range(8):
        made.learn([1.0, 3.0], 0)
    found = of(made, num_tokens=[100, 400], num_epochs=2)
    assert found.kind == "adaptive" and found.thresholds[:2] == pytest.approx([4.0, 12.0])
    assert found.tau[:2] == pytest.approx([40.0, 240.0]), "what a token may have, under the same noise"
    spikes = [found.spike(math.inf, number) for number in range(2)]
    assert [spike.history.median_norm for spike in spikes[:2]] == pytest.approx([1.0, 3.0])
    assert of(made, num_tokens=[0, 400]).tau[0] == pytest.approx(4.0)


def test_each_stage_of_lopti_has_a_history_of_its_own(maker):
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


def test_so_many_events_are_written_of_a_step_and_of_a_run_and_none_while_it_cools_down(maker):
    always = [5] * 10
    assert written(maker(), always[:3]) == [1, 2, 3]
    assert written(maker(max_events_per_step=2), always[:2]) == [1, 1, 2, 2]
    assert written(maker(max_events=3), always) == [1, 2, 3]
    assert written(maker(max_events=3, max_events_per_step=2), always) == [1, 1, 2]
    assert written(maker(max_events=0), always) == []
    assert written(maker(cooldown_steps=3), always) == [1, 5, 9], "three steps after each"
    assert written(maker(cooldown_steps=3), [0, 1, 0, 1, 1, 1]) == [2, 6]


def test_the_updates_of_one_step_share_its_events_and_no_cooldown_parts_them(maker):
    always = [1] * 6
    assert written(maker(max_events_per_step=1), always, updates=2) == [1, 2, 3, 4, 5, 6]
    assert written(maker(max_events_per_step=2, cooldown_steps=1), always, updates=2) == [1, 1, 3, 3, 5, 5]


def test_the_rehearsal_is_at_its_step_and_each_update_has_a_number(maker):
    made = maker(force_step=2)
    found = [of(made, step) for step in (1, 2, 3)]
    assert [policy.force for policy in found] == [False, True, False]
    assert [policy.update for policy in found] == [1, 2, 3] and [policy.global_step for policy in found] == [1, 2, 3]
    assert not of(maker(), 0).force and of(made).settings is made.settings


def test_a_run_goes_on_from_its_checkpoint_with_its_histories_its_count_and_its_cooldown(maker):
    made, resumed, older = (maker(warmup=2, window=8, cooldown_steps=2) for _ in range(3))
    for step in range(1, 6):
        update(made, step)
    for norm in (1.0, 2.0):
        of(made, 6, stage="low")
        made.learn([norm], 1)
    state = json.loads(json.dumps(made.state()))
    resumed.load_state(state)
    assert [of(resumed, step).max_events for step in (8, 9)] == [0, 1] and resumed.num_events == 2
    for stage in ("", "low"):
        ours, theirs = (of(each, 9, stage=stage) for each in (made, resumed))
        assert (ours.thresholds, ours.typical) == (theirs.thresholds, theirs.typical)
        assert ours.thresholds != [None] and ours.typical
    older.load_state({name: value for name, value in state.items() if name not in ("scale", "quiet_until")})
    assert older.before_update([16], 6).typical == {}, "a checkpoint from before there was one"


def test_an_update_s_policy_says_of_each_optimizer_step_whether_and_where_it_spikes(maker):
    found = of(maker(tau=10.0, force_step=3), 3, num_tokens=[100, 400], num_epochs=2, stage="low")
    assert [found.threshold(number) for number in range(5)] == [1.0, 0.5, 1.0, 0.5, 1.0]
    spike = found.spike(0.75, 3)
    assert spike == Spike("fixed", 0.75, 0.5, 10.0, 400)
    assert found.spike(0.75, 2) is None and found.spike(math.nan, 2).kind == "non_finite"
    rehearsal = found.spike(0.75, 0)
    assert (rehearsal.kind, rehearsal.threshold, rehearsal.num_tokens) == ("forced", None, 100)
    assert found.spike(1.5, 0).kind == "fixed", "what spikes is no rehearsal"
    assert found.place(3) == Step(global_step=3, epoch=1, mini_batch=1, num_mini_batches=2, stage="low")
    assert of(maker(tau=10.0)).spike(0.5, 0) is None
