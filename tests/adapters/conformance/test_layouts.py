# SPDX-License-Identifier: Apache-2.0
"""Culprits are the oracle's under every supported way of running the actor."""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from tests.adapters.conformance.layouts.checks import ACTOR, check_planted
from tests.trainers import NONE, default_on
from tests.world.events import read_events
from tests.world.models.critic import PLACE as CRITICS_PLACE
from tests.world.models.vision import PLACE
from tests.world.spikes import address

ON = [f"{ACTOR}.spike_detection=True"]
TAU = [f"{ACTOR}.grad_norm_threshold=640"]
PLANTS = [(2, 3, -1e4), (13, 5, -8e3)]  # on two ranks, in the first and the second micro-batch

FSDP1 = [f"{ACTOR}.strategy=fsdp"]
KEEP = [f"{ACTOR}.fsdp_config.reshard_after_forward=false"]
BF16 = [f"{ACTOR}.fsdp_config.dtype=bfloat16"]
FP16 = [f"{ACTOR}.fsdp_config.dtype=float16"]
CHECKPOINTING = ["actor_rollout_ref.model.enable_gradient_checkpointing=true"]
ENTROPY = [f"{ACTOR}.entropy_coeff=0.05"]
KL = [f"{ACTOR}.use_kl_loss=true"]
OFFLOADED = [f"{ACTOR}.fsdp_config.offload_policy=true"]
SMALL = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"]

LAYOUTS = {
    "FSDP2": [],
    "FSDP2, weights kept after forward": KEEP,
    "FSDP2, bf16": BF16,
    "FSDP2, bf16, checkpointing": BF16 + CHECKPOINTING,
    "FSDP2, entropy and KL terms": ENTROPY + KL,
    "FSDP2, one row per micro-batch": SMALL,
    "FSDP2, LoRA": ["lora"],
    "FSDP2, offload_policy": OFFLOADED,
    "FSDP2, offload_policy, bf16": OFFLOADED + BF16,
    "FSDP1": FSDP1,
    "FSDP1, original parameters": [*FSDP1, f"{ACTOR}.fsdp_config.use_orig_params=true"],
    "FSDP1, weights kept after forward": FSDP1 + KEEP,
    "FSDP1, bf16": FSDP1 + BF16,
    "FSDP1, fp16 with its scaler": FSDP1 + FP16,
}


CASES = [(name, "auto") for name in LAYOUTS] + [
    (name, "bisect") for name in ("FSDP1", "FSDP2, bf16, checkpointing", "FSDP1, fp16 with its scaler")
]
REPEATED = [("FSDP2, bf16", "auto"), ("FSDP2, offload_policy", "auto"), ("FSDP2, bf16, checkpointing", "bisect")]
REPEATED += [("FSDP2, entropy and KL terms", "auto"), ("FSDP2, one row per micro-batch", "auto"), ("FSDP1", "auto")]
REPEATED += [("FSDP1, weights kept after forward", "auto")]
"""By default another case has all that they have."""
CASES = [pytest.param(*case, marks=[pytest.mark.slow] * (case in REPEATED), id=" by ".join(case)) for case in CASES]


@default_on(
    verl07=("FSDP2, bf16, checkpointing by auto",), verl09=("FSDP1, original parameters by auto", "FSDP2, LoRA by auto")
)
@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_the_planted_culprits_are_found_and_nothing_else(world, dump_dir, name, strategy):
    overrides = [*TAU, f"{ACTOR}.gradloc.search.strategy={strategy}", *LAYOUTS[name]]
    half = any("float16" in key for key in LAYOUTS[name])
    within = {"share": 0.03, "norm": 0.03, "before": None, "after": 0.05} if half else {}
    within["closure"] = None if half or strategy != "auto" else 0.05
    event, found = check_planted(world, dump_dir, PLANTS, overrides, **within)
    assert strategy != "auto" or event["shares"]["is_trusted"]
    check_consequence(event, found, 0.05 if half else 0.002)


REDUCED = ["+" + ACTOR + ".fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:bf16,buffer_dtype:fp32}"]
TIMES = {100: 1.3e3, 1_000: 1.3e4, 10_000: 1.3e5}
"""Times the healthy norm, and the advantage that makes a spike of it."""


