# SPDX-License-Identifier: Apache-2.0
"""The plan of a verl run before it starts, from settings that may be few."""

import pytest
from omegaconf import OmegaConf

from gradloc.adapters.verl_common.plan import plan_of

ROWS = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"


def test_what_a_run_leaves_to_verl_or_marks_as_missing_has_verls_default():
    few = OmegaConf.from_dotlist([ROWS])
    load = plan_of(few).load
    assert (load.tokens, load.micro_batches) == (4 * (512 + 512), 256 // 8 // 4), "one rollout a prompt on 8 GPUs"
    missing = OmegaConf.merge(few, {"data": {"train_batch_size": "???", "max_prompt_length": "???"}})
    assert plan_of(missing) == plan_of(few)


@pytest.mark.parametrize(("mini_batch", "micro_batches"), [(8, 1), (16, 2), (24, 3)])
def test_each_rank_has_its_part_of_a_mini_batch(mini_batch, micro_batches):
    sizes = [
        f"actor_rollout_ref.actor.ppo_{size}"
        for size in (f"mini_batch_size={mini_batch}", "micro_batch_size_per_gpu=1")
    ]
    assert plan_of(OmegaConf.from_dotlist(sizes)).load.micro_batches == micro_batches, "on 8 GPUs"


def test_without_a_size_of_micro_batches_it_is_refused_unless_verl_cuts_by_tokens():
    with pytest.raises(ValueError, match="ppo_micro_batch_size_per_gpu must be set while use_dynamic_bsz is off"):
        plan_of(OmegaConf.create({}))
    by_tokens = plan_of(OmegaConf.from_dotlist(["actor_rollout_ref.actor.use_dynamic_bsz=true"]))
    assert by_tokens.load.tokens == 16384


def plan_with(**actor):
    """The plan of such a run whose actor has these settings, its blocks by a double underscore."""
    settings = [f"actor_rollout_ref.actor.{name.replace('__', '.')}={value}" for name, value in actor.items()]
    return plan_of(OmegaConf.from_dotlist([ROWS, *settings]))


def test_processes_that_hold_a_sequence_or_a_model_are_those_of_the_actors_backend():
    ulysses = plan_with(fsdp_config__ulysses_sequence_parallel_size=2)
    assert (ulysses.layout.tensor, ulysses.layout.pipeline, ulysses.load.tokens) == (1, 1, 4 * 1024 // 2)
    parallel = {f"megatron__{name}_parallel_size": 2 for name in ("tensor_model", "pipeline_model", "context")}
    megatron = plan_with(strategy="megatron", **parallel)
    assert (megatron.layout.tensor, megatron.layout.pipeline, megatron.load.tokens) == (2, 2, 4 * 1024 // 2)


def test_a_last_mini_batch_that_is_not_full_is_a_step_of_each_epoch():
    run = OmegaConf.from_dotlist([ROWS, "data.train_batch_size=300", "actor_rollout_ref.actor.ppo_epochs=3"])
    assert plan_of(run).optimizer_steps == 3 * 2


def test_a_logit_takes_more_where_entropies_are_not_computed_in_chunks():
    chunks = {"entropy_from_logits_with_chunking": True}
    plain, whole, in_chunks = (
        plan_with(**terms).load.logit_bytes for terms in ({}, {"entropy_coeff": 0.1}, {"entropy_coeff": 0.1, **chunks})
    )
    assert plain == in_chunks < whole
    assert [plan_with(fsdp_config__dtype=dtype).load.number_bytes for dtype in ("bfloat16", "float32")] == [2, 4]
