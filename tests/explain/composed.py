# SPDX-License-Identifier: Apache-2.0
"""The advice's config lines in verl's own config: composed, built as verl builds it, and read by verl's code."""

import functools
import importlib
import re
import shlex
from pathlib import Path

from gradloc.explain.advice import ACTIONS
from tests.world.configs import config_of

NEEDED = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.name=vllm"]
BASE = {"0.7": [*NEEDED, "actor_rollout_ref.actor.spike_detection=true"], "0.9": [*NEEDED, "+gradloc=on"]}
GIVEN = {
    "localize": {"0.7": ["actor_rollout_ref.actor.spike_detection=false"]},
    "no_rehearsal": ["actor_rollout_ref.actor.gradloc.trigger.force_step=3"],
    "one_epoch": ["actor_rollout_ref.actor.ppo_epochs=4"],
    "clip_ratios": [f"actor_rollout_ref.actor.clip_ratio_{side}=0.28" for side in ("low", "high")],
    "divide": ["algorithm.norm_adv_by_std_in_grpo=false"],
    "kl_low_var": ["actor_rollout_ref.actor.kl_loss_type=mse"],
    "clip_high": ["actor_rollout_ref.actor.clip_ratio_high=0.28"],
    "plain_loss": ["actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov"],
    "no_entropy": ["actor_rollout_ref.actor.entropy_coeff=0.01"],
    "fp32": ["actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"],
    "warmer": ["actor_rollout_ref.rollout.temperature=0.6"],
    "padded": ["actor_rollout_ref.model.use_remove_padding=true"],
    "shard_all": ["actor_rollout_ref.actor.fsdp_config.fsdp_size=8"],
    "log_probs": ["actor_rollout_ref.rollout.calculate_log_probs=false"],
}
"""What a run has that is given this advice, where that is not verl's default."""
MAY_HOLD = ("calculate_log_probs=true",)
"""Overrides that come along with others, and that a later verl has by default."""
OURS = {
    "gradloc",
    "spike_detection",
    "bisect_budget_steps",
    "lopti",
    "advantage_reweighting",
    "rollout_filter_include_zero",
}
"""Parts of the keys that are ours; the others are for verl's own code to read."""
PARTS = ("actor_rollout_ref.actor", "actor_rollout_ref.rollout")


def problems(line: str, verl: str, given: list[str] = ()) -> list[str]:
    """What is wrong with a config line: it does not compose, does not build, changes nothing, or nobody reads it.

    Args:
        line: overrides.
        verl: of ``advice.VERLS``; the one that is installed.
        given: what the run has already.
    """
    base, overrides = [*BASE[verl], *given], shlex.split(line)
    if any(override.startswith("+gradloc=") for override in overrides):
        base = [override for override in base if not override.startswith("+gradloc=")]
    try:
        before, after = config_of(base), config_of([*base, *overrides])
        _build(after, verl)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return [wrong for override in overrides if (wrong := _effect(override, before, after))]


def _build(config, verl: str) -> None:
    from omegaconf import OmegaConf

    from verl.utils.config import omega_conf_to_dataclass

    correction = config.algorithm.rollout_correction
    if verl == "0.9":
        from verl.trainer.ppo import rollout_corr_helper as helper

        if correction.rollout_rs:
            helper._parse_rollout_rs_thresholds([correction.rollout_rs], correction.rollout_rs_threshold)
        helper._parse_rollout_is_threshold(correction.rollout_is_threshold)
    for part in PARTS:
        omega_conf_to_dataclass(OmegaConf.select(config, part))


def _effect(override: str, before, after) -> str:
    from omegaconf import OmegaConf

    key = override.partition("=")[0]
    if key.startswith("+"):
        return "" if before != after else f"{override} changes nothing"
    is_same = OmegaConf.select(before, key) == OmegaConf.select(after, key)
    if is_same and not override.endswith(MAY_HOLD):
        return f"{override} changes nothing"
    *_, name = names = key.split(".")
    reader = "gradloc" if OURS & {*names} else "verl"
    name = name.removeprefix("rollout_filter_")  # our settings have the key without it
    name = {"bisect_budget_steps": "budget", "spike_detection": "enable"}.get(name, name)  # published names of ours
    return "" if name in _read(reader) else f"nobody reads {name}"


@functools.cache
def _read(package: str) -> set[str]:
    """Every name that a package's code asks a config for; where they are declared or told does not count."""
    root, found = Path(importlib.import_module(package).__file__).parent, set()
    passed_over = {"config", "megatron", "explain", "report", *({"gradloc"} if package == "verl" else ())}
    for path in root.rglob("*.py"):
        if not passed_over & {*path.relative_to(root).parts}:
            found |= set(re.findall(r"""(?:\.|\(["'])([a-z_0-9]+)\b""", path.read_text(encoding="utf-8")))
    for path in root.rglob("*.yaml"):  # what another key takes its value from
        found |= set(re.findall(r"\$\{[\w.:]*\b([a-z_0-9]+)[,}]", path.read_text(encoding="utf-8")))
    return found


def main(verl: str) -> dict[str, list[str]]:
    """What is wrong with each action's line."""
    found = {}
    for name, action in ACTIONS.items():
        given = GIVEN.get(name, [])
        line = action.line(verl)
        wrong = problems(line, verl, given.get(verl, []) if isinstance(given, dict) else given) if line else []
        found |= {name: wrong} if wrong else {}
    return found
