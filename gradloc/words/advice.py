# SPDX-License-Identifier: Apache-2.0
"""What people do about a spike, as config lines for the verl that ran: one table for console, page, health and docs.

A test composes every line with that verl's own config, and checks that it changes a setting that verl reads.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

VERLS = ("0.7", "0.9")
"""The verls that there are lines for."""

_ACTOR, _ROLLOUT, _CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
_GRADLOC = f"{_ACTOR}.gradloc"
CHECKPOINT = "CHECKPOINTS/global_step_N"
"""In a line, where the run's own checkpoint is not known."""
_LOG_PROBS = f"{_ROLLOUT}.calculate_log_probs=true"  # verl 0.9's default


@dataclass(frozen=True)
class Action:
    """One thing to do."""

    do: str
    """A sentence."""
    on_07: str
    """Hydra overrides for verl 0.7; empty where it has none."""
    on_09: str | None = None
    """The same for verl 0.9; None: as for 0.7."""

    def line(self, verl: str) -> str:
        """The overrides for one of :data:`VERLS`."""
        return self.on_07 if verl == "0.7" or self.on_09 is None else self.on_09


ACTIONS = {
    # ---- GradLoc's own
    "localize": Action("Turn GradLoc on to find the tokens.", f"{_ACTOR}.spike_detection=true", "+gradloc=on"),
    "mask": Action("Take such steps without the culprits.", f"{_GRADLOC}.action.mode=mask"),
    "skip": Action("Skip such steps.", f"{_GRADLOC}.action.mode=skip"),
    "mask_critic": Action("Take such steps of the critic without the culprits.", f"{_GRADLOC}.critic=mask"),
    "more_steps": Action("Let the search run longer.", f"{_GRADLOC}.search.max_steps=8"),
    "more_probes": Action(
        "Give the search more probes.", f"{_ACTOR}.bisect_budget_steps=512", f"{_GRADLOC}.budget=512"
    ),
    "more_culprits": Action("Look for more culprits.", f"{_GRADLOC}.search.max_culprits=32"),
    "rerun": Action("Rerun each spike: bad data repeats, bad hardware does not.", f"{_GRADLOC}.evidence.rerun=true"),
    "no_rehearsal": Action("End the rehearsal.", f"{_GRADLOC}.trigger.force_step=null"),
    "keep_weights": Action("Save the weights, to replay such a step.", f"{_GRADLOC}.evidence.checkpoint=before_step"),
    "clip_tokens": Action(
        "Bound each token's ratio to the policy that sampled it.",
        f"{_GRADLOC}.stabilize.token_clip.mode=clamp {_LOG_PROBS}",
    ),
    "clip_sequences": Action(
        "Bound each response's ratio to the policy that sampled it.",
        f"{_GRADLOC}.stabilize.seq_clip.mode=clamp {_LOG_PROBS}",
    ),
    "clip_layers": Action("Clip each layer by its own history.", f"{_GRADLOC}.stabilize.layer_clip.rule=zscore"),
    "reweight": Action(
        "Scale down the advantages of unlikely tokens (Advantage Reweighting).",
        "algorithm.advantage_reweighting.alpha=0.3",
    ),
    "lopti": Action("Update unlikely tokens separately (Lopti).", "algorithm.lopti.enable=true"),
    # ---- the step and its loss
    "clip": Action("Clip the gradient harder.", f"{_ACTOR}.grad_clip=0.5", f"{_ACTOR}.optim.clip_grad=0.5"),
    "clip_less": Action(
        "Nothing, if the reward rises: Adam's steps depend little on the clip. Else clip less.",
        f"{_ACTOR}.grad_clip=2.0",
        f"{_ACTOR}.optim.clip_grad=2.0",
    ),
    "clip_critic": Action("Clip the critic's gradient harder.", "critic.grad_clip=0.5", "critic.optim.clip_grad=0.5"),
    "smaller_steps": Action("Lower the learning rate.", f"{_ACTOR}.optim.lr=5e-7"),
    "warm_up": Action("Warm up the learning rate, if it happens early.", f"{_ACTOR}.optim.lr_warmup_steps=20"),
    "one_epoch": Action("Update once per rollout, so that the policy drifts less.", f"{_ACTOR}.ppo_epochs=1"),
    "dual_clip": Action("Bound the ratio where the advantage is negative (dual clip).", f"{_ACTOR}.clip_ratio_c=2.0"),
    "clip_high": Action("Bound the ratio where the advantage is positive.", f"{_ACTOR}.clip_ratio_high=0.2"),
    "clip_higher": Action("Let unlikely tokens gain more: clip higher (DAPO).", f"{_ACTOR}.clip_ratio_high=0.28"),
    "gspo": Action("Clip whole responses instead of tokens (GSPO).", f"{_ACTOR}.policy_loss.loss_mode=gspo"),
    "plain_loss": Action(
        "Use the vanilla policy loss: this one gives NaN outside of the response mask.",
        f"{_ACTOR}.policy_loss.loss_mode=vanilla",
    ),
    "kl_cov": Action("Hold back the tokens that drive entropy down.", f"{_ACTOR}.policy_loss.loss_mode=kl_cov"),
    "by_sequence": Action("Weigh long and short responses alike.", f"{_ACTOR}.loss_agg_mode=seq-mean-token-mean"),
    "kl_mse": Action("Use a KL estimator without an exponential.", f"{_ACTOR}.kl_loss_type=mse"),
    "less_kl": Action("Lower the KL penalty.", f"{_ACTOR}.kl_loss_coef=0.0001"),
    "use_kl": Action("Add a KL penalty, to stay near the reference.", f"{_ACTOR}.use_kl_loss=true"),
    "no_entropy": Action("Drop the entropy bonus, or lower it.", f"{_ACTOR}.entropy_coeff=0"),
    "pay_entropy": Action("Add a small entropy bonus.", f"{_ACTOR}.entropy_coeff=0.001"),
    "mean_only": Action(
        "Do not divide advantages by the group's standard deviation, which can be tiny.",
        "algorithm.norm_adv_by_std_in_grpo=false",
    ),
    "clamp_teacher": Action(
        "Bound what one token's distance from the teacher counts.",
        "",
        "distillation.distillation_loss.loss_max_clamp=2.0",
    ),
    "bound_value": Action("Bound how far a value may move in one update.", "critic.cliprange_value=0.2"),
    "critic_first": Action("Train the critic alone at first.", "trainer.critic_warmup=20"),
    # ---- rollouts and data
    "keep_rollouts": Action("Save the rollouts and read them with their rewards.", "trainer.rollout_data_dir=rollouts"),
    "log_probs": Action("Record the rollout engine's own log-probs.", _LOG_PROBS),
    "weigh_tokens": Action(
        "Weigh tokens by the truncated ratio of trainer to rollout engine (TIS).",
        f"{_CORRECTION}.rollout_is=token {_LOG_PROBS}",
    ),
    "drop_sequences": Action(
        "Drop responses whose mean ratio is out of bounds.",
        f"{_CORRECTION}.rollout_rs=geometric {_CORRECTION}.rollout_rs_threshold=1.001 {_LOG_PROBS}",
        f"{_CORRECTION}.rollout_rs=seq_mean_k1 {_CORRECTION}.rollout_rs_threshold=0.999_1.001 {_LOG_PROBS}",
    ),
    "veto": Action(
        "Drop what the trainer finds all but impossible.",
        f"{_CORRECTION}.rollout_token_veto_threshold=1e-4 {_LOG_PROBS}",
        f"{_CORRECTION}.rollout_rs=token_k1 {_CORRECTION}.rollout_rs_threshold=1e-4_1e4 {_LOG_PROBS}",
    ),
    "veto_less": Action(
        "Veto at a lower probability.",
        f"{_CORRECTION}.rollout_token_veto_threshold=1e-5",
        f"{_CORRECTION}.rollout_rs_threshold=1e-5_1e5",
    ),
    "truncate": Action("Truncate the correction's weights lower.", f"{_CORRECTION}.rollout_is_threshold=1.5"),
    "mean_weight": Action("Keep the correction's mean weight at 1.", f"{_CORRECTION}.rollout_is_batch_normalize=true"),
    "eager": Action("Run the engine eagerly, to rule out its optimizations.", f"{_ROLLOUT}.enforce_eager=true"),
    "less_tail": Action("Sample fewer unlikely tokens; the trainer does not see the cut.", f"{_ROLLOUT}.top_p=0.95"),
    "warmer": Action("Raise the temperature, for more diverse rollouts.", f"{_ROLLOUT}.temperature=1.0"),
    "cooler": Action("Lower the temperature, for fewer unlikely tokens.", f"{_ROLLOUT}.temperature=0.8"),
    "more_rollouts": Action("Sample more per prompt: fewer groups are all right or all wrong.", f"{_ROLLOUT}.n=16"),
    "differing_groups": Action("Train on groups that differ only.", f"{_ROLLOUT}.rollout_filter_include_zero=false"),
    "longer": Action("Allow longer responses.", "data.max_response_length=4096"),
    "shorter_prompts": Action("Drop prompts that leave no room for an answer.", "data.filter_overlong_prompts=true"),
    # ---- weights and precision
    "go_back": Action(
        "Resume from an earlier checkpoint.", f"trainer.resume_mode=resume_path trainer.resume_from_path={CHECKPOINT}"
    ),
    "fp32": Action("Keep the weights in fp32, to rule out precision.", f"{_ACTOR}.fsdp_config.model_dtype=fp32"),
    "fp32_forward": Action("Run the forward in fp32, to look for an overflow.", f"{_ACTOR}.fsdp_config.dtype=float32"),
    "shard_all": Action("Shard over all ranks: then there are no replicas.", f"{_ACTOR}.fsdp_config.fsdp_size=-1"),
    "padded": Action("Turn sequence packing off, to rule it out.", "actor_rollout_ref.model.use_remove_padding=false"),
    "not_compiled": Action(
        "Turn torch.compile off, to rule it out.",
        f"{_ACTOR}.use_torch_compile=false",
        f"{_ACTOR}.fsdp_config.use_torch_compile=false",
    ),
}
"""By a name of our own, which the other tables here use."""


