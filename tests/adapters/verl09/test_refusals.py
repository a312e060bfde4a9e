# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused at start, in one sentence; a verl that has changed is named."""

import subprocess
import sys

import pytest

from tests.world import RankError

ACTOR = "actor_rollout_ref.actor"
ON = "+gradloc=on"
FUSED = "actor_rollout_ref.model.use_fused_kernels=true"
FUSED_BY = "actor_rollout_ref.model.fused_kernel_options.impl_backend"
REFUSED = {
    f"{ACTOR}.strategy=veomni": "strategy must be fsdp or fsdp2 while .* \\(other engines do not have it\\)",
    "trainer.use_v1=false": "trainer.use_v1 must be true",
    f"{ACTOR}.shuffle=true": "shuffle must be false",
    f"{ACTOR}.fsdp_config.offload_policy=true": "use param_offload and optimizer_offload instead",
    "actor_rollout_ref.model.enable_activation_offload=true": "enable_activation_offload must be false",
    f"{FUSED} {FUSED_BY}=triton": "impl_backend must be torch while .* \\(no search was tested with the others",
    f"{FUSED} {FUSED_BY}=liger": "impl_backend must be torch while .* found 'liger'",
    "distillation.enabled=true": "distillation.enabled must be false",
    "+algorithm.lopti.enable=true": "algorithm.lopti.enable must be left off on verl 0.9",
    "+trainer.gradient_analysis_mode=true": "gradient_analysis_mode must be left off on verl 0.9",
    "+trainer.quartile_analysis_mode=true": "quartile_analysis_mode must be left off on verl 0.9",
    "+actor_rollout_ref.rollout.rollout_filter_strategy=top_p": "rollout_filter_strategy must be left off on verl 0.9",
    f"{ACTOR}.gradloc.stabilize.token_clip.mode=mask": "token_clip.mode must be left off on verl 0.9",
    f"{ACTOR}.gradloc.stabilize.skip_step.enable=true": "skip_step.enable must be left off on verl 0.9",
    f"+{ACTOR}.gradloc.triger.tau=1": "did you mean actor_rollout_ref.actor.gradloc.trigger",
    "+trainer.heath.enable=true": "did you mean trainer.health",
}


@pytest.mark.parametrize("override", REFUSED)
def test_it_is_refused_before_any_worker_starts(engine_world, model_dir, override):
    with pytest.raises(RankError, match=REFUSED[override]):
        engine_world.run(
            "tests.adapters.verl09.harness.make_side", overrides=[ON, *override.split()], model_dir=str(model_dir)
        )


def test_the_safe_preset_is_refused_with_what_there_is_in_its_place(engine_world, model_dir):
    with pytest.raises(
        RankError, match="token_clip.mode must be left off .* take .gradloc=mask trainer.health.enable="
    ):
        overrides = ["+gradloc=safe"]
        engine_world.run("tests.adapters.verl09.harness.make_side", overrides=overrides, model_dir=str(model_dir))


def test_the_installed_verl_is_as_this_adapter_knows_it():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from gradloc.adapters.verl09.touches import KNOWN, differences, verl_version\n"
            "assert verl_version() in KNOWN, verl_version()\n"
            "assert [differences(who) for who in ('worker', 'trainer', 'replay')] == [[], [], []]",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_change_in_verl_is_named(engine_world):
    said = engine_world.run("tests.adapters.verl09.harness.with_a_changed_verl")[0]
    assert said == (
        "verl 0.9.1 changed what gradloc hangs on (it knows 0.9.0, 0.9.1): verl.workers.engine.fsdp.transformer_impl:"
        "FSDPEngineWithLMHead.optimizer_step takes (self, closure), expected (self); install one of these, or leave "
        "+gradloc out."
    )


def test_another_verl_is_refused_with_what_fits_it(engine_world):
    said = engine_world.run("tests.adapters.verl09.harness.with_verl_08")[0]
    assert said.startswith("gradloc's plug-in is for verl 0.9, found verl 0.8.0: on 0.7.0 and 0.7.1 apply the patch")


def test_a_plug_in_that_was_not_loaded_is_missed(engine_world, model_dir):
    with pytest.raises(RankError, match="gradloc is switched on, and its plug-in was not loaded"):
        engine_world.run("tests.adapters.verl09.harness.train_without_plug_in", model_dir=str(model_dir))
