# SPDX-License-Identifier: Apache-2.0
"""Whatever fails while a spike is looked into, training goes on as if nobody had looked."""

import json
from itertools import accumulate

import pytest

from tests.trainers import NONE, TRL, default_on, not_on
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


@default_on(verl07=("loss",), verl09=("forward",))
@not_on(TRL, "DDP's forward has no collective: peers hear of it and go on, see test_ranks.py", "loss")
@pytest.mark.parametrize("method", ["loss", "forward"])
def test_a_rank_that_fails_inside_a_forward_or_backward_ends_instead_of_hanging(doomed, dump_dir, method):
    with pytest.raises((RankError, EOFError, ConnectionError)) as caught:
        doomed.run("failures.fail_inside", timeout_s=240, method=method, overrides=ON, dump_dir=dump_dir)
    assert "did not answer" not in str(caught.value)


NOTIFY = f"{ACTOR}.gradloc.notify"


@pytest.fixture(scope="module")
def untroubled(world, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("untroubled") / "gradloc")
    return world.run("failures.write_into_trouble", kind="none", overrides=ON, dump_dir=folder)


@default_on(verl07=("disk full",), verl09=NONE)
@not_on(TRL, "the driver's, the same on every trainer, which here is on the first process alone")
@pytest.mark.parametrize(
    ("kind", "failures", "settings"),
    [
        ("file in the way", 1, []),
        ("disk full", 1, []),
        ("folder vanishes", 0, []),
        ("webhook hangs", 0, [f"{NOTIFY}.webhook=env:HOOK", f"{NOTIFY}.timeout_s=60"]),
    ],
)
def test_trouble_with_telling_never_reaches_training(world, dump_dir, untroubled, kind, failures, settings):
    answers = world.run("failures.write_into_trouble", kind=kind, overrides=ON + settings, dump_dir=dump_dir)
    assert answers[0]["write_failures"] == failures
    assert answers[0]["next_norm"] > 0
    assert [answer["weights"] for answer in answers] == [answer["weights"] for answer in untroubled]
    assert answers[0]["seconds"] < 30
    headline, where = answers[0]["said"]
    assert " made the step-" in headline and "; step taken" in headline
    lost = f"gradloc: this event could not be written to {dump_dir}: "
    assert where.startswith(lost if failures else "gradloc: gradloc ")


@default_on(verl09=NONE)
@not_on(TRL, "test_actions.py has TRL's")
def test_skip_takes_no_step_at_all(world, dump_dir):
    skip = [f"{ACTOR}.gradloc.action.mode=skip"]
    answers = world.run("failures.stop_or_skip", mode="skip", overrides=ON + skip, dump_dir=dump_dir)
    for answer in answers:
        assert answer["before"] == answer["after"], "weights, moments and step counts are as before"
        assert answer["metrics"]["gradloc/skip"] == [1]
    assert read_events(dump_dir)[0]["action"]["taken"] == "skip"


@default_on(verl07=NONE)
@not_on(TRL, "test_actions.py and test_ranks.py have TRL's")
def test_abort_stops_the_run_with_the_event_on_disk(world, dump_dir):
    abort = [f"{ACTOR}.gradloc.action.mode=abort"]
    answers = world.run("failures.stop_or_skip", mode="abort", overrides=ON + abort, dump_dir=dump_dir)
    for answer in answers:
        assert answer["message"].startswith("AbortedBySpike: gradloc stopped the run")
        assert answer["before"] == answer["after"]
    assert read_events(dump_dir)[0]["action"]["taken"] == "abort"


EVIDENCE = f"{ACTOR}.gradloc.evidence"


@default_on(verl07=NONE)
def test_text_can_be_kept_out_of_what_is_written(world, dump_dir):
    settings = [f"{EVIDENCE}.text=off", f"{EVIDENCE}.bundle=off"]
    world.run("spikes.update_batch", kind="spike", overrides=ON + settings, dump_dir=dump_dir)
    (event,) = read_events(dump_dir)
    (culprit,) = event["culprits"]
    for key in ("prompt", "text_before", "text_after", "tokens"):
        assert culprit[key] is None


@default_on(verl09=NONE)
def test_a_full_bundle_holds_the_whole_mini_batch_and_a_cap_keeps_it_out(world, dump_dir, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    full = [f"{EVIDENCE}.bundle=full"]
    world.run("spikes.update_batch", kind="spike", overrides=ON + full, dump_dir=dump_dir)
    (event,) = read_events(dump_dir)
    folder = tmp_path / "gradloc" / event["folder"]
    layout = json.loads((folder / "meta.json").read_text())["layout"]
    assert sorted((entry["rank"], entry["micro_batch"]) for entry in layout) == [
        (rank, index) for rank in range(2) for index in range(2)
    ]
    with safetensors.safe_open(folder / "batch.safetensors", "np") as tensors:
        assert tensors.get_tensor("input_ids").shape[0] == 16
    capped = dump_dir + "-capped"
    world.run("spikes.update_batch", kind="spike", overrides=[*ON, f"{EVIDENCE}.max_gb=0"], dump_dir=capped)
    (event,) = read_events(capped)
    assert event["culprits"] and not list((tmp_path / "gradloc-capped").rglob("*.safetensors"))


@default_on(verl09=NONE)
@not_on(TRL, "test_trainer.py has TRL's")
def test_the_weights_before_the_step_can_be_kept_in_verls_own_format(world, dump_dir, tmp_path):
    settings = [f"{EVIDENCE}.checkpoint=before_step"]
    world.run("spikes.update_batch", kind="spike", overrides=ON + settings, dump_dir=dump_dir)
    shards = list(tmp_path.rglob("weights/global_step_1/actor/model_world_size_2_rank_*.pt"))
    assert shards
    capped = {"overrides": [*ON, *settings, f"{EVIDENCE}.max_gb=0"], "dump_dir": f"{dump_dir}-capped"}
    world.run("spikes.update_batch", kind="spike", **capped)
    assert not list((tmp_path / "gradloc-capped").rglob("*.pt"))


@default_on(verl09=NONE)
@not_on(TRL, "test_trainer.py has TRL's checkpoints")
def test_resuming_from_a_checkpoint_goes_on_with_the_same_history(world, dump_dir):
    adaptive = [f"{ACTOR}.spike_detection=True", f"{ACTOR}.gradloc.trigger.warmup=8"]
    answer, _ = world.run("failures.resume", overrides=adaptive, dump_dir=dump_dir)
    assert answer["empty"] is None
    assert answer["loaded"] == answer["saved"] and answer["last_checkpoint"] == dump_dir
    assert [len(position["log_norms"]) for position in answer["saved"]["positions"]] == [12]
    assert answer["thresholds"][0] == answer["thresholds"][1] is not None
