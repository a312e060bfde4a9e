# SPDX-License-Identifier: Apache-2.0
"""What people do about a spike, as config lines: one table for console, page, health and docs, by the verl that ran.

A test composes every line with that verl's own config, and holds that it changes a setting that verl reads.
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
_LOG_PROBS = f"{_ROLLOUT}.calculate_log_probs=true"  # 0.9 has them by itself
_KEEP = "trainer.rollout_data_dir=rollouts"


@dataclass(frozen=True)
class Action:
    """One thing to do."""

    do: str
    """A sentence."""
    on_07: str
    """The overrides that do it on verl 0.7, for its command line; empty where it has none."""
    on_09: str | None = None
    """The same on verl 0.9; None: the same ones."""

    def line(self, verl: str) -> str:
        """The overrides on one of :data:`VERLS`."""
        return self.on_07 if verl == "0.7" or self.on_09 is None else self.on_09


ACTIONS = {
    # ---- GradLoc's own
    "localize": Action("Turn GradLoc on to find the tokens.", f"{_ACTOR}.spike_detection=true", "+gradloc=on"),
    "mask": Action("Take such a step without its culprits.", f"{_GRADLOC}.action.mode=mask"),
    "skip": Action("Take no such step.", f"{_GRADLOC}.action.mode=skip"),
    "mask_critic": Action("Take such a step of the critic without its culprits.", f"{_GRADLOC}.critic=mask"),
    "more_steps": Action("Let the search cost more.", f"{_GRADLOC}.search.max_steps=8"),
    "more_probes": Action(
        "Give the search more probes.", f"{_ACTOR}.bisect_budget_steps=512", f"{_GRADLOC}.budget=512"
    ),
    "more_culprits": Action("Look for more culprits.", f"{_GRADLOC}.search.max_culprits=32"),
    "rerun": Action("Run each spike again: hardware does not repeat, data does.", f"{_GRADLOC}.evidence.rerun=true"),
    "no_rehearsal": Action("End the rehearsal.", f"{_GRADLOC}.trigger.force_step=null"),
    "keep_weights": Action(
        "Keep the weights of such a step, to replay its bundle with them.",
        f"{_GRADLOC}.evidence.checkpoint=before_step",
    ),
    "clip_tokens": Action(
        "Bound how far a token may be from the policy that wrote it.",
        f"{_GRADLOC}.stabilize.token_clip.mode=clamp {_LOG_PROBS}",
    ),
    "clip_sequences": Action(
        "Bound how far a response may be from the policy that wrote it.",
        f"{_GRADLOC}.stabilize.seq_clip.mode=clamp {_LOG_PROBS}",
    ),
    "clip_layers": Action(
        "Clip each layer by its own history: one layer's spike then does not starve the others.",
        f"{_GRADLOC}.stabilize.layer_clip.rule=zscore",
    ),
    "reweight": Action(
        "Let a token's advantage count less the less likely the token was (Advantage Reweighting).",
        "algorithm.advantage_reweighting.alpha=0.3",
    ),
    "lopti": Action("Update unlikely tokens apart from the others (Lopti).", "algorithm.lopti.enable=true"),
    # ---- the step and its loss
    "clip": Action("Clip the whole step harder.", f"{_ACTOR}.grad_clip=0.5", f"{_ACTOR}.optim.clip_grad=0.5"),
    "clip_less": Action(
        "Nothing, if the reward rises: Adam's steps depend little on the clip. Else let more through.",
        f"{_ACTOR}.grad_clip=2.0",
        f"{_ACTOR}.optim.clip_grad=2.0",
    ),
    "clip_critic": Action("Clip the critic's step harder.", "critic.grad_clip=0.5", "critic.optim.clip_grad=0.5"),
    "smaller_steps": Action("Take smaller steps.", f"{_ACTOR}.optim.lr=5e-7"),
    "warm_up": Action("Start the learning rate slowly if it happens early.", f"{_ACTOR}.optim.lr_warmup_steps=20"),
    "one_epoch": Action(
        "Let the policy drift less within a step: one epoch over the rollouts.", f"{_ACTOR}.ppo_epochs=1"
    ),
    "dual_clip": Action("Bound the ratio where the advantage is negative (dual clip).", f"{_ACTOR}.clip_ratio_c=2.0"),
    "clip_high": Action("Bound the ratio where the advantage is positive.", f"{_ACTOR}.clip_ratio_high=0.2"),
    "clip_higher": Action(
        "Let unlikely tokens gain more: raise the upper clip alone (DAPO).", f"{_ACTOR}.clip_ratio_high=0.28"
    ),
    "gspo": Action("Clip whole responses instead of tokens (GSPO).", f"{_ACTOR}.policy_loss.loss_mode=gspo"),
    "plain_loss": Action(
        "Take the plain policy loss: this one gives NaN outside of the response mask.",
        f"{_ACTOR}.policy_loss.loss_mode=vanilla",
    ),
    "kl_cov": Action(
        "Keep the tokens that drive entropy down from being updated.", f"{_ACTOR}.policy_loss.loss_mode=kl_cov"
    ),
    "by_sequence": Action(
        "Keep long responses from weighing more than short ones.", f"{_ACTOR}.loss_agg_mode=seq-mean-token-mean"
    ),
    "kl_mse": Action(
        "Use a KL estimator without an exponential: its gradient grows with the log-ratio.",
        f"{_ACTOR}.kl_loss_type=mse",
    ),
    "less_kl": Action("Weigh the KL penalty less.", f"{_ACTOR}.kl_loss_coef=0.0001"),
    "use_kl": Action("Hold the policy near the reference.", f"{_ACTOR}.use_kl_loss=true"),
    "no_entropy": Action("Drop the entropy bonus, or weigh it less.", f"{_ACTOR}.entropy_coeff=0"),
    "pay_entropy": Action("Pay for entropy, a little.", f"{_ACTOR}.entropy_coeff=0.001"),
    "mean_only": Action(
        "Subtract the group's mean only: GRPO divides by its standard deviation, which can be tiny.",
        "algorithm.norm_adv_by_std_in_grpo=false",
    ),
    "bound_value": Action("Bound how far a value may move in one update.", "critic.cliprange_value=0.2"),
    "critic_first": Action("Let the critic learn before the actor follows it.", "trainer.critic_warmup=20"),
    # ---- rollouts and data
    "keep_rollouts": Action("Keep the rollouts and read them, with their rewards.", _KEEP),
    "log_probs": Action("Record the rollout engine's own log-probs.", _LOG_PROBS),
    "weigh_tokens": Action(
        "Weigh tokens by the truncated ratio of trainer to rollout engine.",
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
    "eager": Action(
        "Rule the engine's optimizations out: run it eagerly for a while.", f"{_ROLLOUT}.enforce_eager=true"
    ),
    "less_tail": Action(
        "Sample fewer unlikely tokens; the trainer's log-probs do not know of the cut.", f"{_ROLLOUT}.top_p=0.95"
    ),
    "warmer": Action("Sample more diverse rollouts, if the temperature is below that.", f"{_ROLLOUT}.temperature=1.0"),
    "cooler": Action("Sample fewer unlikely tokens.", f"{_ROLLOUT}.temperature=0.8"),
    "more_rollouts": Action(
        "Draw more rollouts per prompt: fewer groups are all right or all wrong.", f"{_ROLLOUT}.n=16"
    ),
    "differing_groups": Action(
        "Train on the groups that differ only.", f"{_ROLLOUT}.rollout_filter_include_zero=false"
    ),
    "longer": Action("Leave more room for answers.", "data.max_response_length=4096"),
    "shorter_prompts": Action("Drop prompts that leave no room for an answer.", "data.filter_overlong_prompts=true"),
    # ---- weights and precision
    "go_back": Action(
        "Go back to a checkpoint from before it, named by trainer.resume_from_path.", "trainer.resume_mode=resume_path"
    ),
    "fp32": Action("Rule out precision: keep the trained weights in fp32.", f"{_ACTOR}.fsdp_config.model_dtype=fp32"),
    "fp32_forward": Action("Look for an overflow: run the forward in fp32.", f"{_ACTOR}.fsdp_config.dtype=float32"),
    "shard_all": Action("Shard over all ranks: then there are no replicas.", f"{_ACTOR}.fsdp_config.fsdp_size=-1"),
    "padded": Action(
        "Rule out the packing of sequences and its attention kernel.",
        "actor_rollout_ref.model.use_remove_padding=false",
    ),
    "not_compiled": Action(
        "Rule out compiled kernels.",
        f"{_ACTOR}.use_torch_compile=false",
        f"{_ACTOR}.fsdp_config.use_torch_compile=false",
    ),
}
"""By a name of our own, which the other tables here use."""


def verl_of(trainer: str | None) -> str | None:
    """Which of :data:`VERLS` a record's trainer is.

    >>> verl_of("verl 0.9.1"), verl_of("verl 0.7.0.dev1"), verl_of(None)
    ('0.9', '0.7', None)
    """
    found = re.match(r"verl (\d+)\.(\d+)", trainer or "")
    if not found:
        return None
    return "0.7" if (int(found[1]), int(found[2])) < (0, 8) else "0.9"


def lines_of(name: str, trainer: str | None) -> dict[str, str]:
    """An action's config lines for the trainer that made the run.

    Returns:
        The line, under the name of the verl that it is for where that matters: where the record does not say which
        verl made it and the lines differ, both. Empty where there is none.
    """
    return _by_verl({verl: ACTIONS[name].line(verl) for verl in VERLS}, trainer)


def replay_lines(bundle: str, trainer: str | None) -> dict[str, str]:
    """The command that runs an event's search again on one machine, as :func:`lines_of`.

    Args:
        bundle: the event's folder, quoted for a shell.
        trainer: what made the run.
    """
    if is_trl(trainer):
        return {"": f"python -m gradloc.replay {bundle} --model MODEL_PATH"}
    module = {"0.7": "verl.gradloc.replay", "0.9": "gradloc.replay"}
    return _by_verl({verl: f"python -m {module[verl]} {bundle} --model MODEL_PATH" for verl in VERLS}, trainer)


def _by_verl(lines: Mapping[str, str], trainer: str | None) -> dict[str, str]:
    if is_trl(trainer):
        said = trl_settings(lines["0.9"] or lines["0.7"])
        return {"": said} if said else {}
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
    return all(_holds(override, actor) for override in line.split())


def _holds(override: str, actor: Mapping[str, Any]) -> bool:
    key, _, wanted = override.partition("=")
    if not key.startswith(f"{_ACTOR}."):
        return False
    found: Any = actor
    for name in key.removeprefix(f"{_ACTOR}.").split("."):
        if not isinstance(found, Mapping) or name not in found:
            return False
        found = found[name]
    if isinstance(found, int | float) and not isinstance(found, bool):
        try:
            return math.isclose(found, float(wanted))
        except ValueError:
            return False
    return str(found).lower() == wanted.lower()


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


def is_trl(trainer: str | None) -> bool:
    """Whether a record's trainer is TRL."""
    return (trainer or "").startswith("trl")


def trl_settings(line: str) -> str | None:
    """verl's Hydra overrides as settings of TRL; None where it lacks one of them.

    >>> trl_settings("actor_rollout_ref.actor.grad_clip=0.5")
    'max_grad_norm=0.5'
    """
    said = [_setting(override) for override in line.split()]
    return None if None in said or not said else ", ".join(map(str, said))


def _setting(override: str) -> str | None:
    if override in _LINES_IN_TRL:
        return _LINES_IN_TRL[override]
    name, _, value = override.partition("=")
    if not name.startswith(f"{_GRADLOC}."):
        return f"{_IN_TRL[name]}={_python(value)}" if name in _IN_TRL else None
    block, _, key = name.removeprefix(f"{_GRADLOC}.").partition(".")
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
