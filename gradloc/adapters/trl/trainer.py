# SPDX-License-Identifier: Apache-2.0
"""Subclasses of TRL's trainers with GradLoc."""

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import trl

from ...checks import require
from ...private_api import extended
from ...watch.analyses import LoopAnalyses
from .config import check_trl, features_of, health_of, refuse, settings_of, setup_of
from .step import OTHER_KEY, REWARD_KEY, within_stage
from .watch import TrainerWatch, group_of, other_advantages


class WatchedTrainer:
    """Mixin before a TRL trainer, which stays TRL's alone while ``gradloc`` and ``health`` are off.

    Args:
        gradloc: ``observe``, ``mask``, ``skip``, ``abort`` or ``off``; settings by name; or a GradLocConfig. None: what
            the config says (``args.gradloc``), else ``observe``.
        health: whether the health monitor judges each step, or its settings. None: what the config says, else not.
        others: TRL's.
    """

    _watch: Any = None

    def __init__(self, *args: Any, gradloc: Any = None, health: Any = None, **others: Any):
        super().__init__(*args, **others)
        self._start(gradloc, health)

    def _start(self, gradloc: Any, health: Any) -> None:
        args = self.args
        given = getattr(args, "gradloc", "observe") if gradloc is None else gradloc
        settings, (analyses, lopti) = settings_of(given, args.output_dir), features_of(given)
        judge = health_of(getattr(args, "health", False) if health is None else health)
        if settings is None and judge is None:
            return
        check_trl()
        refuse(setup_of(self), settings)
        if lopti is not None:
            is_grpo = isinstance(self, trl.GRPOTrainer)
            require(is_grpo, "the trainer with gradloc's lopti", "TRL's GRPOTrainer", type(self).__name__)
            expected = "2 with gradloc's lopti, whose stages they are"
            require(self.num_iterations == 2, "num_iterations", expected, self.num_iterations)
        self._watch = TrainerWatch(self, settings, judge)
        if settings is not None:
            names = {"project": "trl", "experiment": args.run_name or os.path.basename(args.output_dir)}
            self._watch.analyses, self._watch.lopti = LoopAnalyses(analyses, settings.root, names), lopti

    # ---- an optimizer step, from its first micro-batch to the optimizer

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self._watch is None:
            return super().training_step(model, inputs, num_items_in_batch)
        self._watch.before_micro_batch(model)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._watch.after_micro_batch(loss)
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        return norm if self._watch is None else self._watch.before_step(norm)

    # ---- logs and checkpoints

    def log(self, logs: dict[str, float], *args: Any, **given: Any) -> None:
        if self._watch is not None and self.model.training:
            logs.update(self._watch.take_metrics())
        super().log(logs, *args, **given)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self._watch is not None:
            folder = f"checkpoint-{self.state.global_step}"
            self._watch.save(os.path.join(self._get_output_dir(trial=trial), folder))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._watch is not None and checkpoint is not None:
            self._watch.load(checkpoint)


class WatchedRewards(WatchedTrainer):
    """Mixin before a TRL trainer whose loss is of advantages."""

    _rewards: torch.Tensor | None = None
    _stage: torch.Tensor | None = None

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        if self._watch is None:
            return super()._compute_loss(model, inputs)
        self._stage = self._watch.begin_stage(inputs)
        loss = super()._compute_loss(model, inputs)
        self._watch.keep_rollouts(inputs, self._stage)
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **given: Any) -> Any:
        log_probs, entropies, *others = super()._get_per_token_logps_and_entropies(*args, **given)
        stage = self._stage if torch.is_grad_enabled() else None
        return (*within_stage(stage, log_probs, entropies), *others)

    def get_high_entropy_mask(self, *args: Any, **given: Any) -> Any:
        mask = super().get_high_entropy_mask(*args, **given)
        if self._watch is not None:
            self._watch.keep(entropy_mask=mask)
        return mask

    # ---- rewards, which the inputs do not hold

    def _calculate_rewards(self, *args: Any, **given: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*args, **given)
        if self._watch is not None:
            summed = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
            self._rewards = summed.masked_fill(rewards.isnan().all(dim=1), torch.nan)
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        if self._rewards is not None:
            rewards, self._rewards, first = self._rewards, None, self.accelerator.process_index * len(inputs)
            output[REWARD_KEY] = rewards.masked_fill(rewards.isnan(), 0.0)[first : first + len(inputs)]
            estimator = group_of(self.args).get("estimator")
            if estimator in ("grpo", "grpo_mean") and self.model.training:  # asking the rewards would wait for them
                other = other_advantages(rewards, self.num_generations, estimator == "grpo")
                output[OTHER_KEY] = other[first : first + len(inputs)]
        return output


class GRPOTrainer(WatchedRewards, trl.GRPOTrainer):
    """TRL's trainer; arguments are those of :class:`WatchedTrainer`."""


class RLOOTrainer(WatchedRewards, trl.RLOOTrainer):
    """TRL's trainer; arguments are those of :class:`WatchedTrainer`."""


class SFTTrainer(WatchedTrainer, trl.SFTTrainer):
    """TRL's trainer; arguments are those of :class:`WatchedTrainer`."""


class DPOTrainer(WatchedTrainer, trl.DPOTrainer):
    """TRL's trainer; arguments are those of :class:`WatchedTrainer`."""


@dataclass
class _Switches:
    gradloc: dict | str | None = field(default="observe", metadata={"help": "off, an action's mode, or settings."})
    health: dict | str | None = field(default=None, metadata={"help": "true, false, or settings."})


@dataclass
class GRPOConfig(_Switches, trl.GRPOConfig):
    """TRL's config with GradLoc's settings, for YAML files and command lines."""


@dataclass
class RLOOConfig(_Switches, trl.RLOOConfig):
    """TRL's config with GradLoc's settings, for YAML files and command lines."""


@dataclass
class SFTConfig(_Switches, trl.SFTConfig):
    """TRL's config with GradLoc's settings, for YAML files and command lines."""


@dataclass
class DPOConfig(_Switches, trl.DPOConfig):
    """TRL's config with GradLoc's settings, for YAML files and command lines."""


def attach(trainer: Any, gradloc: Any = None, health: Any = None) -> None:
    """Switch GradLoc on in a trainer that exists already.

    Raises:
        ValueError: one sentence that says why it cannot look into this run.
    """
    pairs = (ours.__bases__ for ours in (GRPOTrainer, RLOOTrainer, SFTTrainer, DPOTrainer))
    kind = next((mixin for mixin, theirs in pairs if isinstance(trainer, theirs)), None)
    if kind is None:
        name = f"{type(trainer).__module__}.{type(trainer).__name__}"
        raise ValueError(f"gradloc.trl.attach takes a trainer of TRL's GRPO, RLOO, SFT or DPO, found a {name}.")
    trainer.__class__ = extended(type(trainer), kind)
    trainer._start(gradloc, health)
