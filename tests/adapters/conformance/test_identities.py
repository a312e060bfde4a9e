# SPDX-License-Identifier: Apache-2.0
"""Probes are parts of the real gradient, shares add up to 1, and a masked step is the right one."""

import pytest

from tests.adapters.conformance.layouts.checks import ACTOR, check_masked_step
from tests.trainers import NONE, VERSION, default_on

TERMS = [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.entropy_coeff=0.05"]
OFF_POLICY = [f"{ACTOR}.ppo_epochs=2"]  # the first epoch is looked at; it uses the stored log-probs
FSDP1 = [f"{ACTOR}.strategy=fsdp"]
BF16 = [f"{ACTOR}.fsdp_config.dtype=bfloat16"]
KEEP = [f"{ACTOR}.fsdp_config.reshard_after_forward=false"]

MODES = ["vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo"]
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@default_on(verl07=("kl_cov",), verl09=NONE)
@pytest.mark.parametrize("mode", MODES)
def test_the_probes_of_a_random_cover_add_up_to_the_gradient_under_every_loss(world, dump_dir, mode):
    """On-policy and off, each loss with two of the means: each mean with four of the losses."""
    which = MODES.index(mode)
    for aggregation, policy in ((which, []), (which + 1 + which // 4, OFF_POLICY)):
        loss = [f"{ACTOR}.policy_loss.loss_mode={mode}", f"{ACTOR}.policy_loss.clip_cov_ratio=0.1"]
        overrides = [*loss, f"{ACTOR}.loss_agg_mode={AGGREGATIONS[aggregation % 4]}", *TERMS, *policy]
        found, other = world.run("identities.cover_error", overrides=overrides, dump_dir=dump_dir)
        assert found["error"] < 1e-5, overrides
        assert found["error"] == other["error"], "every rank measures the same"
        assert all(norm > 0 for norm in found["parts"])


EDITS = {"advantages": [(3, 2, 1e3), (12, 1, -0.5)], "old_log_probs": [(3, 2, -4.5), (12, 1, -9.0)]}


@default_on(verl07=NONE, verl09=("bf16-on-policy",))
@pytest.mark.parametrize("policy", [[], OFF_POLICY], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("dtype", [[], BF16], ids=["float32", "bf16"])
def test_the_loss_asked_again_gives_what_the_backward_left_and_other_tensors_what_theirs_leaves(
    world, dump_dir, dtype, policy
):
    edits = {"advantages": EDITS["advantages"], **(EDITS if policy else {})}  # on-policy no old log-prob counts
    for edited in ({}, edits):
        found, _ = world.run(
            "identities.own_loss", overrides=[*TERMS, *dtype, *policy], dump_dir=dump_dir, edits=edited
        )
        assert found["is_same"], "bit for bit"
        assert found["size"] > 0 and found["error"] < (1e-6 if dtype == [] else 1e-2)
        assert bool(edited) == (found["changed"] > 0.5), "the other batch is another one"


def test_bypass_mode_is_refused_by_verl_0_7_0_itself_and_looked_into_on_the_next(world, dump_dir):
    """It needs policy_loss.rollout_correction, which 0.7.0's dataclass lacks."""
    arguments = dict(overrides=[f"{ACTOR}.policy_loss.loss_mode=bypass_mode"], dump_dir=dump_dir)
    if VERSION == "0.7.0":
        with pytest.raises(AssertionError, match="rollout_correction"):
            world.run("identities.cover_error", **arguments)
    else:
        assert world.run("identities.cover_error", **arguments)[0]["error"] < 1e-5


LAYOUTS = {
    "FSDP2": [],
    "FSDP2, weights kept": KEEP,
    "FSDP1": FSDP1,
    "FSDP1, weights kept": FSDP1 + KEEP,
    "FSDP2, entropy and KL": TERMS,
    "FSDP2, bf16": BF16,
    "FSDP1, bf16": FSDP1 + BF16,
}


@default_on(verl07=("FSDP2, weights kept", "FSDP1, bf16"), verl09=("FSDP2, entropy and KL",))
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_shares_of_all_tokens_add_up_however_they_are_grouped(world, dump_dir, layout):
    found, other = world.run("identities.share_identities", overrides=layout, dump_dir=dump_dir)
    low, high = (0.8, 1.25) if layout[-1:] == BF16 else (0.95, 1.05)
    assert low <= found["closure"] <= high
    assert found["is_trusted"]
    assert sum(found["by_micro_batch"]) == pytest.approx(found["closure"], abs=1e-9)
    assert sum(found["by_rank"]) == pytest.approx(found["closure"], abs=1e-9)
    assert found["top"] == pytest.approx(0.91, abs=0.08)
    assert found["weights_restored"] and other["weights_restored"]
    if BF16[0] not in layout:
        assert found["log_prob_drift"] == 0.0, "no stale weights are left in any unit"


ALIKE = ("FSDP2, weights kept", "FSDP1, weights kept", "FSDP2, entropy and KL", "FSDP1, bf16")
"""A row's backward is that of others."""


@default_on(verl07=("FSDP2",), verl09=("FSDP1",))
@pytest.mark.parametrize(
    "layout", [pytest.param(LAYOUTS[name], id=name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in LAYOUTS]
)
def test_a_token_s_backward_runs_its_row_alone(world, dump_dir, layout):
    found, other = world.run("identities.rows_alone", overrides=layout, dump_dir=dump_dir)
    assert found["ran"] == [(1, [1])] * 2
    assert other["ran"] == [(1, [0])] * 2, "it has no such token, and runs a row as well"
    assert 0 <= found["error"] < (2e-2 if BF16[0] in layout else 1e-5) and found["forwards"] == 2
    assert found["again"] < 1e-6


@default_on(verl07=("FSDP1",), verl09=NONE)
@pytest.mark.parametrize("strategy", [[], FSDP1], ids=["FSDP2", "FSDP1"])
def test_with_dropout_all_rows_run_since_random_numbers_would_be_others(world, dump_dir, strategy):
    found, _ = world.run("identities.rows_alone", overrides=strategy, dump_dir=dump_dir, dropout=0.3)
    assert found["ran"] == [(1, [1])], "tried once"
    assert found["error"] == 0.0 and found["forwards"] == 3 and found["again"] < 1e-6


@default_on(verl07=NONE, verl09=("dropout-FSDP1",))
@pytest.mark.parametrize("strategy", [[], FSDP1], ids=["FSDP2", "FSDP1"])
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no dropout", "dropout"])
def test_a_masked_step_is_training_without_the_culprits_bit_for_bit(world, dump_dir, strategy, dropout):
    check_masked_step(world, dump_dir, strategy, dropout)


@pytest.mark.parametrize(("terms", "tensors"), [([], 1), (TERMS[-1:], 3)], ids=["log-probs", "entropies"])
def test_a_forward_holds_its_logits_in_float32_and_for_entropies_two_tensors_more(world, dump_dir, terms, tensors):
    for found in world.run("identities.forward_size", overrides=terms, dump_dir=dump_dir):
        assert tensors <= found["bytes"] / found["of_logits"] < tensors + 2


@default_on(verl09=NONE)
def test_nothing_is_communicated_while_nothing_spikes(world, unpatched_world, dump_dir):
    on = [f"{ACTOR}.spike_detection=True", f"{ACTOR}.grad_norm_threshold=1e6"]
    counts = {
        "unpatched": unpatched_world.run("identities.collectives_of_a_step", overrides=[], dump_dir=dump_dir),
        "off": world.run("identities.collectives_of_a_step", overrides=[], dump_dir=dump_dir),
        "on": world.run("identities.collectives_of_a_step", overrides=on, dump_dir=dump_dir),
    }
    assert counts["unpatched"] == counts["off"] == counts["on"]
    assert counts["on"][0] > 0, "the count counts"
