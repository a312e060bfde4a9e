# SPDX-License-Identifier: Apache-2.0
"""The norm that a search gives for another setting is the one of the same update run with that setting."""

import pytest

from gradloc.explain.cures import MILDEST_FIRST
from tests.trainers import NONE, default_on
from tests.world.cures import CERTAINLY, KINDS

ACTOR = "actor_rollout_ref.actor"
BF16 = [f"{ACTOR}.fsdp_config.dtype=bfloat16"]
FSDP1 = [f"{ACTOR}.strategy=fsdp"]
HEALED_BY = {
    "pushed down": "dual_clip",
    "pushed up": "clip_ratios",
    "three pushed down": "dual_clip",
    "reference, mse": "kl_low_var",
    "reference, k3": "less_kl",
    "reference, kl": "less_kl",
    "entropy": "no_entropy",
    "far from the engine": "dual_clip",
    "left by the policy": "dual_clip",
    "weight": "truncate",
    "rewards, not divided": "divide",
    "rewards, divided": "truncate",
    "a token the trainer does not know": "dual_clip",
}
"""Others are healed by no setting."""
TWINS = ("pushed up", "rewards, not divided")
"""As natural spikes are made, of which the setting that heals is known: docs/natural-spikes.md."""


def check(world, dump_dir, kind, *settings, only=""):
    """Hold what was measured against the truth; returns the settings that were tried, by name."""
    given = {"kind": kind, "overrides": list(settings), "only": only, "dump_dir": dump_dir}
    found, other = world.run("cures.measured", timeout_s=400, **given)
    assert not only or bool(found["event"]["cures"]) == found["is_measured"], "as the docs say"
    event, cures = found["event"], {cure["name"]: cure for cure in found["event"]["cures"] or ()}
    assert event["cures"] == other["event"]["cures"], "all ranks say the same"
    for name, cure in cures.items():
        truth, norm = found["truths"][name], cure["norm_after"]
        if cure["verdict"] == "no_change":
            assert truth == pytest.approx(event["trigger"]["grad_norm"], rel=1e-5) and not cure["forwards"]
        elif not cure["forwards"]:
            assert norm <= truth * 1.05 or truth == norm, "at least"
        else:
            assert abs(norm - truth) <= max(cure["error_bound"], 1e-4 * truth)
            assert settings == tuple(BF16) or norm == pytest.approx(truth, rel=1e-4)
            assert cure["forwards"] == cure["backwards"] >= event["step"]["num_micro_batches"]
        is_under = truth < event["trigger"]["threshold"]
        assert cure["verdict"] in (("healed", "undecided") if is_under else ("not_healed", "no_change", "undecided"))
        assert 0 <= cure["changed_tokens"] <= 1 and (cure["kept"] is None or -1 <= cure["kept"] <= 1 + 1e-6)
    assert sum(cure["forwards"] > 0 for cure in cures.values()) <= 2
    return cures


SLOW = ("pushed up", "three pushed down", "reference, mse", "reference, k3")
"""Like others."""


@default_on(verl07=NONE, verl09=("pushed down",))
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS])
def test_the_norm_under_another_setting_is_that_of_the_update_run_with_it(world, dump_dir, kind):
    cures = check(world, dump_dir, kind)
    healed = [name for name, cure in cures.items() if cure["verdict"] == "healed"]
    assert healed == ([HEALED_BY[kind]] if kind in HEALED_BY else [])
    if kind in TWINS:
        assert [name for name, cure in cures.items() if cure["forwards"]] == healed, "the first that is measured"


def test_every_setting_has_a_spike():
    planted = {*CERTAINLY, *HEALED_BY.values(), "bound_value", "clamp_teacher"}  # these two in tests of their own
    assert {*MILDEST_FIRST} - planted == {"kl_mse"}, "plant it in CERTAINLY of tests/world/cures.py"


@default_on(verl07=NONE, verl09=("veto",))
@pytest.mark.parametrize("name", CERTAINLY)
def test_so_it_is_for_each_setting_that_others_come_before(world, dump_dir, name):
    for cure in check(world, dump_dir, CERTAINLY[name], only=name).values():
        assert cure["name"] == name and cure["forwards"] > 0


