# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused at start, in one sentence; a verl that has changed is named."""

import subprocess
import sys

import pytest

from tests.world import RankError

from .conftest import HARNESS

ACTOR = "actor_rollout_ref.actor"
ON = "+gradloc=on"
OFFLOAD = "actor_rollout_ref.model.enable_activation_offload=true"
FUSED = "actor_rollout_ref.model.use_fused_kernels=true"
FUSED_BY = "actor_rollout_ref.model.fused_kernel_options.impl_backend"
LOPTI = "algorithm.lopti.enable=true"
BUCKETS = "trainer.gradient_analysis_mode=true"
STABILIZE = f"{ACTOR}.gradloc.stabilize"
NO_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=false"
REFUSED = {
    f"{ACTOR}.strategy=veomni": "strategy must be fsdp, fsdp2 or megatron while .* \\(others do not have it\\)",
    "trainer.use_v1=false": "trainer.use_v1 must be true",
    f"{ACTOR}.shuffle=true": "shuffle must be false",
    f"{OFFLOAD} actor_rollout_ref.model.enable_gradient_checkpointing=false": (
        "enable_gradient_checkpointing must be true while .* \\(else verl's activation offload takes views"
    ),
    f"{BUCKETS} {ACTOR}.gradloc.enable=false {OFFLOAD}": "enable_activation_offload must be false while",
    f"{FUSED} {FUSED_BY}=triton": "impl_backend must be torch while .* \\(no search was tested with the others",
    f"{FUSED} {FUSED_BY}=liger": "impl_backend must be torch while .* found 'liger'",
    f"{ACTOR}.qat.enable=true": "actor.qat.enable must be false while .* \\(its gradient is not the derivative",
    f"{ACTOR}.fsdp_config.qat.enable=true": "fsdp_config.qat.enable must be false",
    "distillation.enabled=true distillation.distillation_loss.loss_mode=forward_kl_topk": (
        "loss_mode must be one of k1, k2, k3 while .* \\(top-k losses read logits"
    ),
    "distillation.enabled=true": "use_task_rewards must be false while .* \\(no search was run on the sum",
    f"distillation.enabled=true {LOPTI} {ACTOR}.gradloc.enable=false": "distillation.enabled must be false",
    f"distillation.enabled=true algorithm.advantage_reweighting.alpha=0.3 {ACTOR}.gradloc.enable=false": (
        "distillation.enabled must be false while .*reweighting.alpha is on \\(it is about the loss on rewards"
    ),
    f"{BUCKETS} {ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2": "ulysses_sequence_parallel_size must be 1 while",
    f"{BUCKETS} trainer.gradient_analysis_env_groups=4 trainer.v1.trainer_mode=colocate_async": (
        "env_groups must be null here \\(trainer.v1.trainer_mode=colocate_async rolls out"
    ),
    f"{BUCKETS} {ACTOR}.loss_agg_mode=token-sum": "loss_agg_mode must be one of verl's means",
    "trainer.quartile_analysis_mode=true trainer.quartile_analysis_every=0": "quartile_analysis_every must be",
    f"{STABILIZE}.token_clip.mode=mask {NO_LOG_PROBS}": "calculate_log_probs must be true while .*seq_clip is on",
    f"{STABILIZE}.layer_clip.rule=adagc {STABILIZE}.layer_clip.group=kind {ACTOR}.strategy=fsdp": (
        "use_orig_params must be true with strategy=fsdp"
    ),
    f"{STABILIZE}.skip_step.enable=true {ACTOR}.ulysses_sequence_parallel_size=2": "must be 1 while .*stabilize is on",
    f"+{ACTOR}.gradloc.triger.tau=1": "did you mean actor_rollout_ref.actor.gradloc.trigger",
    "+trainer.heath.enable=true": "did you mean trainer.health",
}


@pytest.mark.parametrize("override", REFUSED)
def test_it_is_refused_before_any_worker_starts(call, override):
    with pytest.raises(RankError, match=REFUSED[override]):
        call("make_side", [ON, *override.split()])


def test_the_installed_verl_is_as_this_adapter_knows_it():
    code = (
        "import verl\n"
        "from gradloc.adapters.verl09.touches import KNOWN, TOUCHED, changed_bodies\n"
        "from gradloc.touched import differences\n"
        "assert verl.__version__ in KNOWN, verl.__version__\n"
        "assert [differences(TOUCHED[who]) for who in ('worker', 'trainer', 'replay')] == [[], [], []]\n"
        "assert changed_bodies() == []"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


RELEASES = {
    None: (  # with a method that takes something else
        "verl 0.9.1 changed what gradloc hangs on (it knows 0.9.0, 0.9.1): verl.workers.engine.fsdp.transformer_impl:"
        "FSDPEngineWithLMHead.optimizer_step takes (self, closure), expected (self); install one of these, or leave "
        "+gradloc out."
    ),
    "0.8.0": "gradloc's plug-in is for verl 0.9, found verl 0.8.0: on 0.7.0 and 0.7.1 apply the patch",
    **dict.fromkeys(("0.9.0", "0.9.7", "0.10.0.dev0", "1.0.0"), "nothing"),
}


@pytest.mark.parametrize("release", RELEASES)
def test_what_decides_is_what_is_touched_and_not_the_releases_name(world, release):
    assert world.run(f"{HARNESS}.with_verl", release=release)[0].startswith(RELEASES[release])


def test_code_that_does_something_else_is_a_warning_that_names_it(world):
    said = world.run(f"{HARNESS}.warned_of_a_changed_body")[0]
    assert said.startswith("gradloc: verl 0.9.1 changed the code of PPOTrainer._update_actor, which gradloc knows of")
    assert said.count("PPOTrainer.") == 1


def test_a_plug_in_that_was_not_loaded_is_missed(world, model_dir):
    with pytest.raises(RankError, match="gradloc is switched on, and its plug-in was not loaded"):
        world.run(f"{HARNESS}.train_without_plug_in", model_dir=str(model_dir))
