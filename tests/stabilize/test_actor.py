# SPDX-License-Identifier: Apache-2.0
"""layer_clip and skip_step on the real actor: two ranks, FSDP1 and FSDP2, beside slow versions."""

import json
import math

import pytest

ACTOR = "actor_rollout_ref.actor"
STABILIZE = f"{ACTOR}.gradloc.stabilize"
CLIP = f"{STABILIZE}.layer_clip"
ON = [f"{ACTOR}.spike_detection=True", f"{ACTOR}.grad_norm_threshold=640"]
FSDP1 = [f"{ACTOR}.strategy=fsdp"]
ORIGINAL = [*FSDP1, f"{ACTOR}.fsdp_config.use_orig_params=true"]
FP16 = [f"{ACTOR}.fsdp_config.dtype=float16"]
LOG_PROBS = ["actor_rollout_ref.rollout.calculate_log_probs=true"]
OFFLOADED = [f"{ACTOR}.fsdp_config.offload_policy=true"]
LAYOUTS = {
    "FSDP2 by layer": ([], "layer"),
    "FSDP2 with offload_policy, by layer": (OFFLOADED, "layer"),
    "FSDP2 by kind": ([], "kind"),
    "FSDP2 by tensor": ([], "tensor"),
    "FSDP1 by layer": (FSDP1, "layer"),
    "FSDP1 with original parameters, by layer": (ORIGINAL, "layer"),
    "FSDP1 with original parameters, by kind": (ORIGINAL, "kind"),
    "FSDP1 with original parameters, by tensor": (ORIGINAL, "tensor"),
}
CASES = [
    ("FSDP2 by layer", "adagc"),
    ("FSDP1 by layer", "zscore"),
    ("FSDP1 with original parameters, by tensor", "adagc"),
    ("FSDP2 by kind", "zscore"),
    ("FSDP2 with offload_policy, by layer", "adagc"),
]
CASES += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
        ("FSDP2 by layer", "zscore"),
        ("FSDP2 by tensor", "zscore"),
        ("FSDP1 by layer", "adagc"),
        ("FSDP1 with original parameters, by layer", "zscore"),
        ("FSDP1 with original parameters, by kind", "adagc"),
    )
]
SPIKING = {"layer": "layer 1", "kind": "mlp", "tensor": "model.layers.1.mlp.up_proj.weight"}
FACTOR = 50.0


def rule(name, group, **settings):
    given = {"rule": name, "group": group, **settings}
    return [f"{CLIP}.{key}={value}" for key, value in given.items()]


@pytest.mark.parametrize("layout", ["FSDP2 by layer", "FSDP1 by layer"])
def test_under_the_global_clip_one_spiking_layer_shrinks_all_others(world, dump_dir, layout):
    overrides, group = LAYOUTS[layout]
    arguments = dict(dump_dir=dump_dir, group=group, spiking="layer 1", num_steps=1)
    calm, _ = world.run(
        "tests.stabilize.scenarios.spike_one_layer",
        overrides=[*overrides, f"{ACTOR}.grad_clip=1e9"],
        factor=1.0,
        **arguments,
    )
    num_layers = len(calm["sizes"])
    found, _ = world.run(
        "tests.stabilize.scenarios.spike_one_layer",
        # the limit is the norm without the spike, so that it alone makes the clip act
        overrides=[*overrides, f"{ACTOR}.grad_clip={math.sqrt(num_layers)}"],
        factor=FACTOR,
        **arguments,
    )
    expected = 1 / math.sqrt(1 + (FACTOR**2 - 1) / num_layers)
    assert expected < 0.05
    for layer, size in found["sizes"].items():
        assert size == pytest.approx(expected, rel=1e-4), layer


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_under_layer_clip_the_others_keep_their_direction_and_size(world, dump_dir, layout, name):
    overrides, group = LAYOUTS[layout]
    found, _ = world.run(
        "tests.stabilize.scenarios.spike_one_layer",
        overrides=[*overrides, *rule(name, group, warmup=3), f"{ACTOR}.grad_clip=1e9"],
        dump_dir=dump_dir,
        group=group,
        spiking=SPIKING[group],
        factor=FACTOR,
        num_steps=4,
    )
    allowed = {"adagc": 2.0, "zscore": math.exp(6 * 0.05)}[name]
    for key, size in found["sizes"].items():
        if key == SPIKING[group]:
            assert size == pytest.approx(allowed / FACTOR, rel=1e-3)
            assert found["cosines"][key] == pytest.approx(1.0, abs=1e-6)
        else:
            assert found["same"][key], key
    num_groups = len(found["sizes"])
    share = found["metrics"]["gradloc/layer_clip/share"]
    assert share == [[pytest.approx(1 / num_groups)]] * 2


