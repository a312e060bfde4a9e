# SPDX-License-Identifier: Apache-2.0
"""Every kind of spike in verl's actor gets its own cause, and none of its neighbours'."""

import pytest

from tests.world.events import read_events
from tests.world.verdicts import OPPOSITE

ACTOR = "actor_rollout_ref.actor"
ENTROPY = [f"{ACTOR}.entropy_coeff=3000"]
CAUSES = {
    "token": "extreme_advantage",
    "opposite": "extreme_advantage",
    "twelve": "extreme_advantage",
    "sequence": "extreme_advantage",
    "weight": "non_finite_weights",
    "padding": "non_finite_padding",
    "scale": "batch_scale",
    "entropy": "entropy_term",
}


def spiked(world, dump_dir, kind, *settings):
    tau = [f"{ACTOR}.grad_norm_threshold=640", *(ENTROPY if kind == "entropy" else []), *settings]
    world.run("verdicts.spike", kind=kind, overrides=tau, dump_dir=dump_dir)
    return read_events(dump_dir)[-1]


@pytest.mark.parametrize("kind", CAUSES)
def test_a_spike_has_the_cause_of_its_kind(world, dump_dir, kind):
    event = spiked(world, dump_dir, kind)
    assert event["cause"]["label"] == CAUSES[kind]
    named = {(culprit["row"], position) for culprit in event["culprits"] for position in culprit["positions"]}
    if kind in ("weight", "padding", "scale"):
        assert named == set() and "no token made it" in event["verdict"]
    if kind == "weight":
        assert event["cause"]["names"] == ["model.layers.1.mlp.up_proj.weight"]
        assert event["search"]["forwards"] == event["search"]["backwards"] == 0
        assert len(str(event)) < 8000, "a few kilobytes"
    if kind == "padding":
        assert event["cause"]["names"] == ["advantages"]
    if kind == "scale":
        assert event["cause"]["numbers"]["advantage_over_run"] > 1e3
    if kind == "token":
        assert named == {(5, 3)} and len(event["culprits"][0]["siblings"]) == 1
        consequence = event["consequence"]
        assert consequence["clip_scale"] < 0.1 and consequence["culprit_share"] == pytest.approx(1, abs=0.01)
        assert "The optimizer was given the gradient clipped to 1" in event["verdict"]
    if kind == "opposite":
        assert named == {(row, position) for row, position, _ in OPPOSITE}
    if kind == "sequence":
        assert [(culprit["span"], culprit["row"]) for culprit in event["culprits"]] == [("sequence", 3)]
    if kind == "twelve":
        assert len(event["culprits"]) == 8 and event["search"]["status"] == "max_culprits"
        assert event["search"]["num_more"] >= 1 and "at least" in event["verdict"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [["strategy=fsdp"], ["fsdp_config.dtype=bfloat16"]], ids=["fsdp1", "bf16"])
@pytest.mark.parametrize("kind", ["token", "padding", "scale", "entropy"])
def test_so_it_has_under_fsdp1_and_in_half_precision(world, dump_dir, kind, settings):
    event = spiked(world, dump_dir, kind, *(f"{ACTOR}.{setting}" for setting in settings))
    assert event["cause"]["label"] == CAUSES[kind]
