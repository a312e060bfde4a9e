# SPDX-License-Identifier: Apache-2.0
"""layer_clip and skip_step on the real actor: two ranks, FSDP1 and FSDP2, beside slow versions."""

import json

import pytest

from tests.trainers import NONE, default_on

ACTOR = "actor_rollout_ref.actor"
STABILIZE = f"{ACTOR}.gradloc.stabilize"
CLIP = f"{STABILIZE}.layer_clip"
ON = [f"{ACTOR}.spike_detection=True", f"{ACTOR}.grad_norm_threshold=640"]
FSDP1 = [f"{ACTOR}.strategy=fsdp"]
ORIGINAL = [*FSDP1, f"{ACTOR}.fsdp_config.use_orig_params=true"]
FP16 = [f"{ACTOR}.fsdp_config.dtype=float16"]
LOG_PROBS = ["actor_rollout_ref.rollout.calculate_log_probs=true"]
OFFLOADED = [f"{ACTOR}.fsdp_config.offload_policy=true"]
LEARN = "tests.stabilize.scenarios.learn"
CASES = {
    "FSDP2, by layer, adagc": ([], "layer", "adagc"),
    "FSDP1, by layer, zscore": (FSDP1, "layer", "zscore"),
    "FSDP1 with original parameters, by tensor, adagc": (ORIGINAL, "tensor", "adagc"),
    "FSDP2, by kind, zscore": ([], "kind", "zscore"),
    "FSDP2 with offload_policy, by layer, adagc": (OFFLOADED, "layer", "adagc"),
}


def rule(name, group, **settings):
    given = {"rule": name, "group": group, **settings}
    return [f"{CLIP}.{key}={value}" for key, value in given.items()]


SETTINGS = {
    "adagc": {"relative_factor": 1.1, "beta": 0.9, "warmup": 3},
    "zscore": {"window": 8, "num_deviations": 2.0, "warmup": 3},
}


@default_on(verl07=("FSDP1 with original parameters, by tensor, adagc",), verl09=("FSDP2, by kind, zscore",))
@pytest.mark.parametrize("case", CASES)
def test_the_optimizer_gets_the_whole_gradient_clipped_by_plain_loops(world, dump_dir, case):
    overrides, group, name = CASES[case]
    settings = dict(SETTINGS[name])
    expected = dict(settings)
    if name == "adagc":
        expected["factor"] = expected.pop("relative_factor")
    answers = world.run(
        "tests.stabilize.scenarios.clip_as_the_slow_version",
        overrides=[*overrides, *rule(name, group, **settings)],
        dump_dir=dump_dir,
        group=group,
        rule=name,
        settings=expected,
    )
    for found in answers:
        assert found["worst"] < 1e-5
        assert len(found["untouched"]) > 5 and all(found["untouched"]), "what is not clipped keeps its bits"
        assert min(found["factors"][5]) < 0.1, "the culprit of step 6 is clipped"
        for step, metrics in enumerate(found["metrics"]):
            factors = found["factors"][step]
            share = sum(factor < 1 for factor in factors) / len(factors)
            assert metrics["actor/grad_norm"][0] == pytest.approx(found["norms"][step], rel=1e-5)
            assert metrics["gradloc/layer_clip/share"] == [pytest.approx(share)]
            assert metrics["gradloc/layer_clip/scale_min"] == [pytest.approx(min(factors))]
            assert metrics["gradloc/layer_clip/norm_after"] == [pytest.approx(found["after"][step], rel=1e-5)]
            assert metrics["gradloc/layer_clip/warmup"] == [1.0 if step < 2 else 0.0]


@default_on(verl07=("FSDP2",), verl09=("fp16",))
@pytest.mark.parametrize("layout", [[], OFFLOADED, FSDP1, FSDP1 + FP16], ids=["FSDP2", "offloaded", "FSDP1", "fp16"])
def test_an_outlier_is_skipped_and_leaves_weights_and_moments_as_they_were(world, dump_dir, layout):
    skip = [f"{STABILIZE}.skip_step.enable=true", f"{STABILIZE}.skip_step.window=8"]
    kinds = ["healthy"] * 4 + ["spike", "healthy"]
    for steps in world.run(LEARN, kinds=kinds, overrides=skip + layout, dump_dir=dump_dir):
        weights, metrics = [step["weights"] for step in steps], [step["metrics"] for step in steps]
        assert weights[4] == weights[3]
        assert len(set(weights)) == 5, "every other step was taken"
        assert [step["gradloc/skip_step/skipped"] for step in metrics] == [[0], [0], [0], [0], [1], [0]]
        reported = [step["actor/grad_norm"][0] for step in metrics]
        assert reported[4] > 100 * reported[3]
        assert metrics[4]["gradloc/skip_step/threshold"][0] < reported[4]
        assert metrics[3]["gradloc/skip_step/threshold"] == [0.0]
        assert steps[-1]["state"][""]["skip_step"]["norms"] == reported


BOTH = [
    *rule("zscore", "layer", warmup=2),
    f"{STABILIZE}.skip_step.enable=true",
    f"{STABILIZE}.skip_step.num_deviations=1e9",
]


