# SPDX-License-Identifier: Apache-2.0
"""What rides along with a trainer of TRL's.

Every process is a trainer there: the rank's side of a search is on each of them, the driver's side on the first. They
exchange two small messages an optimizer step.
"""

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ...core.gradients import GradientSpace
from ...core.ranks import Ranks
from ...health.config import HealthConfig
from ...health.monitor import Monitor
from ...health.rules import FROM_TRL
from ...loop.driver import AbortedBySpike, Driver
from ...loop.localizer import Localizer
from ...loop.metrics import joined
from ...loop.writer import events_weights_folder
from ...record import Run
from ...record.origin import origin
from ...record.state import load_states, save_states
from .batch import brief_of, brief_view, rows_of, view_of
from .step import TrlStep, mask_of


class Watch:
    """Looks into the steps of one trainer; also what the localizer asks of it: :class:`~...loop.localizer.ActorPowers`.

    Args:
        trainer: TRL's, ready to train.
        settings: of spikes; None: none are looked for.
        health: of the health monitor; None: off.
    """

    def __init__(self, trainer: Any, settings: Any, health: HealthConfig | None):
        self.trainer, self.settings = trainer, settings
        self.ranks = Ranks(device=trainer.accelerator.device)
        self.clip_limit = trainer.args.max_grad_norm or float("inf")
        self.scales_loss = trainer.accelerator.scaler is not None
        self.takes_what_is_not_finite = not self.scales_loss  # transformers steps on NaN; fp16's scaler does not
        self.localizer = None if settings is None else Localizer(self, self.ranks, settings)
        self.step: TrlStep | None = None
        self._metrics: list[dict[str, float]] = []
        self._num_known: dict[str, int] = {}
        """How many values of each of TRL's metrics are of earlier steps."""
        self._loss = 0.0
        self.driver = self.monitor = None
        if self.ranks.is_first and settings is not None:
            self.driver = _driver_of(trainer, settings)
            print(f"gradloc: on ({settings.action.mode}); events go to {settings.root}", flush=True)
        if self.ranks.is_first and health is not None:
            limit = trainer.args.max_grad_norm
            self.monitor = Monitor(health, limit or None, compares_rollouts=False)  # TRL tells how many are equal

    # ---- the moments of an optimizer step, in order

    def before_micro_batch(self, model: torch.nn.Module) -> None:
        """Before generation, forward and backward of the next micro-batch."""
        if self.step is not None:
            return
        self.step = TrlStep(self.trainer, model, self.ranks.size)
        self._num_known = {name: len(values) for name, values in self.trainer._metrics["train"].items()}
        self._loss = 0.0
        if self.localizer is not None:
            self.localizer.begin_update(None, GradientSpace(model, self.ranks))
            self.localizer.begin_mini_batch(self.step)

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
                taken, metrics = self._look(norm)
        finally:
            self.step = None
        if self.monitor is not None:
            self._judge(norm, metrics)
        if metrics:
            self._metrics.append(metrics)
        return taken

    def take_metrics(self) -> dict[str, float]:
        """What is to be logged of the steps since the last time, each joined as its name asks for; first process."""
        steps, self._metrics = self._metrics, []
        return joined(steps) if steps else {}

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

    def _look(self, norm: Any) -> tuple[Any, dict[str, float]]:
        """Ask the driver, look, tell the driver."""
        step, localizer, ranks = self.step, self.localizer, self.ranks
        (num_tokens,) = ranks.sum([float(sum(int(mask_of(inputs).sum()) for inputs in step.inputs))])
        policy = None
        if self.driver is not None:
            policy = self.driver.before_update([int(num_tokens)], self.trainer.state.global_step + 1)
        taken = localizer.before_step(_whole(norm), ranks.sent_by(0, policy))
        localizer.end_update()
        is_written = any(spike.is_written for spike in localizer.outcomes)
        by_rank = ranks.gather_first((localizer.report(), rows_of(step) if is_written else brief_of(step)))
        metrics: dict[str, float] = {}
        if by_rank is not None:
            reports, rows = zip(*by_rank, strict=True)
            if is_written:
                self.driver.teller.trackers = _trackers_of(self.trainer)
            of_step = self.driver.after_update(reports, view_of(rows) if is_written else brief_view(rows))
            metrics = {name: float(value) for name, (value,) in of_step.items()}
        if any(spike.taken == "abort" for spike in localizer.outcomes):
            raise AbortedBySpike("gradloc stopped the run at a gradient spike: the first process says why.")
        is_other = any(spike.taken != "observe" for spike in localizer.outcomes)
        return taken if is_other else norm, metrics

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
        return _whole(self.trainer.clip_again())

    def save_weights(self, global_step: int) -> str | None:
        folder = events_weights_folder(self.settings, global_step, self.ranks)
        return folder if folder is not None and self.trainer.save_whole_model(folder, self.ranks) else None


def _whole(norm: Any) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)


def _driver_of(trainer: Any, settings: Any) -> Driver:
    args = trainer.args
    name, of_run = args.run_name or os.path.basename(args.output_dir), args.to_dict()
    model = getattr(trainer.model.config, "_name_or_path", None)
    run = Run(os.environ.get("WANDB_PROJECT", "trl"), name, model=model, **_group(args))
    run = origin(run, of_run, "trl")
    return Driver(settings, tokenizer=trainer._tokenizer, run=run, trained=of_run)


def _group(args: Any) -> dict[str, Any]:
    """How advantages are made, and of how many responses, as :class:`~...record.Run` says it."""
    name = {"group": "grpo", "none": "grpo_mean"}.get(getattr(args, "scale_rewards", ""))
    if getattr(args, "multi_objective_aggregation", None) == "normalize_then_sum":
        name = None
    if hasattr(args, "normalize_advantages"):
        name = None if args.normalize_advantages or args.beta else "rloo"  # its KL is in the reward
    return {"estimator": name, "rollouts": args.num_generations}


def _trackers_of(trainer: Any) -> dict[str, Any]:
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