OF_REWARDS = {
    *("reweight", "lopti", "mean_only", "pay_entropy", "no_entropy", "kl_mse", "less_kl", "use_kl", "plain_loss"),
    *("dual_clip", "clip_high", "clip_higher", "gspo", "kl_cov", "clip_tokens", "clip_sequences", "weigh_tokens"),
}
"""Of these, settings of the loss on rewards: they do nothing where distillation is the whole loss."""


def verl_of(trainer: str | None) -> str | None:
    """Which of :data:`VERLS` a record's trainer is.

    >>> verl_of("verl 0.9.1"), verl_of("verl 0.7.0.dev1"), verl_of(None)
    ('0.9', '0.7', None)
    """
    version = re.match(r"verl (\d+)\.(\d+)", trainer or "")
    if not version:
        return None
    return "0.7" if (int(version[1]), int(version[2])) < (0, 8) else "0.9"


def lines_of(name: str, trainer: str | None) -> dict[str, str]:
    """An action's config line for the trainer that made the run; empty where it has none.

    Returns:
        The line, by an empty name. Where the record does not say which verl made it and the lines differ, both, by
        their verls' names.
    """
    return _by_verl({verl: ACTIONS[name].line(verl) for verl in VERLS}, trainer)


def replay_line(bundle: str) -> str:
    """The command that runs an event's search again on one machine, whatever trainer made the run; ``bundle`` is the
    event's folder, quoted for a shell."""
    return f"python -m gradloc.replay {bundle} --model MODEL_PATH"