SETTINGS = {
    "adagc": {"relative_factor": 1.1, "beta": 0.9, "warmup": 3},
    "zscore": {"window": 8, "num_deviations": 2.0, "warmup": 3},
}


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_the_optimizer_gets_the_whole_gradient_clipped_by_plain_loops(world, dump_dir, layout, name):
    overrides, group = LAYOUTS[layout]
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
        assert min(found["factors"][5]) < 0.1, "the culprit of step 6 is clipped"
        for step, metrics in enumerate(found["metrics"]):
            factors = found["factors"][step]
            share = sum(factor < 1 for factor in factors) / found["num_groups"]
            assert metrics["actor/grad_norm"][0] == pytest.approx(found["norms"][step], rel=1e-5)
            assert metrics["gradloc/layer_clip/share"] == [pytest.approx(share)]
            assert metrics["gradloc/layer_clip/scale_min"] == [pytest.approx(min(factors))]
            assert metrics["gradloc/layer_clip/norm_after"] == [pytest.approx(found["after"][step], rel=1e-5)]
            assert metrics["gradloc/layer_clip/warmup"] == [1.0 if step < 2 else 0.0]


@pytest.mark.parametrize("layout", [[], OFFLOADED, FSDP1, FSDP1 + FP16], ids=["FSDP2", "offloaded", "FSDP1", "fp16"])
def test_an_outlier_is_skipped_and_leaves_weights_and_moments_as_they_were(world, dump_dir, layout):
    skip = [f"{STABILIZE}.skip_step.enable=true", f"{STABILIZE}.skip_step.window=8"]
    answers = world.run("tests.stabilize.scenarios.skip_an_outlier", overrides=skip + layout, dump_dir=dump_dir)
    for found in answers:
        hashes, metrics = found["hashes"], found["metrics"]
        assert hashes[4] == hashes[3]
        assert len(set(hashes)) == 5, "every other step was taken"
        skipped = [step["gradloc/skip_step/skipped"] for step in metrics]
        assert skipped == [[0], [0], [0], [0], [1], [0]]
        reported = [step["actor/grad_norm"][0] for step in metrics]
        scale = 8.0 if layout[-1:] == FP16 else 1.0
        assert reported[4] > 100 * reported[3]
        if scale == 1.0:
            assert reported == pytest.approx(found["norms"], rel=1e-5)
        assert metrics[4]["gradloc/skip_step/threshold"][0] < reported[4]
        assert metrics[3]["gradloc/skip_step/threshold"] == [0.0]
    assert found["state"][""]["skip_step"]["norms"] == reported


BOTH = [
    *rule("zscore", "layer", warmup=2),
    f"{STABILIZE}.skip_step.enable=true",
    f"{STABILIZE}.skip_step.num_deviations=1e9",
]


@pytest.mark.parametrize("layout", [[], FSDP1], ids=["FSDP2", "FSDP1"])
def test_a_gradient_that_is_not_finite_teaches_nothing_and_is_counted(world, dump_dir, layout):
    kinds = ["healthy", "healthy", "nan", "healthy"]
    for steps in world.run("tests.stabilize.scenarios.learn", kinds=kinds, overrides=BOTH + layout, dump_dir=dump_dir):
        assert steps[2]["weights"] == steps[1]["weights"]
        assert steps[2]["state"] == steps[1]["state"]
        assert steps[2]["metrics"]["gradloc/layer_clip/nonfinite"][0] > 0
        assert steps[3]["weights"] != steps[2]["weights"]
        assert steps[3]["state"] != steps[2]["state"]
        assert steps[3]["metrics"]["gradloc/layer_clip/nonfinite"] == [0]
        assert all(step["metrics"].keys() == steps[0]["metrics"].keys() for step in steps)


def test_a_loss_scale_that_overflows_teaches_nothing(world, dump_dir):
    for steps in world.run(
        "tests.stabilize.scenarios.overflow_and_recover",
        overrides=BOTH + FSDP1 + FP16,
        dump_dir=dump_dir,
    ):
        assert not math.isfinite(steps[1]["norm"])
        assert steps[1]["weights"] == steps[0]["weights"]
        assert steps[1]["state"] == steps[0]["state"]
        assert steps[3]["state"] != steps[2]["state"]
        assert math.isfinite(steps[3]["norm"])