SUMS = {"FSDP2, reduced in bf16": REDUCED, "FSDP1, reduced in bf16": FSDP1 + REDUCED, "FSDP1, bf16": FSDP1 + BF16}
DEFAULT = [(next(iter(SUMS)), next(iter(TIMES)))]
EACH_SUM = pytest.mark.parametrize(
    ("sums", "times"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case not in DEFAULT)) for case in itertools.product(SUMS, TIMES)],
)
"""By default one of them."""


@default_on(verl07=("FSDP2, reduced in bf16-100",), verl09=NONE)
@EACH_SUM
def test_what_half_precision_sums_over_ranks_leave_of_a_spike_is_within_the_bound(world, dump_dir, sums, times):
    check_bound(world, dump_dir, SUMS[sums], times)


def check_bound(world, dump_dir, settings, times):
    """A spike of so many times the healthy norm, whose certificate the oracle confirms."""
    overrides = [f"{ACTOR}.grad_norm_threshold=40", *SMALL, *settings]
    plants = [(5, 3, TIMES[times])]
    found, _ = world.run("spikes.localize_planted", plants=plants, overrides=overrides, dump_dir=dump_dir)
    certificate, truth = found["event"]["certificate"], found["oracle_norm_without"]
    assert found["oracle_norm"] / truth == pytest.approx(times, rel=0.5)
    assert address(found["event"]) == {(5, 3)} and certificate["verdict"] == "explained"
    print(f"{certificate['method']}: {certificate['norm_after']} +- {certificate['error_bound']}, {truth}")
    computed = 0.02 * truth if BF16[0] in settings else 0.0  # the oracle computes in float32
    assert abs(certificate["norm_after"] - truth) <= certificate["error_bound"] + computed


def check_consequence(event, found, tolerance):
    """Hold the consequence of the step against the oracle; grad_clip is 1."""
    norm, head_norm = found["oracle_norm"], found["oracle_head_norm"]
    assert event["head_grad_norm"] == pytest.approx(head_norm, rel=tolerance)
    done = event["consequence"]
    assert done["grad_clip"] == 1.0 and done["clip_scale"] == pytest.approx(1 / norm, rel=tolerance)
    assert done["culprit_share"] == pytest.approx(sum(found["oracle_shares"]), abs=0.03)
    assert done["healthy_norm"] == pytest.approx(found["oracle_norm_without"] / norm, rel=2 * tolerance)
    metrics = found["metrics"]
    assert metrics["gradloc/head_grad_norm"] == [pytest.approx(head_norm, rel=tolerance)]
    for name in ("clip_scale", "culprit_share", "healthy_norm"):
        assert metrics[f"gradloc/{name}"] == [done[name]]


def test_a_loss_scale_that_overflows_is_no_spike(world, dump_dir):
    found, _ = world.run("spikes.overflow", overrides=ON + TAU + FSDP1 + FP16, dump_dir=dump_dir)
    assert not math.isfinite(found["norm"])
    assert found["events"] == 0