GROUPED = [
    ({}, False, 1.0, (True, True, False, set())),
    ({}, True, 1.0, (False, False, True, set())),
    ({}, False, 2.0, (False, False, False, set())),  # somebody has changed the advantages
    ({"adv_estimator": "gae"}, False, 1.0, (False, False, False, {"veto", "drop_sequences"})),
    ({"use_kl_in_reward": True}, False, 1.0, (False, False, False, {"veto", "drop_sequences"})),
    ({"rollout_correction": {"rollout_rs": "token"}}, False, 1.0, (True, True, False, {"veto", "drop_sequences"})),
    (
        {"rollout_correction": {"bypass_mode": True}},
        False,
        1.0,
        (True, True, False, {"veto", "drop_sequences", "weigh_tokens"}),
    ),
]


@pytest.mark.parametrize(("algorithm", "is_reweighted", "factor", "wanted"), GROUPED)
def test_the_driver_tells_of_advantages_what_is_so_and_of_settings_which_are_the_losss_alone(
    world, algorithm, is_reweighted, factor, wanted
):
    given = {"algorithm": algorithm, "is_reweighted": is_reweighted, "factor": factor}
    found, _ = world.run("cures.grouped", **given)
    others, *told = found["other_advantages"], found["is_divided"], found["is_reweighted"], {*found["refused_cures"]}
    assert (bool(others), *told) == wanted


@default_on(verl07=NONE, verl09=("veto",))
@pytest.mark.parametrize("name", ["veto", "drop_sequences", "weigh_tokens"])
def test_rows_that_only_fill_a_batch_up_are_corrected_by_nothing(world, name):
    wanted = {"rollout_is_weights": [1.0]} if name == "weigh_tokens" else {"response_mask": [0]}
    assert world.run("cures.corrected", name=name) == [wanted, wanted]


@default_on(verl09=NONE)
def test_with_none_allowed_not_one_pass_more_is_made(world, dump_dir):
    found, _ = world.run("cures.passes", kind="pushed down", dump_dir=dump_dir)
    without, two = found["0"], found["2"]
    assert without["cures"] is None and without["made"] == without["said"] == two["said"]
    assert [made - said for made, said in zip(two["made"], two["said"], strict=True)] == [2, 2], "one update"


@pytest.mark.parametrize("layout", [BF16, FSDP1], ids=["bf16", "FSDP1"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_so_it_is_in_half_precision_and_under_another_sharding(world, dump_dir, kind, layout):
    check(world, dump_dir, kind, *layout)


HEALED = ("pushed down", "weight", "reference, k3", "entropy", "mean_only", "veto")
"""Kinds of spikes, or settings that are tried alone."""


@default_on(verl07=NONE, verl09=("float32-pushed down",))
@pytest.mark.parametrize("name", HEALED)
@pytest.mark.parametrize("layout", [[], pytest.param(BF16, marks=pytest.mark.slow)], ids=["float32", "bf16"])
def test_a_healed_step_is_the_one_that_the_setting_takes_bit_for_bit(world, dump_dir, name, layout):
    given = {"kind": CERTAINLY[name], "only": name} if name in CERTAINLY else {"kind": name}
    for found in world.run("cures.healed", overrides=layout, dump_dir=dump_dir, **given):
        if name in CERTAINLY and not found["event"]["cures"]:
            pytest.skip("this trainer has no such setting")
        assert found["event"]["cures"][0]["name"] == name or name not in CERTAINLY
        assert found["event"]["action"]["taken"] == "heal"
        assert found["healed"] == found["wanted"]


@default_on(verl07=NONE, verl09=NONE)
def test_where_no_setting_heals_the_step_none_is_taken(world, dump_dir):
    overrides = [f"{ACTOR}.gradloc.action.mode=heal"]
    found, _ = world.run("cures.measured", kind="advantage", overrides=overrides, dump_dir=dump_dir)
    action = found["event"]["action"]
    assert (action["requested"], action["taken"]) == ("heal", "skip") and "no setting" in action["reason"]
