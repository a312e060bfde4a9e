# SPDX-License-Identifier: Apache-2.0
"""Settings that were not run on Megatron are refused at start, in one sentence."""

import re

import pytest

from tests.adapters.test_requirements import refusals
from tests.world import RankError

from .conftest import HERE
from .layouts import MEGATRON, OPTIMIZER

ACTOR = "actor_rollout_ref.actor"
REFUSED = {
    **refusals("megatron"),
    f"{ACTOR}.gradloc.critic=observe algorithm.adv_estimator=gae": "critic.strategy must be fsdp or fsdp2",
    "algorithm.lopti.enable=true": "strategy must be fsdp or fsdp2 while algorithm.lopti.enable is on",
    "trainer.gradient_analysis_mode=true": "strategy must be fsdp or fsdp2 while trainer.gradient_analysis_mode is on",
}
IN_THE_ENGINE = {
    f"{MEGATRON}.use_distributed_optimizer=true ++{OPTIMIZER}.optimizer_cpu_offload=true "
    f"{ACTOR}.optim.use_precision_aware_optimizer=true {ACTOR}.optim.main_grads_dtype=bf16": (
        "with main_grads_dtype in 16 bits on Megatron"
    ),
    f"++{MEGATRON}.override_transformer_config.moe_router_load_balancing_type=sinkhorn": "load_balancing.* on Megatron",
}


@pytest.fixture(scope="module")
def said(single):
    cases = [["+gradloc=on", *override.split()] for override in REFUSED]
    return dict(zip(REFUSED, single.run(f"{HERE}.harness.refusals", cases=cases)[0], strict=True))


@pytest.mark.parametrize("override", REFUSED)
def test_it_is_refused_before_any_worker_starts(said, override):
    assert re.search(REFUSED[override], said[override]), said[override]


@pytest.mark.parametrize("override", IN_THE_ENGINE)
def test_what_only_the_engine_knows_is_refused_in_its_first_update(single, override, tmp_path):
    folder = str(tmp_path / "model")
    single.run(f"{HERE}.harness.save_model", folder=folder)
    settings = ["+gradloc=on", *override.split()]
    with pytest.raises(RankError, match=IN_THE_ENGINE[override]):
        single.run(f"{HERE}.harness.train", overrides=settings, model_dir=folder, dtype="bfloat16")


def test_the_installed_megatron_is_as_this_adapter_knows_it(single):
    assert single.run(f"{HERE}.harness.differences") == [[]]
