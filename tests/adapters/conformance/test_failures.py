# SPDX-License-Identifier: Apache-2.0
"""A failure while a spike is looked into leaves training as it was; what the driver does then is in tests/loop."""

from itertools import accumulate
from pathlib import Path

import pytest

from tests.trainers import NONE, default_on
from tests.world import RankError
from tests.world.events import read_events

ACTOR = "actor_rollout_ref.actor"
ON = [f"{ACTOR}.spike_detection=True", f"{ACTOR}.grad_norm_threshold=640"]


@default_on(verl07=("auto",), verl09=NONE)
@pytest.mark.parametrize(
    ("strategy", "stride"),
    [
        ("auto", 72),
        pytest.param("auto", 12, marks=pytest.mark.slow),
        pytest.param("bisect", 12, marks=pytest.mark.slow),
    ],
    ids=["auto", "auto, more of them", "bisect"],
)
def test_a_rank_that_fails_at_any_collective_boundary_is_heard_by_all_and_recovered(world, dump_dir, strategy, stride):
    """At three boundaries of each ``stride``, until the search has no more; nothing may hang, nothing may change.

    tests/core/test_faults.py fails at every allocation in between.
    """
    overrides = [*ON, f"{ACTOR}.gradloc.search.strategy={strategy}", f"{ACTOR}.ppo_mini_batch_size=8"]
    overrides.append(f"{ACTOR}.ppo_micro_batch_size_per_gpu=2")
    arguments = dict(overrides=overrides, dump_dir=dump_dir, timeout_s=240)
    untouched = world.run("failures.fail_at_boundaries", first=-2, **arguments)
    for first in range(1, 400, stride):
        answers = world.run("failures.fail_at_boundaries", first=first, **arguments)
        assert [a["weights"] for a in answers] == [u["weights"] for u in untouched]
        for answer in answers:
            assert answer["failures"] == list(accumulate(answer["reached"]))
        if not all(answers[0]["reached"]):
            assert first > 3, "a search has several boundaries"
            return
    raise AssertionError("the search never ended")


@pytest.mark.parametrize("over", [0, 1])
def test_the_norm_of_the_first_rank_decides_where_the_threshold_is_between_the_ranks(world, dump_dir, over):
    answers = world.run("failures.part_norms", timeout_s=240, over=over, overrides=ON, dump_dir=dump_dir)
    assert [(answer["failures"], answer["spikes"]) for answer in answers] == [(0, 1 - over)] * 2
    assert Path(dump_dir, "events.jsonl").exists() == (over == 0)


@default_on(verl09=NONE)
def test_where_the_first_rank_ends_before_it_sends_its_norm_the_others_end(doomed, dump_dir):
    first, second = doomed.outcomes("failures.lose_first", timeout_s=60, overrides=ON, dump_dir=dump_dir)
    assert (first[0], second[0]) == ("ended", "raised")
    assert "the first rank's norm decides for all, and cannot be had" in second[1]


@default_on(verl07=("backward",), verl09=("forward",))
@pytest.mark.parametrize("place", ["backward", "forward"])
def test_a_rank_that_fails_inside_a_forward_or_backward_ends_instead_of_hanging(doomed, dump_dir, place):
    with pytest.raises((RankError, EOFError, ConnectionError)) as caught:
        doomed.run("failures.fail_inside", timeout_s=240, place=place, overrides=ON, dump_dir=dump_dir)
    assert "did not answer" not in str(caught.value)
    assert Path(dump_dir, "failed").exists()


@default_on(verl09=NONE)
def test_skip_takes_no_step_at_all(world, dump_dir):
    skip = [f"{ACTOR}.gradloc.action.mode=skip"]
    answers = world.run("failures.stop_or_skip", mode="skip", overrides=ON + skip, dump_dir=dump_dir)
    for answer in answers:
        assert answer["before"] == answer["after"], "weights, moments and step counts are as before"
        assert answer["metrics"]["gradloc/skip"] == [1]
    assert read_events(dump_dir)[0]["action"]["taken"] == "skip"


@default_on(verl07=NONE)
def test_abort_stops_the_run_with_the_event_on_disk(world, dump_dir):
    abort = [f"{ACTOR}.gradloc.action.mode=abort"]
    answers = world.run("failures.stop_or_skip", mode="abort", overrides=ON + abort, dump_dir=dump_dir)
    for answer in answers:
        assert answer["message"].startswith("AbortedBySpike: gradloc stopped the run")
        assert answer["before"] == answer["after"]
    assert read_events(dump_dir)[0]["action"]["taken"] == "abort"


@default_on(verl09=NONE)
def test_resuming_from_a_checkpoint_goes_on_with_the_same_history(world, dump_dir):
    adaptive = [f"{ACTOR}.spike_detection=True", f"{ACTOR}.gradloc.trigger.warmup=8"]
    answer, _ = world.run("failures.resume", overrides=adaptive, dump_dir=dump_dir)
    assert answer["empty"] is None
    assert answer["loaded"] == answer["saved"] and answer["last_checkpoint"] == dump_dir
    assert [len(position["log_norms"]) for position in answer["saved"]["positions"]] == [12]
    assert answer["thresholds"][0] == answer["thresholds"][1] is not None