@default_on(verl07=NONE)
def test_a_step_without_its_culprits_is_clipped_and_learned_as_it_is_then(world, dump_dir):
    kinds = ["healthy", "healthy", "healthy", "spike"]
    arguments = dict(kinds=kinds, dump_dir=dump_dir)
    mask = [f"{ACTOR}.gradloc.action.mode=mask"]
    for steps in world.run(LEARN, overrides=ON + BOTH + mask, **arguments):
        assert steps[3]["weights"] != steps[2]["weights"]
        norms = steps[3]["state"][""]["skip_step"]["norms"]
        assert norms[3] < 3 * max(norms[:3]), "the norm that was learned has no culprit in it"
        assert steps[3]["metrics"]["gradloc/layer_clip/scale_min"][0] > 0.3
    assert steps[3]["actions"] == ["mask"]
    for steps in world.run(LEARN, overrides=BOTH, **arguments):
        assert steps[3]["metrics"]["gradloc/layer_clip/scale_min"][0] < 0.01


ALL = [
    *LOG_PROBS,
    f"{STABILIZE}.token_clip.mode=clamp",
    f"{STABILIZE}.token_clip.upper=1.5",
    f"{STABILIZE}.seq_clip.mode=mask",
    f"{STABILIZE}.seq_clip.lower=0.9",
    f"{STABILIZE}.skip_step.enable=true",
    f"{STABILIZE}.skip_step.window=8",
    f"{STABILIZE}.skip_step.num_deviations=3",
]
RESUMES = {
    "FSDP2, adagc": [*rule("adagc", "tensor", warmup=3)],
    "FSDP2, z-score, two mini-batches": [*rule("zscore", "layer", warmup=3), f"{ACTOR}.ppo_mini_batch_size=8"],
    "FSDP1, z-score": [*FSDP1, *rule("zscore", "layer", warmup=3)],
    "FSDP1, adagc, localization, too": [*FSDP1, *rule("adagc", "layer", warmup=6), *ON],
}


@default_on(verl07=("FSDP2, adagc",), verl09=NONE)
@pytest.mark.parametrize("case", RESUMES)
def test_a_resumed_run_goes_on_bit_by_bit_with_everything_on(world, dump_dir, case):
    given = dict(overrides=ALL + RESUMES[case], dump_dir=dump_dir, num_steps=8, cut=5)
    for found in world.run("tests.stabilize.scenarios.resume", **given):
        assert found["resumed"] == found["whole"]
        assert found["saved"]["stabilizers"][""].keys() == {"layer_clip", "skip_step"}
        json.dumps(found["saved"], allow_nan=False)


NOTHING_TO_DO = [
    *LOG_PROBS,
    f"{STABILIZE}.token_clip.mode=clamp",
    f"{STABILIZE}.token_clip.upper=1e9",
    f"{STABILIZE}.seq_clip.mode=mask",
    f"{STABILIZE}.seq_clip.upper=1e9",
    *rule("adagc", "layer", warmup=2, relative_factor=1e9),
    f"{STABILIZE}.skip_step.enable=true",
    f"{STABILIZE}.skip_step.num_deviations=1e9",
]
LIMITS = [f"{ACTOR}.grad_clip=1e9"]


@default_on(verl07=("FSDP1",), verl09=("FSDP2",))
@pytest.mark.parametrize("layout", [[], FSDP1], ids=["FSDP2", "FSDP1"])
def test_stabilizers_with_nothing_to_do_are_unpatched_verl_bit_for_bit(world, unpatched_world, dump_dir, layout):
    arguments = dict(dump_dir=dump_dir, num_steps=4, dropout=0.1, rollout_noise=0.3)
    on = world.run("spikes.train", overrides=LIMITS + layout + NOTHING_TO_DO, **arguments)
    unpatched = unpatched_world.run("spikes.train", overrides=LIMITS + layout, **arguments)
    for ours, theirs in zip(on, unpatched, strict=True):
        assert ours["weights"] == theirs["weights"]
        assert ours["rng"] == theirs["rng"]


@default_on(verl07=("FSDP1",), verl09=NONE)
@pytest.mark.parametrize("layout", [[], FSDP1], ids=["FSDP2", "FSDP1"])
def test_observing_a_spike_leaves_a_stabilized_run_as_it_would_have_been(world, dump_dir, layout):
    arguments = dict(dump_dir=dump_dir, num_steps=4, dropout=0.1, spike_at=3, rollout_noise=0.5)
    stabilized = ALL + layout + rule("zscore", "layer", warmup=2)
    off = world.run("spikes.train", overrides=stabilized, **arguments)
    on = world.run("spikes.train", overrides=ON + stabilized, **arguments)
    assert on[0]["events"] == 1
    for ours, theirs in zip(on, off, strict=True):
        assert ours["weights"] == theirs["weights"]
        assert ours["rng"] == theirs["rng"]
        assert ours["norms"] == theirs["norms"]


@default_on(verl07=NONE)
def test_a_run_under_safe_trains(world, dump_dir):
    given = dict(overrides=["+gradloc=safe"], dump_dir=dump_dir, num_steps=2, rollout_noise=0.3)
    for found in world.run("spikes.train", **given):
        assert "gradloc/token_clip/share" in found["metrics"]
        assert "gradloc/layer_clip/share" in found["metrics"]
