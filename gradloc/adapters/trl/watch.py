# SPDX-License-Identifier: Apache-2.0
"""What rides along with a trainer of TRL's.

Every process is a trainer there: the rank's side of a search is on each of them, the driver's side on the first. They
exchange two small messages an optimizer step.
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

from ...checks import require
from ...core.ranks import Ranks, host_group
from ...core.step import Outputs, record
from ...health.config import HealthConfig
from ...health.monitor import Monitor
from ...health.rules import FROM_TRL
from ...loop import metrics as step_metrics
from ...loop.batch import BatchView, Rows, joined
from ...loop.driver import Driver, sequence_ids
from ...loop.writer import events_weights_folder
from ...record import Run
from ...record.origin import origin
from ...record.store import load_states, save_states
from ...reweighting.config import LoptiConfig
from ...watch.colocated import Colocated, whole
from .step import OF_PROMPT, FusedStep, TrlStep


class TrainerWatch(Colocated):
    """Looks into the steps of one trainer.

    Args:
        trainer: TRL's, ready to train.
        settings: of spikes; None: none are looked for.
        health: of the health monitor; None: off.
    """

    step_class: type[FusedStep] = TrlStep
    lopti: LoptiConfig | None = None

    def __init__(self, trainer: Any, settings: Any, health: HealthConfig | None):
        self.trainer = trainer
        self.clip_limit = trainer.args.max_grad_norm or float("inf")
        self.scales_loss = trainer.accelerator.scaler is not None
        self.takes_what_is_not_finite = not self.scales_loss  # transformers steps on NaN; fp16's scaler does not
        ranks = Ranks(host_group(), device=trainer.accelerator.device)
        super().__init__(ranks, settings, partial(_driver_of, trainer, settings))
        self._metrics: list[dict[str, float]] = []
        self._num_known: dict[str, int] = {}
        """How many values of each of TRL's metrics are of earlier steps."""
        self._loss = 0.0
        self.monitor = None
        if self.ranks.is_first and health is not None:
            limit = trainer.args.max_grad_norm
            self.monitor = Monitor(health, limit or None, compares_rollouts=False)  # TRL tells how many are equal

    # ---- the moments of an optimizer step, in order

    def before_micro_batch(self, model: torch.nn.Module) -> None:
        """Before generation, forward and backward of the next micro-batch."""
        if self.step is not None:
            return
        self.begin_step(self.step_class(self.trainer, model, self.ranks.size), model)
        self._num_known = {name: len(values) for name, values in self.trainer._metrics["train"].items()}
        self._loss = 0.0

    def take_stage(self) -> float | None:
        """Which of Lopti's stages this micro-batch is of: the threshold if it is that of the tokens below, minus it if
        it is the other; None without Lopti. TRL's first pass over its rollouts is the first stage."""
        if self.lopti is None:
            return None
        each = self.trainer.args.steps_per_generation
        is_first = self.trainer._step % (2 * each) < each
        is_low = is_first == (self.lopti.eta > 0)
        self.stage_name = "low" if is_low else "high"
        return abs(self.lopti.eta) * (1 if is_low else -1)

    def after_micro_batch(self, loss: torch.Tensor) -> None:
        """After its backward."""
        self._loss += loss.detach()
        is_reduced = self.ranks.size == 1 or self.trainer.accelerator.sync_gradients
        if self.localizer is not None and is_reduced:
            self.localizer.after_backward()

    def before_step(self, norm: Any) -> Any:
        """After accumulation and clipping, before the optimizer; returns the norm of the gradient that it takes."""
        taken, metrics = norm, {}
        try:
            if self.localizer is not None:
                taken, metrics = self.end_step(norm, self.trainer.state.global_step + 1)
        finally:
            self.step, self.stage_name = None, ""
        if self.monitor is not None:
            self._judge(norm, metrics)
        if metrics:
            self._metrics.append(metrics)
        return taken

    def view(self, by_rank: Any) -> BatchView:
        self.driver.teller.trackers = trackers_of(self.trainer)
        return view_of(by_rank) if self.signal == "advantages" else super().view(by_rank)

    def take_metrics(self) -> dict[str, float]:
        """What is to be logged of the steps since the last time, each joined as its name asks for; first process."""
        steps, self._metrics = self._metrics, []
        return step_metrics.joined(steps) if steps else {}

    def save(self, folder: str) -> None:
        """Put what was learned beside a checkpoint."""
        if save_states(self._stateful, folder):
            self._remember(folder)

    def load(self, folder: str) -> None:
        """Take it back from the checkpoint that the run goes on from."""
        load_states(self._stateful, folder)
        self._remember(folder)

    # ---- inside

    @property
    def _stateful(self) -> dict[str, Any]:
        parts = {"spikes": self.driver, "health": self.monitor}
        return {name: part for name, part in parts.items() if part is not None}

    def _remember(self, folder: str) -> None:
        if self.driver is not None:
            self.driver.writer.last_checkpoint = os.path.abspath(folder)

    def _judge(self, norm: Any, metrics: dict[str, float]) -> None:
        """Judge the step by the rules of health, which know verl's names; adds to its metrics."""
        step = {FROM_TRL["grad_norm"]: float(norm), FROM_TRL["loss"]: float(self._loss), **metrics}
        for theirs, ours in FROM_TRL.items():
            values = self.trainer._metrics["train"].get(theirs, [])[self._num_known.get(theirs, 0) :]
            if values:
                step[ours] = sum(values) / len(values)
        before = set(step)
        self.monitor.observe(None, step, self.trainer.state.global_step + 1)
        metrics.update({name: value for name, value in step.items() if name not in before})

    # ---- what the localizer asks of the trainer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.trainer.optimizer.optimizer  # in accelerate's

    def clip(self) -> torch.Tensor:
        return whole(self.trainer.clip_again())

    def save_weights(self, global_step: int) -> str | None:
        folder = events_weights_folder(self.settings, global_step, self.ranks)
        return folder if folder is not None and self.trainer.save_whole_model(folder, self.ranks) else None