@default_on(verl07=NONE, verl09=("FSDP2",))
@pytest.mark.parametrize("strategy", [[], FSDP1], ids=["FSDP2", "FSDP1"])
def test_hybrid_sharding_does_not_count_replicas_twice(four_ranks, dump_dir, strategy):
    """Four ranks in two replicas: norms, shares and culprits are the oracle's."""
    hybrid = [f"{ACTOR}.fsdp_config.fsdp_size=2", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"]
    event, found = check_planted(four_ranks, dump_dir, PLANTS, TAU + hybrid + strategy)
    assert event["step"]["dp_size"] == 4
    check_consequence(event, found, 0.002)


@default_on(verl09=NONE)
def test_a_dynamic_batch_size_changes_nothing_but_the_dealing_out(world, dump_dir):
    """verl deals rows out by length, so only the culprits' places in the batch are compared."""
    dynamic = [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=40"]
    world.run("spikes.update_batch", kind="spike", overrides=ON + TAU + dynamic, dump_dir=dump_dir)
    (event,) = read_events(dump_dir)
    (culprit,) = event["culprits"]
    assert (culprit["row"], culprit["positions"]) == (5, [3])
    values = culprit["values"]  # on policy: the ratio is 1
    assert values["coefficient"] == pytest.approx(-values["advantage"] * values["loss_weight"], rel=1e-4)
    assert event["certificate"]["verdict"] == "explained"


def test_a_spike_in_a_later_mini_batch_and_epoch_is_found_there(world, dump_dir):
    several = [f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=2"]
    budget = [f"{ACTOR}.gradloc.trigger.max_events_per_step=4"]
    loss = [f"{ACTOR}.policy_loss.loss_mode=gpg"]  # no ratio that could clip the plant away
    overrides = ON + TAU + several + budget + loss
    found, _ = world.run("spikes.update_batch", kind="later", overrides=overrides, dump_dir=dump_dir)
    events = read_events(dump_dir)
    places = [(e["step"]["epoch"], e["step"]["mini_batch"]) for e in events]
    assert places == [(0, 1), (1, 1)]
    tokens = sum(found["tokens"][row] for row in (4, 5, 6, 7, 12, 13, 14, 15))  # each rank's second half
    for event in events:
        (culprit,) = event["culprits"]
        assert (culprit["row"], culprit["positions"]) == (6, [2])
        rewards = [culprit["reward"], *(sibling["reward"] for sibling in culprit["siblings"])]
        assert rewards == pytest.approx(found["rewards"][6:8])
        assert event["trigger"]["num_tokens"] == tokens


@default_on(verl07=NONE, verl09=("FSDP2",))
@pytest.mark.parametrize("layout", [[], pytest.param(FSDP1, marks=pytest.mark.slow)], ids=["FSDP2", "FSDP1"])
def test_a_token_after_a_picture_is_found_certified_and_masked(world, dump_dir, layout):
    row, position = PLACE

    def train(advantage, *settings, **asked):
        overrides = [*layout, *settings]
        return world.run(
            "tests.world.models.vision.train", overrides=overrides, dump_dir=dump_dir, advantage=advantage, **asked
        )

    alone, found = train(1e4), train(1e4, *ON, *TAU, has_oracle=True)
    assert [rank["weights"] for rank in alone] == [rank["weights"] for rank in found], "looking changes nothing"
    assert [rank["rng"] for rank in alone] == [rank["rng"] for rank in found]
    (event,) = read_events(dump_dir)
    (culprit,) = event["culprits"]
    assert (culprit["row"], culprit["positions"]) == (row, [position])
    assert culprit["share"] == pytest.approx(found[0]["shares"][0], abs=1e-3)
    assert event["shares"]["closure"] == pytest.approx(1, abs=0.05)
    assert event["trigger"]["grad_norm"] == pytest.approx(found[0]["norm"], rel=1e-4)
    folder = Path(dump_dir, event["folder"])
    (held,) = json.loads((folder / "sequences.json").read_text())["sequences"]
    picture = (folder / held["pictures"][0]).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(held["pictures"]) == 1 and held["pictures_note"] is None
    assert sum(name.startswith("vision layer") for name in culprit["layers"]) == 2
    assert event["certificate"]["verdict"] == "explained"
    assert event["certificate"]["norm_after"] == pytest.approx(found[0]["norm_without"], rel=2e-3)
    without, masked = train(0.0), train(1e4, *ON, *TAU, f"{ACTOR}.gradloc.action.mode=mask")
    assert [rank["weights"] for rank in without] == [rank["weights"] for rank in masked], "bit for bit"


@default_on(verl07=NONE, verl09=("FSDP2",))
@pytest.mark.parametrize(
    "layout", [[], pytest.param(["critic.strategy=fsdp"], marks=pytest.mark.slow)], ids=["FSDP2", "FSDP1"]
)
def test_a_return_that_no_value_explains_is_found_certified_and_masked_in_the_critic(world, single, dump_dir, layout):
    def train(action, **asked):
        settings = [*layout, f"{ACTOR}.gradloc.critic={action}", f"{ACTOR}.gradloc.trigger.tau=100"]
        asked |= {"overrides": settings, "dump_dir": dump_dir, "target": 1e4}
        return world.run("tests.world.models.critic.train", **asked)

    def left(ranks):
        return [(rank["weights"], rank["rng"]) for rank in ranks]

    (row, position), half = CRITICS_PLACE, 0.03  # verl 0.7's critic always computes in bfloat16
    alone, found = train("off"), train("observe")
    assert left(alone) == left(found), "looking changes nothing"
    assert "gradloc/critic_spikes" not in alone[0]["metrics"] and found[0]["metrics"]["gradloc/critic_spikes"] == 1
    (event,) = read_events(dump_dir)
    (culprit,) = event["culprits"]
    assert event["model"] == "critic" and (culprit["row"], culprit["positions"]) == (row, [position])
    assert culprit["cause"]["label"] == "value_outlier" and culprit["values"]["value_target"] == 1e4
    assert abs(culprit["values"]["value"]) < 1 and "log_prob" not in culprit["values"]
    assert culprit["grad_norm"] == pytest.approx(found[0]["culprit_norm"], rel=half)
    assert event["trigger"]["grad_norm"] == pytest.approx(found[0]["norm"], rel=half)
    assert event["certificate"]["verdict"] == "explained"
    assert event["certificate"]["norm_after"] == pytest.approx(found[0]["norm_without"], rel=half)
    assert "spike of the critic" in event["verdict"]
    argv = [str(Path(dump_dir, event["folder"])), "--model", f"{dump_dir}-critic"]
    (done,) = single.run("tests.replay.scenarios.run_replay", argv=argv, patches={})
    assert (done["code"], done["err"]) == (0, "")
    replayed = re.search(r"positions? .*: norm ([\d,.]+), share .*; event: norm ([\d,.]+)", done["out"]).groups()
    now, before = (float(norm.replace(",", "")) for norm in replayed)
    assert now == pytest.approx(before, rel=half)
    without, masked = train("off", lets_out=True), train("mask")
    assert masked[0]["metrics"]["gradloc/critic_mask"] == 1
    assert [rank["weights"] for rank in without] == [rank["weights"] for rank in masked], "bit for bit"


@default_on(verl07=("-1.0-True",), verl09=("1.0-False",))
@pytest.mark.parametrize(("value", "heals"), [(-1.0, True), (1.0, False)])
def test_the_bound_on_a_values_move_is_measured_as_the_update_with_it_is(world, dump_dir, value, heals):
    def train(limit, action):
        settings = [f"critic.cliprange_value={limit}", f"{ACTOR}.gradloc.critic={action}"]
        asked = {"overrides": [*settings, f"{ACTOR}.gradloc.trigger.tau=100"], "target": 1e4, "value": value}
        return world.run("tests.world.models.critic.train", dump_dir=dump_dir, **asked)[0]["metrics"]

    train(1e9, "observe")
    (event,) = read_events(dump_dir)
    given, (cure,) = event["culprits"][0]["values"], event["cures"]
    slope = 2 * given["loss_weight"] * (given["value"] - given["value_target"])  # of the squared error's mean
    assert given["coefficient"] == pytest.approx(slope, rel=0.01)
    truth = float(np.mean(train(0.2, "off")["critic/grad_norm"]))  # of one mini-batch, and on verl 0.9 its mean
    assert cure["line"] == "critic.cliprange_value=0.2"
    assert (cure["verdict"] == "healed") == (truth < event["trigger"]["threshold"]) == heals
    if heals:
        assert abs(cure["norm_after"] - truth) <= max(cure["error_bound"], 1e-4 * truth)
    else:  # the value is below: nothing bounds its way to the return
        assert cure["verdict"] == "not_healed" and not cure["forwards"]
        assert 0.9 * truth < cure["norm_after"] < 1.03 * truth, "at least"


def test_the_critics_loss_asked_again_gives_what_its_backward_left_or_would_have(world, dump_dir):
    settings = [f"{ACTOR}.gradloc.critic=observe", f"{ACTOR}.gradloc.trigger.tau=100"]
    asked = {"overrides": settings, "dump_dir": dump_dir, "target": 1e4, "other": 2e4}
    for found in world.run("tests.world.models.critic.own_loss", **asked):
        assert found["own"] and found["other"] and found["noted"]
    assert not found["unlike"], "rank 1 holds the return"