def _by_verl(lines: Mapping[str, str], trainer: str | None) -> dict[str, str]:
    if is_trl(trainer):
        settings = trl_settings(lines["0.7"]) or trl_settings(lines["0.9"])
        return {"": settings} if settings else {}
    verl = verl_of(trainer)
    if verl is not None:
        return {"": lines[verl]} if lines[verl] else {}
    if len(set(lines.values())) == 1:
        return {"": lines[VERLS[0]]}
    return {f"verl {verl}": lines[verl] for verl in reversed(VERLS) if lines[verl]}


def actions_of(names: Iterable[str], trainer: str | None = None) -> list[tuple[str, str]]:
    """Pairs of what to do and its config line; a verl that a line is for stands in brackets where that matters."""
    pairs = [(ACTIONS[name].do, label, line) for name in names for label, line in lines_of(name, trainer).items()]
    return [(f"{do[:-1]} ({label})." if label else do, line) for do, label, line in pairs]


def in_force(line: str, actor: Mapping[str, Any]) -> bool:
    """Whether a run's ``actor_rollout_ref.actor`` has all settings of a line already; False where it is not known."""
    return all(_is_set(override, actor) for override in line.split())


def _is_set(override: str, actor: Mapping[str, Any]) -> bool:
    key, _, wanted = override.partition("=")
    value: Any = actor if key.startswith(f"{_ACTOR}.") else None
    for name in key.removeprefix(f"{_ACTOR}.").split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    try:
        return math.isclose(float(value), float(wanted))
    except (TypeError, ValueError):
        return str(value).lower() == wanted.lower()


