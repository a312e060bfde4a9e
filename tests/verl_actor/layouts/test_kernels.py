# SPDX-License-Identifier: Apache-2.0
"""Ways to compute the same: log-probs without logits, and a compiled entropy."""

import pytest

from tests.world.events import read_events

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
TAU = [f"{ACTOR}.grad_norm_threshold=640"]
PLANTS = [(2, 3, -1e4), (11, 5, -8e3)]
BF16 = [f"{ACTOR}.fsdp_config.dtype=bfloat16"]
FUSED = [f"{MODEL}.use_fused_kernels=true", f"{ACTOR}.entropy_coeff=0.05"]
COMPILED = [f"{ACTOR}.use_torch_compile=true", f"{MODEL}.use_remove_padding=true", f"{ACTOR}.entropy_coeff=0.05"]
FSDP1 = [f"{ACTOR}.strategy=fsdp"]
LAYOUTS = {
    "fused, FSDP1, bf16": FUSED + FSDP1 + BF16,
    "fused, FSDP1": FUSED + FSDP1,
    "fused, FSDP2, bf16": FUSED + BF16,
    "fused, FSDP2": FUSED,
    "compiled": COMPILED,
}


@pytest.mark.parametrize(
    "name", ["fused, FSDP1, bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in list(LAYOUTS)[1:])]
)
def test_the_planted_culprits_are_the_oracles(world, dump_dir, name):
    found, _ = world.run(
        "spikes.localize_planted", plants=PLANTS, overrides=TAU + LAYOUTS[name], dump_dir=dump_dir, timeout_s=600
    )
    (event,) = read_events(dump_dir)
    half = "bf16" in name
    assert sorted((c["row"], c["positions"][0]) for c in event["culprits"]) == found["planted"]
    assert event["certificate"]["verdict"] == "explained"
    near = 0.05 if half else 2e-3
    assert event["certificate"]["norm_after"] == pytest.approx(found["oracle_norm_without"], rel=near)
    for culprit, share in zip(event["culprits"], found["oracle_shares"], strict=True):
        assert culprit["share"] == pytest.approx(share, abs=0.03 if half else 2e-3)
    assert event["shares"]["is_trusted"]
    assert event["shares"]["closure"] == pytest.approx(1, abs=0.2 if half else 0.01)


@pytest.mark.parametrize(
    ("mode", "same"), [("mask", "as_without"), pytest.param("observe", "as_spiked", marks=pytest.mark.slow)]
)
def test_masking_is_training_without_the_culprit_and_observing_changes_nothing(world, dump_dir, mode, same):
    settings, layout = [*TAU, f"{ACTOR}.gradloc.action.mode={mode}"], [FUSED[0], *FSDP1, *BF16]
    found, other = world.run("actions.train_epochs", overrides=settings, dump_dir=dump_dir, layout=layout)
    assert found[same] and other[same], "bit for bit"
    assert found["metrics"]["gradloc/spikes"] == [3]
