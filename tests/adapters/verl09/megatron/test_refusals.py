# SPDX-License-Identifier: Apache-2.0
"""What was not run on Megatron is refused at start, in one sentence."""

import pytest

from tests.world import RankError

from .conftest import HERE
from .layouts import MEGATRON, OPTIMIZER

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
REFUSED = {
    f"{MEGATRON}.dynamic_context_parallel=true": "context_parallel must be false .* \\(no search was run",
    f"{MEGATRON}.use_megatron_fsdp=true": "use_megatron_fsdp must be false",
    f"{MEGATRON}.dtype=float16": "dtype must be bfloat16 .* found 'float16'",
    f"{MEGATRON}.router_replay.mode=R3": "router_replay.mode must be disabled",
    f"{ACTOR}.optim.use_precision_aware_optimizer=true": "optimizer_cpu_offload must be true .* TransformerEngine's",
    f"++{OPTIMIZER}.use_precision_aware_optimizer=true": "optimizer_cpu_offload must be true .* TransformerEngine's",
    f"{ACTOR}.optim.optimizer=muon": "optim.optimizer must be adam",
    f"{MODEL}.lora.rank=8": "lora.rank must be 0",
    f"{MODEL}.mtp.enable=true": "mtp.enable must be false",
    f"{ACTOR}.gradloc.evidence.checkpoint=before_step": "evidence.checkpoint must be off .* FSDP's format alone",
    f"{ACTOR}.gradloc.critic=observe algorithm.adv_estimator=gae": "critic.strategy must be fsdp or fsdp2",
    f"{MEGATRON}.pipeline_model_parallel_size=2 {ACTOR}.gradloc.stabilize.seq_clip.mode=mask "
    "actor_rollout_ref.rollout.calculate_log_probs=true": "pipeline_model_parallel_size must be 1 while .*seq_clip",
    "algorithm.lopti.enable=true": "strategy must be fsdp or fsdp2 while algorithm.lopti.enable is on",
    "trainer.gradient_analysis_mode=true": "strategy must be fsdp or fsdp2 while trainer.gradient_analysis_mode is on",
}
IN_THE_ENGINE = {
    f"+{MEGATRON}.override_ddp_config.overlap_grad_reduce=true": "with overlap_grad_reduce on Megatron",
    f"{MEGATRON}.use_distributed_optimizer=true ++{OPTIMIZER}.optimizer_cpu_offload=true "
    f"{ACTOR}.optim.use_precision_aware_optimizer=true {ACTOR}.optim.main_grads_dtype=bf16": (
        "with main_grads_dtype in 16 bits on Megatron"
    ),
    f"++{MEGATRON}.override_transformer_config.hidden_dropout=0.1": "with dropout on Megatron",
    **{
        f"++{MEGATRON}.override_transformer_config.{setting}": f"with .*{setting.partition('=')[0]}.* on Megatron"
        for setting in ("moe_router_load_balancing_type=sinkhorn", "moe_expert_capacity_factor=1.0")
    },
}


@pytest.mark.parametrize("override", REFUSED)
def test_it_is_refused_before_any_worker_starts(single, override):
    with pytest.raises(RankError, match=REFUSED[override]):
        single.run(f"{HERE}.harness.make_side", overrides=["+gradloc=on", *override.split()])


@pytest.mark.parametrize("override", IN_THE_ENGINE)
def test_what_only_the_engine_knows_is_refused_in_its_first_update(single, override, tmp_path):
    folder = str(tmp_path / "model")
    single.run(f"{HERE}.harness.save_model", folder=folder)
    settings = ["+gradloc=on", *override.split()]
    with pytest.raises(RankError, match=IN_THE_ENGINE[override]):
        single.run(f"{HERE}.harness.train", overrides=settings, model_dir=folder, dtype="bfloat16")


def test_the_installed_megatron_is_as_this_adapter_knows_it(single):
    assert single.run(f"{HERE}.harness.differences") == [[]]
