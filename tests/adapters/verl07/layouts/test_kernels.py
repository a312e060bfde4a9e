# SPDX-License-Identifier: Apache-2.0
"""Ways to compute the same: log-probs without logits, a compiled entropy, and Liger's kernels.

The last on triton's interpreter, which needs no GPU: docs/compatibility.md has the command.
"""

import os

import pytest

from tests.world.events import read_events

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
TAU = [f"{ACTOR}.grad_norm_threshold=640"]
PLANTS = [(2, 3, -1e4), (11, 5, -8e3)]
BF16 = [f"{ACTOR}.fsdp_config.dtype=bfloat16"]
FUSED = [f"{MODEL}.use_fused_kernels=true", f"{ACTOR}.entropy_coeff=0.05"]
COMPILED = [f"{ACTOR}.use_torch_compile=true", f"{MODEL}.use_remove_padding=true", f"{ACTOR}.entropy_coeff=0.05"]
LIGER = [f"{MODEL}.use_liger=true", f"{ACTOR}.ppo_epochs=1"]  # the interpreter takes its time
FSDP1 = [f"{ACTOR}.strategy=fsdp"]
LAYOUTS = {
    "fused, FSDP1, bf16": FUSED + FSDP1 + BF16,
    "fused, FSDP1": FUSED + FSDP1,
    "fused, FSDP2, bf16": FUSED + BF16,
    "fused, FSDP2": FUSED,
    "compiled": COMPILED,
    "Liger": LIGER,
}
NEEDS_INTERPRETER = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs triton's interpreter: docs/compatibility.md"
)


def marks(name):
    return [pytest.mark.slow, NEEDS_INTERPRETER] if name == "Liger" else [pytest.mark.slow]


def run(world, scenario, name, **given):
    if name == "Liger":
        scenario, given = "tests.world.models.fused.with_liger", {"scenario": scenario, **given}
    return world.run(scenario, timeout_s=900, **given)


@pytest.mark.parametrize(
    "name", ["fused, FSDP1, bf16", *(pytest.param(name, marks=marks(name)) for name in list(LAYOUTS)[1:])]
)
def test_the_planted_culprits_are_the_oracles(world, dump_dir, name):
    given = {"plants": PLANTS, "overrides": TAU + LAYOUTS[name], "dump_dir": dump_dir}
    found, _ = run(world, "spikes.localize_planted", name, **given)
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
@pytest.mark.parametrize("name", ["fused, FSDP1, bf16", pytest.param("Liger", marks=marks("Liger"))])
def test_masking_is_training_without_the_culprit_and_observing_changes_nothing(world, dump_dir, name, mode, same):
    settings = [*TAU, f"{ACTOR}.gradloc.action.mode={mode}"]
    layout = [setting for setting in LAYOUTS[name] if "entropy" not in setting]
    found, other = run(world, "actions.train_epochs", name, overrides=settings, dump_dir=dump_dir, layout=layout)
    assert found[same] and other[same], "bit for bit"
    assert found["metrics"]["gradloc/spikes"] == [1 if name == "Liger" else 3]
