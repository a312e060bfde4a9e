# SPDX-License-Identifier: Apache-2.0
"""Planted culprits are found, nothing else is named, and the numbers are the oracle's."""

import pytest

from tests.adapters.conformance.layouts.checks import check_oracle
from tests.trainers import NONE, default_on
from tests.world.events import read_events
from tests.world.spikes import KL, PLANTED

ON = ["actor_rollout_ref.actor.spike_detection=True"]
TAU = ["actor_rollout_ref.actor.grad_norm_threshold=640", "actor_rollout_ref.actor.gradloc.search.strategy=bisect"]

# rows 0-7 are rank 0's and 8-15 rank 1's; micro-batches hold four rows each
PLACES = {
    "rank 0, first micro-batch, first token": [(0, 0, 1e4)],
    "rank 0, last micro-batch, last token": [(7, -1, 1e4)],
    "rank 1, first micro-batch, last token": [(9, -1, 1e4)],
    "rank 1, last micro-batch, first token": [(14, 0, 1e4)],
    "rank 1, a token in the middle": [(11, 5, -1e4)],
    "two culprits on two ranks, one micro-batch": [(2, 3, 1e4), (11, 5, 8e3)],
    "two culprits on two ranks, two micro-batches": [(1, 2, 1e4), (15, 6, -9e3)],
    "two culprits in one sequence": [(4, 0, 1e4), (4, 5, 1e4)],
}


@default_on(
    verl07=("two culprits on two ranks, one micro-batch",),
    verl09=("rank 1, last micro-batch, first token", "two culprits in one sequence"),
)
@pytest.mark.parametrize("plants", PLACES.values(), ids=PLACES.keys())
def test_planted_culprits_and_nothing_else_are_named(world, dump_dir, plants):
    found, other = world.run("spikes.localize_planted", plants=plants, overrides=TAU, dump_dir=dump_dir)
    (event,) = read_events(dump_dir)
    assert event["search"]["status"] == "found"
    assert {culprit["cause"]["label"] for culprit in event["culprits"]} == {"extreme_advantage"}
    check_oracle(event, found, closure=None)
    certificate = event["certificate"]
    assert certificate["norm_before"] == pytest.approx(found["oracle_norm"], rel=1e-4)
    difference = abs(certificate["norm_after"] - found["oracle_norm_without"])
    # the oracle is itself in float32: allow its own rounding beside the stated bound
    assert difference <= certificate["error_bound"] + 1e-5 * found["oracle_norm"]
    assert other["event"] is not None, "every rank builds the same event"


def test_a_spike_that_nobody_edited_into_the_advantages_is_found_and_its_term_named(world, dump_dir):
    overrides = ["actor_rollout_ref.actor.grad_norm_threshold=200", *KL]
    given = {"plants": [], "excluded": (9, 4), "overrides": overrides, "dump_dir": dump_dir}
    found, _ = world.run("spikes.localize_planted", **given)
    (event,) = read_events(dump_dir)
    check_oracle(event, found | {"planted": [(9, 4)]})
    assert event["culprits"][0]["cause"]["label"] == "kl_term"


@default_on(verl07=("off policy",), verl09=("on policy",))
@pytest.mark.parametrize("epochs", [1, 2], ids=["on policy", "off policy"])
def test_a_loss_that_a_user_registered_is_looked_into_as_it_is(world, dump_dir, epochs):
    overrides = ["actor_rollout_ref.actor.grad_norm_threshold=640", f"actor_rollout_ref.actor.ppo_epochs={epochs}"]
    given = dict(plants=[(11, 5, -1e4)], overrides=overrides, dump_dir=dump_dir, has_own_loss=True)
    found, _ = world.run("spikes.localize_planted", **given)
    event = found["event"]
    assert [(culprit["row"], culprit["positions"][0]) for culprit in event["culprits"]] == found["planted"]
    assert event["certificate"]["verdict"] == "explained"
    if epochs == 1:  # the oracle is of an update's first step
        check_oracle(read_events(dump_dir)[0], found, closure=None)


def test_a_spike_is_in_the_runs_trackers_by_the_prompt_and_the_rollout_of_its_culprit(world, dump_dir):
    row, number = PLANTED["spike"][0], 1  # the second of a pair
    sent = world.run("spikes.announced", overrides=ON + TAU, dump_dir=dump_dir)
    assert sent == [[(1, [f"prompt-{row // 2}:{number}"])]] * 2, "each rank is a driver of its own here"


@default_on(verl09=NONE)
def test_a_rehearsal_localizes_on_a_healthy_step(world, dump_dir):
    force = ["actor_rollout_ref.actor.gradloc.trigger.force_step=1"]
    world.run("spikes.update_batch", kind="healthy", overrides=ON + TAU + force, dump_dir=dump_dir)
    (event,) = read_events(dump_dir)
    assert event["trigger"]["kind"] == "forced"
    assert event["trigger"]["threshold"] is None
    assert event["certificate"]["verdict"] == "undecided"
    assert event["search"]["path"]


@default_on(verl07=NONE, verl09=NONE)
def test_the_verdict_does_not_depend_on_how_tokens_are_dealt_out(world, single, dump_dir):
    """One batch on one or two ranks, in micro-batches of 1 to 8 rows, has the same culprits."""
    answers = set()
    for name, ranks, rows in [("a", world, 1), ("b", world, 4), ("c", single, 2), ("d", single, 8)]:
        size = [f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={rows}"]
        mean = ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"]  # same weights everywhere
        where = f"{dump_dir}-{name}"
        ranks.run("spikes.update_batch", kind="spike", overrides=ON + TAU + size + mean, dump_dir=where)
        (event,) = read_events(where)
        named = tuple(sorted((c["row"], c["positions"][0]) for c in event["culprits"]))
        answers.add((named, event["certificate"]["verdict"]))
    assert answers == {(((5, 3),), "explained")}
