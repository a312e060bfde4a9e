# SPDX-License-Identifier: Apache-2.0
"""A setting as a user of TRL writes it: advice is kept in verl's names, and TRL's are said here."""

import json

__all__ = ["is_trl", "trl_settings"]

_ACTOR, _ROLLOUT, _CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
_IN_TRL = {
    f"{_ACTOR}.clip_ratio_high": "epsilon_high",
    f"{_ACTOR}.clip_ratio_c": "delta",
    f"{_ACTOR}.entropy_coeff": "entropy_coef",
    f"{_ACTOR}.grad_clip": "max_grad_norm",
    f"{_ACTOR}.kl_loss_coef": "beta",
    f"{_ACTOR}.optim.lr": "learning_rate",
    f"{_ACTOR}.optim.lr_warmup_steps": "warmup_steps",
    f"{_ACTOR}.ppo_epochs": "num_iterations",
    f"{_ACTOR}.use_torch_compile": "torch_compile",
    f"{_ROLLOUT}.n": "num_generations",
    f"{_ROLLOUT}.temperature": "temperature",
    f"{_ROLLOUT}.top_p": "top_p",
    f"{_CORRECTION}.rollout_is_threshold": "vllm_importance_sampling_clip_max",
    "data.max_response_length": "max_completion_length",
}
"""Names of the same setting; its values are the same, too."""
_LINES_IN_TRL = {
    f"{_ACTOR}.fsdp_config.dtype=float32": "bf16=False",
    f"{_ACTOR}.fsdp_config.model_dtype=fp32": 'model_init_kwargs={"dtype": "float32"}',
    f"{_ACTOR}.policy_loss.loss_mode=gspo": 'importance_sampling_level="sequence"',
    f"{_ACTOR}.spike_detection=true": 'gradloc="observe"',
    f"{_ACTOR}.use_kl_loss=true": "beta=0.001",
    f"{_ACTOR}.loss_agg_mode=seq-mean-token-mean": 'loss_type="grpo"',
    f"{_CORRECTION}.rollout_is=token": 'vllm_importance_sampling_mode="token_truncate"',
    "algorithm.norm_adv_by_std_in_grpo=false": 'scale_rewards="none"',
    "trainer.rollout_data_dir=rollouts": "log_completions=True",
    "trainer.resume_mode=resume_path": "trainer.train(resume_from_checkpoint=True)",
}
_GRADLOC = f"{_ACTOR}.gradloc."


def is_trl(trainer: str | None) -> bool:
    """Whether a record's trainer is TRL."""
    return (trainer or "").startswith("trl")


def trl_settings(line: str) -> str | None:
    """The same settings for TRL; None where it lacks one of them.

    Args:
        line: verl's Hydra overrides, with a blank between.

    >>> trl_settings("actor_rollout_ref.actor.grad_clip=0.5")
    'max_grad_norm=0.5'
    """
    said = [_setting(override) for override in line.split()]
    return None if None in said or not said else ", ".join(map(str, said))


def _setting(override: str) -> str | None:
    if override in _LINES_IN_TRL:
        return _LINES_IN_TRL[override]
    name, _, value = override.partition("=")
    if not name.startswith(_GRADLOC):
        return f"{_IN_TRL[name]}={_python(value)}" if name in _IN_TRL else None
    block, _, key = name.removeprefix(_GRADLOC).partition(".")
    if (block, key) == ("action", "mode"):
        return f'gradloc="{value}"'
    return f'gradloc={{"{block}": {{"{key}": {_python(value)}}}}}' if block in _HAS else None


_HAS = ("action", "evidence", "search", "trigger")
"""Blocks of our own settings that TRL's trainers take; the stabilizers and the critic are verl's."""


def _python(value: str) -> str:
    try:
        return repr(json.loads(value))
    except ValueError:
        return json.dumps(value)
