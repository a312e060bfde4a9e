# SPDX-License-Identifier: Apache-2.0
"""Watch a TRL trainer's steps.

Every process is a trainer there: the rank's side of a search is on each of them, the driver's side on the first. They
exchange three small messages an optimizer step.
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from trl.trainer.utils import nanstd

from ...health.config import HealthConfig
from ...health.monitor import Monitor
from ...health.rules import FROM_TRL
from ...loop import metrics as step_metrics
from ...loop.batch import BatchView, Rows, stack_rows
from ...loop.driver import Driver, Stateful, sequence_ids
from ...loop.messages import Policy
from ...loop.writer import keep_weights
from ...record import Run
from ...record.origin import with_origin
from ...reweighting.config import LoptiConfig
from ...watch.watch import Watch
from .step import OF_PROMPT, TrlStep, mask_of


class TrainerWatch(Watch, Stateful):
    """Looks into the steps of a TRL trainer that is ready to train, for spikes, for its health, or for both."""

    lopti: LoptiConfig | None = None

    def __init__(self, trainer: Any, settings: Any, health: HealthConfig | None):
        self.trainer = trainer
        if settings is not None and not hasattr(trainer.args, "num_generations"):  # no replay of SFT and DPO
            settings = replace(settings, evidence=replace(settings.evidence, bundle="off"))
        super().__init__(trainer.model, action="off" if settings is None else settings, metrics=False)
        self._unlogged: list[dict[str, float]] = []
        self._num_known: dict[str, int] = {}
        """Number of values of earlier steps in each of TRL's metrics."""
        self._loss: Any = None
        """Loss of the step so far; None between two steps."""
        self.monitor = None
        if self.ranks.is_first and health is not None:
            limit = trainer.args.max_grad_norm
            self.monitor = Monitor(health, limit or None, compares_rollouts=False)  # TRL logs that itself

    # ---- the moments of an optimizer step, in order

    def before_micro_batch(self, model: torch.nn.Module) -> None:
        """Begin a micro-batch, before its generation, forward and backward."""
        if self.localizer is not None:
            self.tap.attach(model)
            self.follow(self.trainer.optimizer)
        if self._loss is None:
            self._num_known = {name: len(values) for name, values in self.trainer._metrics["train"].items()}
            self._loss = 0.0

    def keep(self, **known: Any) -> None:
        """Note what the loss knows about the last forward, for a search."""
        if self.localizer is not None and self.tap.forwards and torch.is_grad_enabled():
            self.tap.forwards[-1].known |= known

    def keep_rollouts(self, inputs: dict[str, Any], stage: torch.Tensor | None) -> None:
        """Note the inputs of TRL's loss of the last forward."""
        self.note(mask=mask_of(inputs), ids=inputs["completion_ids"], advantages=inputs["advantages"])
        self.keep(inputs=inputs, stage=stage)

    def begin_stage(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """Begin Lopti's stage of this micro-batch. Return its tokens, bool (B, T); None without Lopti.

        TRL's first pass over its rollouts is the first stage.
        """
        if self.lopti is None:
            return None
        steps = self.trainer.args.steps_per_generation
        is_first = self.trainer._step % (2 * steps) < steps
        is_low = is_first if self.lopti.eta > 0 else not is_first
        self.stage_name = "low" if is_low else "high"
        return (inputs["old_per_token_logps"].exp() < abs(self.lopti.eta)) == is_low

    def after_micro_batch(self, loss: torch.Tensor) -> None:
        """End a micro-batch, after its backward."""
        self._loss += loss.detach()

    def before_step(self, norm: Any) -> Any:
        """Look in between clipping and step; returns the norm of the gradient that the optimizer takes."""
        self.metrics, self._next_number, self._is_checked = {}, self.trainer.state.global_step + 1, True
        try:
            taken = self.check_step(norm)
            if self.monitor is not None:
                self._judge(norm, self.metrics)
        finally:
            self._loss = None
        if self.metrics:
            self._unlogged.append(self.metrics)
        return taken

    def make_step(self) -> TrlStep:
        return TrlStep(self.trainer, self.tap, self.ranks)

    def prepare_search(self, norm: torch.Tensor, policy: Policy) -> Policy | None:
        """Skip the check of the replayed gradient where log-probs were recorded: TRL clips once and changes no gradient
        otherwise."""
        return policy if self.step.has_log_probs else super().prepare_search(norm, policy)

    def view(self, by_rank: Any) -> BatchView:
        self.driver.notifier.trackers = trackers_of(self.trainer)
        has_prompts = all("prompt_ids" in rows for rows in by_rank)
        return view_of(by_rank) if has_prompts else super().view(by_rank)

    def _write_metrics(self, norm: torch.Tensor) -> None:
        """Do nothing: the trainer logs them."""

    def take_metrics(self) -> dict[str, float]:
        """Return the first process' metrics since the last call, each joined over steps as its name asks for."""
        steps, self._unlogged = self._unlogged, []
        return step_metrics.joined(steps) if steps else {}

    @property
    def parts(self) -> dict[str, Any]:  # type: ignore[override]
        return {"spikes": self.driver, "health": self.monitor}

    # ---- inside

    def _device_of(self, model: torch.nn.Module) -> torch.device:
        return self.trainer.accelerator.device  # where the model may only come to be

    def _make_driver(self, *_: Any) -> Driver:
        trainer, settings = self.trainer, self.settings
        args, trained = trainer.args, trainer.args.to_dict()
        model = getattr(trainer.model.config, "_name_or_path", None)
        project, name = os.environ.get("WANDB_PROJECT", "trl"), args.run_name or os.path.basename(args.output_dir)
        run = with_origin(Run(project, name, model=model, **group_of(args)), trained, "trl")
        return Driver(settings, tokenizer=trainer._tokenizer, run=run, trained=trained)

    def _judge(self, norm: Any, metrics: dict[str, float]) -> None:
        """Judge the step's health, and add to its metrics; the rules use verl's names."""
        step = {FROM_TRL["grad_norm"]: float(norm), FROM_TRL["loss"]: float(self._loss), **metrics}
        for theirs, ours in FROM_TRL.items():
            values = self.trainer._metrics["train"].get(theirs, [])[self._num_known.get(theirs, 0) :]
            if values:
                step[ours] = sum(values) / len(values)
        before = set(step)
        self.monitor.observe(None, step, self.trainer.state.global_step + 1)
        metrics.update({name: value for name, value in step.items() if name not in before})

    # ---- what the localizer asks of the trainer

    def save_weights(self, global_step: int) -> str | None:
        trainer = self.trainer

        def write(folder: str, state: Any) -> None:
            """Write the weights as one model's folder, on the first process."""
            if self.ranks.is_first:
                trainer._save(folder, state_dict=state)

        gather = partial(trainer.accelerator.get_state_dict, trainer.model_wrapped)
        return keep_weights(self.settings, global_step, self.ranks, gather, write)


def group_of(args: Any) -> dict[str, Any]:
    """Return the estimator of advantages and the number of rollouts, as fields of :class:`~...record.Run`."""
    name = {"group": "grpo", "none": "grpo_mean"}.get(getattr(args, "scale_rewards", ""))
    if getattr(args, "multi_objective_aggregation", None) == "normalize_then_sum":
        name = None
    if hasattr(args, "normalize_advantages"):
        name = None if args.normalize_advantages or args.beta else "rloo"  # its KL is in the reward
    return {"estimator": name, "rollouts": args.num_generations} if hasattr(args, "num_generations") else {}


def trackers_of(trainer: Any) -> dict[str, Any]:
    """Return the tracking clients that the trainer's callbacks have opened, by name."""
    clients: dict[str, Any] = {}
    for callback in trainer.callback_handler.callbacks:
        name = type(callback).__name__.removesuffix("Callback").lower()
        if getattr(callback, "tb_writer", None) is not None:
            clients["tensorboard"] = SimpleNamespace(writer=callback.tb_writer)
        elif name == "wandb":
            clients[name] = _OfWandb(sys.modules[name])
        elif name in ("trackio", "swanlab", "mlflow", "clearml"):
            clients[name] = sys.modules[name]
    return clients


class _OfWandb:
    """Logs to wandb without a step, as TRL does: wandb's own runs ahead, and it drops lines with an earlier step."""

    def __init__(self, client: Any):
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def log(self, payload: dict[str, Any], step: int) -> None:
        self._client.log({**payload, "train/global_step": step})


def other_advantages(rewards: torch.Tensor, num_generations: int, is_divided: bool) -> torch.Tensor:
    """Return TRL's advantages (R,) of rewards (R,) with ``is_divided`` toggled; NaN stands for no reward."""
    grouped = rewards.view(-1, num_generations)
    made = rewards - torch.nanmean(grouped, dim=1).repeat_interleave(num_generations)
    if not is_divided:
        made = made / (nanstd(grouped, dim=1).repeat_interleave(num_generations) + 1e-4)
    return torch.nan_to_num(made, nan=0.0)


def view_of(by_rank: Sequence[Rows]) -> BatchView:
    """Join all ranks' rows, one rank after the other."""
    rows = stack_rows(by_rank, OF_PROMPT)
    prompts, prompt_mask = rows.pop("prompt_ids"), rows.pop("prompt_mask")
    rows["input_ids"] = torch.cat([prompts, rows["responses"]], 1)
    rows["attention_mask"] = torch.cat([prompt_mask, rows.pop("completion_mask")], 1)
    rows["position_ids"] = (rows["attention_mask"].cumsum(1) - 1).clamp(min=0)
    uids = [_uid(ids[mask.bool()]) for ids, mask in zip(prompts, prompt_mask, strict=True)]
    return BatchView(rows, {"uid": uids, "sequence_id": sequence_ids(uids)})


def _uid(prompt: torch.Tensor) -> str:
    """Return a name for a prompt, the same for equal ones: TRL has none."""
    return hashlib.sha1(prompt.numpy().tobytes()).hexdigest()[:8]
