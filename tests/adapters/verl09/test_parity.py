# SPDX-License-Identifier: Apache-2.0
"""Features that work on verl 0.7 and here: docs/compatibility.md has a row for each."""

import pytest

from tests.world.events import read_events

from .test_localization import ACTOR, ON, PLANT


def test_every_update_of_a_step_is_watched_and_counted(call, tmp_path):
    settings = [*ON, f"{ACTOR}.gradloc.dump_dir={tmp_path}", f"{ACTOR}.gradloc.trigger.max_events_per_step=4"]
    stock = call("train_in_a_cycle", stock=True, plants=(PLANT,))
    watched = call("train_in_a_cycle", settings, plants=(PLANT,))
    for one, other in zip(stock, watched, strict=True):
        assert one["weights"] == other["weights"] and one["rng"] == other["rng"]
    events = read_events(tmp_path)
    assert [event["step"]["global_step"] for event in events] == [1, 1] and len({e["event_id"] for e in events}) == 2
    assert {event["certificate"]["verdict"] for event in events} == {"explained"}
    metrics = watched[0]["metrics"]
    assert metrics["gradloc/spikes"] == metrics["gradloc/events"] == metrics["gradloc/culprits"] == 2
    assert metrics["actor/grad_norm_max"] == max(event["trigger"]["grad_norm"] for event in events)
    assert all(metrics[name] == value for name, value in stock[0]["metrics"].items() if "perf/" not in name)


def test_the_adaptive_trigger_learns_from_the_run_and_a_rehearsal_looks_at_a_healthy_step(train, tmp_path):
    settings = ["+gradloc=on", f"{ACTOR}.gradloc.dump_dir={tmp_path}", f"{ACTOR}.gradloc.trigger.warmup=4"]
    found, _ = train(settings, num_steps=6, plants=(PLANT,))
    (event,) = read_events(tmp_path)
    assert (event["trigger"]["kind"], event["step"]["global_step"]) == ("adaptive", 6)
    assert found["metrics"]["gradloc/norm_over_threshold"] > 10
    train([*settings, f"{ACTOR}.gradloc.trigger.force_step=2"], num_steps=2)
    assert [event["trigger"]["kind"] for event in read_events(tmp_path)] == ["adaptive", "forced"]


def test_the_health_monitor_works_where_nothing_is_searched(call):
    found, _ = call("judged", ["+gradloc=off", "trainer.health.enable=true"])
    assert found["health/state"] == 0 and "gradloc/spikes" not in found


def test_advantages_are_reweighted_where_the_estimator_has_put_them(call):
    found, _ = call("reweighted", ["+gradloc=observe"], alpha=0.3)
    assert found["largest_error"] < 1e-6 and 0 < found["kept_share"] < 1


def test_an_analysis_of_the_training_batch_is_of_its_rows_and_not_of_those_that_fill_it_up(world, model_dir, tmp_path):
    settings = [*ON, f"{ACTOR}.gradloc.dump_dir={tmp_path}", "trainer.gradient_analysis_mode=true"]
    for record in world.run("tests.adapters.verl09.separate.analyse", overrides=settings, model_dir=str(model_dir)):
        *buckets, whole = record["buckets"]
        assert whole["num_rows"] == sum(bucket["num_rows"] for bucket in buckets) == 14
        assert sum(bucket["weight"]["task"] for bucket in buckets) == pytest.approx(1.0)


@pytest.mark.parametrize("failing", [False, True])
def test_an_analysis_batch_of_its_own_walks_through_verls_step_and_leaves_nothing_behind(world, model_dir, failing):
    own = ["trainer.gradient_analysis_env_groups=4", "trainer.gradient_analysis_group_size=3"]
    own += [f"{ACTOR}.filter_loss_scaling=linear", "actor_rollout_ref.rollout.rollout_filter_strategy=top_k"]
    overrides = [*ON, "trainer.gradient_analysis_mode=true", "trainer.gradient_analysis_every=2", *own]
    made, _ = world.run(
        "tests.adapters.verl09.separate.prepare",
        overrides=overrides,
        model_dir=str(model_dir),
        failing=failing,
    )
    weights, twin = made["seen"]
    assert weights == {"weights": 6}
    prompts = twin.pop("prompts")
    assert len(set(prompts)) == 4 and set(prompts) <= set(range(100, 200))
    wanted = {"step": 7, "rollouts": [3] * 4, "n": 3, "filters": None, "has_own_buffer": True}
    assert twin == {**wanted, "profiles": False}, "verl's sample has ended the profile of this step"
    scaled = [0.5 * whole for whole in made["training"][:4]]  # of which the rollouts here are copies
    assert made["sums"] == pytest.approx([] if failing else scaled) and made["failures"] == failing
    assert made["is_queue_same"] and made["is_trainer_same"] and made["n"] == 1


def test_the_rollout_filter_drops_groups_before_verl_fills_up_mini_batches(call):
    keys = ("strategy=top_k", "value=0.5")
    settings = [f"actor_rollout_ref.rollout.rollout_filter_{key}" for key in keys]
    found, _ = call("filtered", ["+gradloc=observe", *settings, f"{ACTOR}.filter_loss_scaling=linear"])
    assert sorted(found["rows"]) == found["in_queue"] == list(range(8, 16)), (
        "the rows of the four groups that differ most"
    )
    assert found["scales"] == pytest.approx([0.5] * 8)
    assert found["metrics"]["rollout/filter_kept_count"] == 4 and found["metrics"]["rollout/filter_kept_ratio"] == 0.5


@pytest.mark.parametrize("each, expected", [("false", [1 / 2, 1 / 3]), ("true", [1 / 3, 1 / 5])])
def test_the_learning_rate_advances_once_a_step_or_with_each_of_loptis_stages(call, each, expected):
    settings = ["+gradloc=off", f"algorithm.lopti.step_lr_each_stage={each}"]
    (found, told), _ = call("rates", settings)
    assert found == pytest.approx(expected) and told == ["actor/lr", "lopti/high/lr", "lopti/low/lr"]
