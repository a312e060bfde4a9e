# SPDX-License-Identifier: Apache-2.0
"""verl 0.9 as published, on this machine: what everything else here is held against."""

import pytest

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
BF16 = "{param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}"
PADDED = [f"{MODEL}.use_remove_padding=false", f"{ACTOR}.use_dynamic_bsz=false"]
LAYOUTS = {
    "packed": [],
    "padded": PADDED,
    "fsdp1": [f"{ACTOR}.strategy=fsdp"],
    "bf16": [f"{ACTOR}.fsdp_config.dtype=bfloat16", f"{ACTOR}.fsdp_config.mixed_precision={BF16}"],
    "no-sync": [f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation=true"],
    "entropy and KL": [f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.use_kl_loss=true"],
    "mini-batches and epochs": [f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=2"],
    "LoRA": [f"{MODEL}.lora_rank=4"],
}


PLANTS = ((5, 3, 1e4),)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_repeats_bit_for_bit(train, layout):
    first, second = (train(LAYOUTS[layout], is_again, stock=True, plants=PLANTS) for is_again in (False, True))
    assert first[0]["engine"] == "FSDPEngineWithLMHead"
    for one, other in zip(first, second, strict=True):
        assert one["weights"] == other["weights"] and one["rng"] == other["rng"]
    assert first[0]["weights"] != first[1]["weights"], "each rank has a shard of its own"


def test_a_planted_advantage_is_a_spike(train):
    healthy, spiked = (train(stock=True, plants=plants)[0]["norms"] for plants in ((), PLANTS))
    assert healthy[0] == spiked[0]
    assert spiked[1] > 100 * healthy[1]
