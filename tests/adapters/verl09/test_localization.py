# SPDX-License-Identifier: Apache-2.0
"""A planted token in verl 0.9's engine: named and certified; looking changes nothing, masking is as without it."""

import pytest

from tests.adapters.conformance.layouts.checks import check_training
from tests.world.events import read_events

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
FSDP = f"{ACTOR}.fsdp_config"
ON = ["+gradloc=on", f"{ACTOR}.gradloc.trigger.tau=100"]
PLANT = (5, 3, 1e4)
OFFLOAD = [f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true"]
PACKED = [f"{MODEL}.use_remove_padding=true", f"{ACTOR}.use_dynamic_bsz=true"]
PADDED = [f"{MODEL}.use_remove_padding=false", f"{ACTOR}.use_dynamic_bsz=false"]


def half(dtype, short):
    dtypes = f"{{param_dtype:{short},reduce_dtype:fp32,buffer_dtype:fp32}}"
    return [f"{FSDP}.dtype={dtype}", f"{FSDP}.mixed_precision={dtypes}"]


LAYOUTS = {
    "packed": PACKED,
    "padded": PADDED,
    "fsdp1": [f"{ACTOR}.strategy=fsdp"],
    "bf16": half("bfloat16", "bf16"),
    "no-sync": [f"{FSDP}.use_no_sync_for_gradient_accumulation=true"],
    "mini-batches and epochs": [f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=2"],
    "LoRA": [f"{MODEL}.lora_rank=4"],
}
LOOKED_INTO = {
    **LAYOUTS,
    "entropy and KL": [f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.use_kl_loss=true"],
    "offload": OFFLOAD,
    "offload, FSDP1": [f"{ACTOR}.strategy=fsdp", *OFFLOAD],
    "offload_policy": [f"{FSDP}.offload_policy=true"],
    "gradient checkpointing": [f"{MODEL}.enable_gradient_checkpointing=true"],
    "fp16": half("float16", "fp16"),
    "a gradient reduced after every micro-batch": [f"{FSDP}.use_no_sync_for_gradient_accumulation=false"],
    "whole layers on every rank": [f"{FSDP}.reshard_after_forward=false"],
    "mean over sequences": [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
    "gspo": [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
    "the prefix grouper, which no V1 trainer reads": [f"{ACTOR}.use_prefix_grouper=true"],
    "the trainer that rolls out while it trains": ["trainer.v1.trainer_mode=colocate_async"],
}
"""Beside those that are also masked: here a token without advantage keeps terms, gspo's weighs by its sequence."""


def by_default(layouts, *names):
    """All of these; but for those that are named they are slow tests."""
    assert set(names) <= layouts.keys()
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in names)) for name in layouts]


@pytest.mark.parametrize("layout", by_default(LOOKED_INTO, "packed", "bf16", "entropy and KL"))
def test_a_planted_token_is_named_and_the_run_stays_what_it_was(train, layout, tmp_path):
    settings = LOOKED_INTO[layout]
    stock = train(settings, stock=True, plants=(PLANT,))
    watched = train([*ON, *settings, f"{ACTOR}.gradloc.dump_dir={tmp_path}"], plants=(PLANT,))
    for one, other in zip(stock, watched, strict=True):
        assert one["weights"] == other["weights"] and one["rng"] == other["rng"]
    *_, event = read_events(tmp_path)
    assert event["certificate"]["verdict"] == "explained"
    (culprit,) = event["culprits"]
    assert culprit["row"] == 5 and 3 in culprit["positions"] and culprit["versions"] == [3, 4]
    assert "GradLocEngine" in watched[0]["engine"] and "GradLocEngine" not in stock[0]["engine"]
    assert stock[0]["norms"] == watched[0]["norms"] and stock[0]["weights"] != stock[1]["weights"], "sharded"


def test_an_engine_of_the_run_s_own_keeps_what_it_overrides(call, tmp_path):
    found = call("train_with_an_engine_of_its_own", [*ON, f"{ACTOR}.gradloc.dump_dir={tmp_path}"])
    assert all(calls["optimizer_step"] == 2 and calls["forward_step"] > 4 for calls in found), "searches' forwards, too"


@pytest.mark.parametrize("layout", by_default(LAYOUTS, "fsdp1"))
def test_mask_is_training_without_the_culprit_bit_for_bit(world, dump_dir, layout):
    check_training(world, dump_dir, "mask", layout=[*PACKED, *LAYOUTS[layout]])


def test_a_run_that_does_not_spike_has_its_metrics_and_no_event(train, tmp_path):
    healthy = train([*ON, f"{ACTOR}.gradloc.dump_dir={tmp_path}"], num_steps=1)
    metrics = healthy[0]["metrics"]
    assert 0 < metrics["gradloc/head_grad_norm"] < metrics["actor/grad_norm_max"] == healthy[0]["norms"][-1]
    assert metrics["gradloc/spikes"] == 0 and not (tmp_path / "events.jsonl").exists()