def test_a_step_that_localization_took_away_teaches_nothing(world, dump_dir):
    kinds = ["healthy", "healthy", "spike", "healthy"]
    action = [f"{ACTOR}.gradloc.action.mode=skip"]
    for steps in world.run(
        "tests.stabilize.scenarios.learn",
        kinds=kinds,
        overrides=ON + BOTH + action,
        dump_dir=dump_dir,
    ):
        assert steps[2]["weights"] == steps[1]["weights"]
        assert steps[2]["state"] == steps[1]["state"]
        assert steps[3]["state"] != steps[2]["state"]
    assert [step["actions"] for step in steps] == [[], [], ["skip"], []]


def test_a_step_without_its_culprits_is_clipped_and_learned_as_it_is_then(world, dump_dir):
    kinds = ["healthy", "healthy", "healthy", "spike"]
    arguments = dict(kinds=kinds, dump_dir=dump_dir)
    name = "tests.stabilize.scenarios.learn"
    mask = [f"{ACTOR}.gradloc.action.mode=mask"]
    for steps in world.run(name, overrides=ON + BOTH + mask, **arguments):
        assert steps[3]["weights"] != steps[2]["weights"]
        norms = steps[3]["state"][""]["skip_step"]["norms"]
        assert norms[3] < 3 * max(norms[:3]), "the norm that was learned has no culprit in it"
        assert steps[3]["metrics"]["gradloc/layer_clip/scale_min"][0] > 0.3
    assert steps[3]["actions"] == ["mask"]
    for steps in world.run(name, overrides=BOTH, **arguments):
        assert steps[3]["metrics"]["gradloc/layer_clip/scale_min"][0] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], FSDP1], ids=["FSDP2", "FSDP1"])
def test_under_hybrid_sharding_replicas_stay_equal_and_the_norm_counts_them_once(four_ranks, world, dump_dir, layout):
    kinds = ["healthy", "healthy", "healthy", "spike", "healthy"]
    overrides = [*layout, *rule("zscore", "layer", warmup=2)]
    name = "tests.stabilize.scenarios.learn"
    hybrid = [f"{ACTOR}.fsdp_config.fsdp_size=2"]
    found = four_ranks.run(name, timeout_s=300, kinds=kinds, overrides=overrides + hybrid, dump_dir=dump_dir)
    plain = world.run(name, kinds=kinds, overrides=overrides, dump_dir=dump_dir)
    for step in range(len(kinds)):
        hashes = [steps[step]["weights"] for steps in found]
        assert hashes[:2] == hashes[2:], "ranks 0 and 2 hold the same shard, as do 1 and 3"
        metrics = found[0][step]["metrics"]
        assert metrics["gradloc/layer_clip/norm_after"] == pytest.approx(
            plain[0][step]["metrics"]["gradloc/layer_clip/norm_after"], rel=1e-3
        )
    assert found[0][3]["metrics"]["gradloc/layer_clip/scale_min"][0] < 0.01


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
    "FSDP2, z-score, two mini-batches": [
        *rule("zscore", "layer", warmup=3),
        f"{ACTOR}.ppo_mini_batch_size=8",
    ],
    "FSDP1, z-score": [*FSDP1, *rule("zscore", "layer", warmup=3)],
    "FSDP1, adagc, localization, too": [*FSDP1, *rule("adagc", "layer", warmup=6), *ON],
}


@pytest.mark.parametrize("case", RESUMES)
def test_a_resumed_run_goes_on_bit_by_bit_with_everything_on(world, dump_dir, case):
    for found in world.run(
        "tests.stabilize.scenarios.resume",
        overrides=ALL + RESUMES[case],
        dump_dir=dump_dir,
        num_steps=8,
        cut=5,
    ):
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


@pytest.mark.parametrize("layout", [[], FSDP1], ids=["FSDP2", "FSDP1"])
def test_stabilizers_with_nothing_to_do_are_unpatched_verl_bit_for_bit(world, unpatched_world, dump_dir, layout):
    arguments = dict(dump_dir=dump_dir, num_steps=4, dropout=0.1, rollout_noise=0.3)
    on = world.run("spikes.train", overrides=LIMITS + layout + NOTHING_TO_DO, **arguments)
    unpatched = unpatched_world.run("spikes.train", overrides=LIMITS + layout, **arguments)
    for ours, theirs in zip(on, unpatched, strict=True):
        assert ours["weights"] == theirs["weights"]
        assert ours["rng"] == theirs["rng"]


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
