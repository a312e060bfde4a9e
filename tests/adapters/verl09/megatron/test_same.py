# SPDX-License-Identifier: Apache-2.0
"""verl 0.7's actor's own tests on verl 0.9's Megatron engine, by the same code: probes, shares, actions, failures."""

import pytest

from tests.adapters.conformance import (
    test_actions,
    test_cures,
    test_failures,
    test_identities,
    test_localization,
    test_trigger,
)
from tests.adapters.verl09.layouts import test_distillation
from tests.stabilize import test_actor as stabilizers
from tests.world.events import read_events

from .layouts import DEFAULT, MEGATRON, in_layouts, marks_of

ACTOR = "actor_rollout_ref.actor"
ON = [f"{ACTOR}.spike_detection=True", f"{ACTOR}.grad_norm_threshold=640"]
TWO = test_localization.PLACES["two culprits on two ranks, two micro-batches"]
KERNELS = ("fused kernel, TP 2", "fused kernel, experts, EP 2", "recomputed, TP 2", "recomputed, experts, EP 2")
ON_CPU = ("optimizer on the CPU, DP 2", "optimizer on the CPU, TP 2, bfloat16")
CP = ("CP 2", "CP 2, by tokens")
PAIRS = ("PP 2, interleaved", "TP 2 without sequence parallelism", "TP 2, padded", "experts, TP 2 x EP 2")
TERMS = [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.entropy_coeff=0.05"]
LOSSES = [
    f"++{MEGATRON}.override_transformer_config.{name}"
    for name in ("moe_z_loss_coeff={0}", "moe_router_load_balancing_type=aux_loss", "moe_aux_loss_coeff={0}")
]
BIAS = [
    f"++{MEGATRON}.override_transformer_config.{setting}"
    for setting in (
        "moe_router_enable_expert_bias=true",
        "moe_router_score_function=sigmoid",
        "moe_router_bias_update_rate=0.1",
    )
]


ASKED_AGAIN = (
    test_identities.test_the_loss_asked_again_gives_what_the_backward_left_and_other_tensors_what_theirs_leaves
)
MASKED = test_identities.test_a_masked_step_is_training_without_the_culprits_bit_for_bit
FORWARD = test_identities.test_a_forward_holds_its_logits_in_float32_and_for_entropies_two_tensors_more
SHARES = test_identities.test_the_shares_of_all_tokens_add_up_however_they_are_grouped
PLANTED = test_localization.test_planted_culprits_and_nothing_else_are_named
KL = test_localization.test_a_spike_that_nobody_edited_into_the_advantages_is_found_and_its_term_named
NOT_FINITE = test_trigger.test_a_norm_that_is_not_finite_in_the_warm_up_is_looked_into_certified_and_masked
CURE = test_cures.test_the_norm_under_another_setting_is_that_of_the_update_run_with_it
HEALED = test_cures.test_a_healed_step_is_the_one_that_the_setting_takes_bit_for_bit
TEACHER = test_distillation.test_the_planted_culprits_are_the_oracles_and_the_teacher_is_their_cause
EVERY_EPOCH = test_actions.test_every_appearance_of_a_culprit_is_masked_and_the_weights_are_those_without_it
BOUNDARIES = test_failures.test_a_rank_that_fails_at_any_collective_boundary_is_heard_by_all_and_recovered
PARTED = test_failures.test_the_norm_of_the_first_rank_decides_where_the_threshold_is_between_the_ranks
ROUTERS = ("experts, EP 2", "experts, PP 2 x EP 2", "CP 2, experts, EP 2", "CP 2, experts, EP 2, by tokens")
FIRST_THREE = ("PP 2", "TP 2", "experts, EP 2")
SAME = [
    (PLANTED, {"plants": TWO}, (*DEFAULT, *PAIRS[1:]), ("PP 2",)),  # the oracle has two layers
    (KL, {}, ("PP 2", "TP 2"), ()),
    (NOT_FINITE, {"kind": "nan"}, ("PP 2",), ("PP 2",)),
    (SHARES, {"layout": TERMS}, (*DEFAULT, *PAIRS, *KERNELS, *ON_CPU[:1], *CP), ("TP 2",)),
    (SHARES, {"layout": BIAS}, ("experts, EP 2",), ("experts, EP 2",)),
    (FORWARD, {"terms": TERMS[-1:], "tensors": 3}, ("PP 2",), ("PP 2",)),
    (ASKED_AGAIN, {"dtype": [], "policy": test_identities.OFF_POLICY}, (*DEFAULT, *CP), ("PP 2",)),
    (CURE, {"kind": "pushed down"}, (*DEFAULT, *CP), ()),
    (HEALED, {"name": "pushed down", "layout": []}, ("TP 2", "PP 2", "experts, EP 2"), ()),
    (HEALED, {"name": "veto", "layout": []}, ("TP 2", "PP 2"), ()),
    (MASKED, {"strategy": [], "dropout": 0.0}, (*DEFAULT, *PAIRS, *KERNELS, *ON_CPU, *CP), ("TP 2", *DEFAULT[2:])),
    (MASKED, {"strategy": [loss.format(0.01) for loss in LOSSES], "dropout": 0.0}, ROUTERS, ()),
    (MASKED, {"strategy": BIAS, "dropout": 0.0}, ROUTERS[:2], ()),
    (EVERY_EPOCH, {"layout": []}, (*DEFAULT, *ON_CPU[:1]), ()),
    (TEACHER, {"layout": test_distillation.AS_REWARD}, ("PP 2", "TP 2"), ()),
    (test_failures.test_skip_takes_no_step_at_all, {}, (DEFAULT[2], "PP 2", *ON_CPU), DEFAULT[2:3]),
    (test_failures.test_abort_stops_the_run_with_the_event_on_disk, {}, ("TP 2",), ()),
    (PARTED, {"over": 0}, ("TP 2", "PP 2"), ("PP 2",)),
    (PARTED, {"over": 1}, ("TP 2", "PP 2"), ("TP 2",)),
    (BOUNDARIES, {"strategy": "auto", "stride": 12}, FIRST_THREE, ()),
    (stabilizers.test_a_run_under_safe_trains, {}, ("TP 2", *CP), ()),
]
"""Tests of verl 0.7's actor: one, what it is given, the layouts that it is repeated for, and those by default."""
CASES = [
    pytest.param(
        layout,
        test,
        given,
        id=f"{test.__name__.removeprefix('test_')}-{number}-{layout}",
        marks=marks_of(layout, default),
    )
    for number, (test, given, layouts, default) in enumerate(SAME)
    for layout in layouts
]


@pytest.mark.parametrize(("layout", "test", "given"), CASES, indirect=["layout"])
def test_it_is_so_on_megatron(world, dump_dir, test, given):
    test(world, dump_dir, **given)


@in_layouts(*DEFAULT, *PAIRS, *ON_CPU[:1], *CP, default=("DP 2, sharded optimizer", "experts, EP 2"))
def test_the_probes_of_a_random_cover_add_up_to_the_gradient(world, dump_dir):
    answers = world.run("identities.cover_error", overrides=TERMS, dump_dir=dump_dir)
    for answer in answers:
        assert answer["error"] < 2e-6 and min(answer["parts"]) > 0


@in_layouts("experts, EP 2", "experts, TP 2", default=())
def test_moving_the_weights_does_not_send_a_token_to_other_experts(world, dump_dir):
    found, *_ = world.run("models.experts.closures", overrides=ON, dump_dir=dump_dir, seeds=[2, 4, 6])
    assert all(0.98 < closure < 1.02 for closure in found), found


@in_layouts("experts, EP 2", default=("experts, EP 2",))
def test_a_search_leaves_the_routers_biases_as_training_does(world, dump_dir):
    always = [ON[0], f"{ACTOR}.grad_norm_threshold=1"]
    alone, watched = (
        world.run("spikes.train", overrides=[*BIAS, *on], dump_dir=f"{dump_dir}{len(on)}", num_steps=5)
        for on in ([], always)
    )
    assert [rank["weights"] for rank in alone] == [rank["weights"] for rank in watched]
    assert watched[0]["events"] == 5


@in_layouts(*ROUTERS)
def test_a_spike_of_routers_losses_is_no_tokens(world, dump_dir):
    losses = [setting.format(3e4) for setting in LOSSES]
    world.run("spikes.update_batch", kind="healthy", overrides=ON + losses, dump_dir=dump_dir)
    event, _ = read_events(dump_dir)
    assert event["cause"]["label"] == "not_tokens" and not event["culprits"]
    assert sum(".mlp.router.weight" in name for name in event["cause"]["names"]) >= 2
    assert event["cause"]["numbers"]["others_norm"] == pytest.approx(event["trigger"]["grad_norm"], rel=1e-3)
    assert event["cause"]["numbers"]["tokens_norm"] < 1.5


@in_layouts("PP 2", "TP 2", "experts, EP 2", CP[1], ON_CPU[0])
@pytest.mark.slow
def test_nothing_is_communicated_while_nothing_spikes(world, unpatched_world, dump_dir):
    test_identities.test_nothing_is_communicated_while_nothing_spikes(world, unpatched_world, dump_dir)


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("place", ["forward", "backward"])
@in_layouts("PP 2", "TP 2")
@pytest.mark.slow
def test_a_failure_inside_of_a_layer_ends_every_process(world, dump_dir, place, process):
    short = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=8"]  # two micro-batches
    given = {"way": place, "process": process, "overrides": ON + short, "dump_dir": dump_dir}
    assert {fate for fate, _ in world.outcomes("conformance.fail_in_layer", timeout_s=240, **given)} == {"ended"}


@pytest.mark.parametrize(
    ("layout", "place"),
    [
        ("TP 2", "forward"),
        ("PP 2", "loss"),
        pytest.param("TP 2 x PP 2", "loss", marks=pytest.mark.slow),  # whose stages issue different collectives
    ],
    indirect=["layout"],
)
def test_training_goes_on_after_a_failure_in_every_layer_or_in_the_loss_of_a_pass(world, dump_dir, place):
    given = {"way": place, "process": None, "overrides": ON, "dump_dir": dump_dir}
    failures = world.run("conformance.fail_in_layer", **given)
    assert failures == [[1]] * len(failures)


@pytest.mark.parametrize("method", ["run_pass", pytest.param("forward", marks=pytest.mark.slow)])
@in_layouts("PP 2", "TP 2", "CP 2", default=("PP 2",))
def test_a_process_that_fails_inside_a_pass_ends_instead_of_hanging(world, dump_dir, method):
    test_failures.test_a_rank_that_fails_inside_a_forward_or_backward_ends_instead_of_hanging(world, dump_dir, method)