def _driver_of(trainer: Any, settings: Any) -> Driver:
    args = trainer.args
    name, trained = args.run_name or os.path.basename(args.output_dir), args.to_dict()
    model = getattr(trainer.model.config, "_name_or_path", None)
    run = Run(os.environ.get("WANDB_PROJECT", "trl"), name, model=model, **group_of(args))
    run = origin(run, trained, "trl")
    print(f"gradloc: on ({settings.action.mode}); events go to {settings.root}", flush=True)
    return Driver(settings, tokenizer=trainer._tokenizer, run=run, trained=trained)


def group_of(args: Any) -> dict[str, Any]:
    """How advantages are made, and of how many responses, as :class:`~...record.Run` says it."""
    name = {"group": "grpo", "none": "grpo_mean"}.get(getattr(args, "scale_rewards", ""))
    if getattr(args, "multi_objective_aggregation", None) == "normalize_then_sum":
        name = None
    if hasattr(args, "normalize_advantages"):
        name = None if args.normalize_advantages or args.beta else "rloo"  # its KL is in the reward
    return {"estimator": name, "rollouts": args.num_generations} if hasattr(args, "num_generations") else {}


def trackers_of(trainer: Any) -> dict[str, Any]:
    """The clients that the trainer's callbacks have opened, by the names that the teller knows."""
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
    """wandb, told without a step: TRL logs without one, so that wandb's own runs ahead of the trainer's, and what
    comes with an earlier step is dropped."""

    def __init__(self, client: Any):
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def log(self, payload: dict[str, Any], step: int) -> None:
        self._client.log({**payload, "train/global_step": step})


def other_advantages(rewards: torch.Tensor, num_generations: int, is_divided: bool) -> torch.Tensor:
    """(R,), as TRL makes them of rewards (R,), where ``is_divided`` is the other way; NaN is a reward that is none."""
    grouped = rewards.view(-1, num_generations)
    made = rewards - torch.nanmean(grouped, dim=1).repeat_interleave(num_generations)
    if not is_divided:
        made = made / (nanstd(grouped, dim=1).repeat_interleave(num_generations) + 1e-4)
    return torch.nan_to_num(made, nan=0.0)


def view_of(by_rank: Sequence[Rows]) -> BatchView:
    """All ranks' rows, one rank after the other."""
    rows = joined(by_rank, OF_PROMPT)
    prompts, prompt_mask = rows.pop("prompt_ids"), rows.pop("prompt_mask")
    rows["input_ids"] = torch.cat([prompts, rows["responses"]], 1)
    rows["attention_mask"] = torch.cat([prompt_mask, rows.pop("completion_mask")], 1)
    rows["position_ids"] = (rows["attention_mask"].cumsum(1) - 1).clamp(min=0)
    uids = [_uid(ids[mask.bool()]) for ids, mask in zip(prompts, prompt_mask, strict=True)]
    return BatchView(rows, {"uid": uids, "sequence_id": sequence_ids(uids)})


def _uid(prompt: torch.Tensor) -> str:
    """TRL names no prompts; equal ones are siblings."""
    return hashlib.sha1(prompt.numpy().tobytes()).hexdigest()[:8]


class LabelsWatch(TrainerWatch):
    """Looks into the steps of one trainer.

    Raises:
        ValueError: one sentence, for a loss that is not made of log-probs.
    """

    signal, step_class = "loss_weights", FusedStep

    def __init__(self, trainer: Any, settings: Any, health: Any):
        args, why = trainer.args, "with gradloc (the loss would not be of log-probs)"
        require(not getattr(args, "use_liger_kernel", False), "use_liger_kernel", f"false {why}", True)
        require(trainer.compute_loss_func is None, "compute_loss_func", f"left out {why}", "a function")
        smoothing = args.label_smoothing_factor
        require(not smoothing, "label_smoothing_factor", f"0 {why}", smoothing)
        if settings is not None:  # no replay knows these trainers
            settings = replace(settings, evidence=replace(settings.evidence, bundle="off"))
        super().__init__(trainer, settings, health)

    def forward(self, model: torch.nn.Module, **given: Any) -> Any:
        """The model's, in the place of training's call: its log-probs are recorded."""
        if self.step is None or not given.get("fused_lm_head") or not torch.is_grad_enabled():
            return model(**given)
        outputs = model(**given)
        labels = given["labels"][:, 1:]
        virtual = outputs.log_probs.shape[1] - labels.shape[1]  # tokens of prompt learning, which come first
        labels = torch.nn.functional.pad(labels, (virtual, 0), value=-100)
        made = self.step.micro_batch(labels != -100, labels.clamp(min=0), {})
        made.forward = partial(_log_probs, model, given)
        record(made.recorded, Outputs(outputs.log_probs, None, outputs.aux_loss))
        self.step.micro_batches.append(made)
        return outputs


def _log_probs(model: torch.nn.Module, given: dict[str, Any]) -> tuple[Any, None, Any]:
    outputs = model(**given)
    return outputs.log_probs, None, outputs.aux_loss
