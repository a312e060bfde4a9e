# SPDX-License-Identifier: Apache-2.0
"""What people do about each reason: sentences, each with the Hydra override that does it."""

__all__ = ["ADVICE"]

_ACTOR, _ROLLOUT, _CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"

_SMALLER_STEPS = ("Take smaller steps.", f"{_ACTOR}.optim.lr=5e-7")
_ONE_EPOCH = ("Let the policy drift less within a step: one epoch over the rollouts.", f"{_ACTOR}.ppo_epochs=1")
_KEEP_ROLLOUTS = ("Keep the rollouts and read them, with their rewards.", "trainer.rollout_data_dir=rollouts")
_LOCALIZE = ("Let GradLoc name the tokens that do it, where it does not yet.", f"{_ACTOR}.spike_detection=true")
_MASK = ("Take such a step without its culprits; needs spike_detection.", f"{_ACTOR}.gradloc.action.mode=mask")
_CLIP = ("Clip harder; the direction stays, and so does a culprit's part in it.", f"{_ACTOR}.grad_clip=0.5")
_CLIP_LAYERS = (
    "Clip each layer by its own history instead, so that one layer's spike does not starve the others.",
    f"{_ACTOR}.gradloc.stabilize.layer_clip.rule=adagc",
)
_CLIP_TOKENS = (
    "Bound the ratio of tokens that drifted from the policy that wrote them; needs rollout.calculate_log_probs.",
    f"{_ACTOR}.gradloc.stabilize.token_clip.mode=clamp",
)
_WARMER = ("Sample more diverse rollouts, where the temperature is below that.", f"{_ROLLOUT}.temperature=1.0")
_COOLER = ("Sample fewer unlikely tokens.", f"{_ROLLOUT}.temperature=0.8")
_MORE_ROLLOUTS = ("Draw more rollouts per prompt: fewer groups are then all right or all wrong.", f"{_ROLLOUT}.n=16")
_KL_MSE = ("Use an estimator that does not take an exponential, which overflows.", f"{_ACTOR}.kl_loss_type=mse")
_FP32 = ("Rule out precision: keep the trained weights in fp32.", f"{_ACTOR}.fsdp_config.model_dtype=fp32")
_WEIGH = ("Weigh tokens by the truncated ratio of trainer to rollout engine.", f"{_CORRECTION}.rollout_is=token")
_REJECT = ("Drop sequences whose mean ratio is out of bounds.", f"{_CORRECTION}.rollout_rs=geometric")
_BOUNDS = ("Those bounds; the mean ratio needs tight ones.", f"{_CORRECTION}.rollout_rs_threshold=1.001")
_EAGER = ("Rule the engine's optimizations out: run it eagerly for a while.", f"{_ROLLOUT}.enforce_eager=true")
_MISMATCH = (_WEIGH, _EAGER)
_DRIFT = (_ONE_EPOCH, _CLIP_TOKENS, _SMALLER_STEPS)  # within the step, which the same metrics hold
_LONGER = ("Leave more room for answers.", "data.max_response_length=4096")
_MODERATE_LENGTH = (
    "Keep long responses from weighing more than short ones.",
    f"{_ACTOR}.loss_agg_mode=seq-mean-token-mean",
)

ADVICE: dict[str, tuple[tuple[str, str], ...]] = {
    "gradient_jump": (_LOCALIZE, _MASK, _CLIP, _CLIP_LAYERS),
    "spikes": (_MASK, _CLIP_LAYERS, _CLIP_TOKENS),
    "head_norm": (_ONE_EPOCH, _SMALLER_STEPS, _LOCALIZE),
    "clip_share": (
        (
            "Nothing, if the reward rises: Adam's steps depend little on the clip. Else let more through.",
            f"{_ACTOR}.grad_clip=2.0",
        ),
        _SMALLER_STEPS,
        _CLIP_LAYERS,
    ),
    "non_finite": (_LOCALIZE, _KEEP_ROLLOUTS, _KL_MSE, _FP32),
    "no_gradient": (
        (
            "Read the rewards first: a cap, a parser that fails or a task that is too hard gives all the same.",
            "trainer.rollout_data_dir=rollouts",
        ),
        (
            "Where there was a reward before, the policy broke: begin anew with smaller steps.",
            f"{_ACTOR}.optim.lr=5e-7",
        ),
        _MORE_ROLLOUTS,
        _WARMER,
    ),
    "reward_fall": (
        (
            "Go back to a checkpoint from before the fall, named by trainer.resume_from_path.",
            "trainer.resume_mode=resume_path",
        ),
        _SMALLER_STEPS,
        ("Hold the policy near the reference.", f"{_ACTOR}.use_kl_loss=true"),
        _COOLER,
        _KEEP_ROLLOUTS,
    ),
    "entropy_fall": (
        ("Let unlikely tokens gain more: raise the upper clip alone (DAPO).", f"{_ACTOR}.clip_ratio_high=0.28"),
        ("Keep the tokens that drive entropy down from being updated.", f"{_ACTOR}.policy_loss.loss_mode=kl_cov"),
        ("Pay for entropy, a little.", f"{_ACTOR}.entropy_coeff=0.001"),
        _WARMER,
    ),
    "entropy_rise": (
        ("Do not pay for entropy.", f"{_ACTOR}.entropy_coeff=0"),
        _SMALLER_STEPS,
        ("Bound how much unlikely tokens gain.", f"{_ACTOR}.clip_ratio_high=0.2"),
        _LOCALIZE,
    ),
    "zero_variance": (
        _WARMER,
        _MORE_ROLLOUTS,
        ("Train on the groups that differ only.", f"{_ROLLOUT}.rollout_filter_include_zero=false"),
    ),
    "policy_kl": (_ONE_EPOCH, _SMALLER_STEPS, _CLIP_TOKENS),
    "reference_kl_jump": (_KL_MSE, _LOCALIZE, _SMALLER_STEPS),
    "clip_fraction": (_ONE_EPOCH, _SMALLER_STEPS),
    "mismatch_kl": (*_DRIFT, *_MISMATCH),
    "mismatch_rise": (*_MISMATCH, *_DRIFT),
    "mismatch_chi2": (_LOCALIZE, *_DRIFT, _REJECT, _BOUNDS, _EAGER),
    "mismatch_weight": _MISMATCH,
    "mismatch_spread": (("Truncate the weights lower.", f"{_CORRECTION}.rollout_is_threshold=1.5"), _EAGER),
    "mismatch_sample_size": (("Truncate the weights lower.", f"{_CORRECTION}.rollout_is_threshold=1.5"), _EAGER),
    "mismatch_veto": (("Veto at a lower probability.", f"{_CORRECTION}.rollout_token_veto_threshold=1e-5"), _EAGER),
    "mismatch_probs": (_EAGER, _WEIGH, _FP32),
    "truncation": (_LONGER, _KEEP_ROLLOUTS, _MODERATE_LENGTH),
    "length_rise": (_KEEP_ROLLOUTS, _LONGER, _MODERATE_LENGTH),
    "length_fall": (_KEEP_ROLLOUTS, ("Hold the policy near the reference.", f"{_ACTOR}.use_kl_loss=true")),
    "aborted": (
        ("Drop prompts that leave no room for an answer.", "data.filter_overlong_prompts=true"),
        _KEEP_ROLLOUTS,
    ),
}