# ---- TRL's settings

_IN_TRL = {
    f"{_ACTOR}.clip_ratio_high": "epsilon_high",
    f"{_ACTOR}.clip_ratio_c": "delta",
    f"{_ACTOR}.entropy_coeff": "entropy_coef",
    f"{_ACTOR}.grad_clip": "max_grad_norm",
    f"{_ACTOR}.kl_loss_coef": "beta",
    f"{_ACTOR}.optim.lr": "learning_rate",
    f"{_ACTOR}.optim.lr_warmup_steps": "warmup_steps",
    f"{_ACTOR}.ppo_epochs": "num_iterations",
    f"{_ROLLOUT}.n": "num_generations",
    f"{_ROLLOUT}.temperature": "temperature",
    f"{_ROLLOUT}.top_p": "top_p",
    f"{_CORRECTION}.rollout_is_threshold": "vllm_importance_sampling_clip_max",
    "data.max_response_length": "max_completion_length",
}
"""TRL's names of the same settings, with the same values."""
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
    "trainer.resume_mode=resume_path": "",
    f"trainer.resume_from_path={CHECKPOINT}": "trainer.train(resume_from_checkpoint=True)",
}
_BLOCKS_IN_TRL = ("action", "evidence", "search", "trigger")
"""Blocks of our own settings that TRL's trainers take; the stabilizers and the critic are verl's."""


def is_trl(trainer: str | None) -> bool:
    """Whether a record's trainer is TRL."""
    return (trainer or "").startswith("trl")


def trl_settings(line: str) -> str | None:
    """verl's Hydra overrides as settings of TRL; None where it lacks one of them.

    >>> trl_settings("actor_rollout_ref.actor.grad_clip=0.5")
    'max_grad_norm=0.5'
    """
    settings = [_trl_setting(override) for override in line.split()]
    return None if None in settings or not settings else ", ".join(filter(None, settings))


def _trl_setting(override: str) -> str | None:
    if override in _LINES_IN_TRL:
        return _LINES_IN_TRL[override]
    name, _, value = override.partition("=")
    if name in _IN_TRL:
        return f"{_IN_TRL[name]}={_python(value)}"
    block, _, key = name.removeprefix(f"{_GRADLOC}.").partition(".")
    if not name.startswith(f"{_GRADLOC}.") or block not in _BLOCKS_IN_TRL:
        return None
    if (block, key) == ("action", "mode"):
        return f'gradloc="{value}"'
    return f'gradloc={{"{block}": {{"{key}": {_python(value)}}}}}'


def _python(value: str) -> str:
    try:
        return repr(json.loads(value))
    except ValueError:
        return json.dumps(value)
