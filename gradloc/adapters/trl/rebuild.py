# SPDX-License-Identifier: Apache-2.0
"""A bundled event made runnable on TRL: its trainer around a given model, and the event's step on it.

A micro-batch's loss is divided by numbers of the whole run, and the gradient averaged over its processes. This machine
may have fewer: each loss is scaled by that, so that every micro-batch keeps the weight that it had in the run.
"""

import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset

from ...core.gradients import GradientSpace
from ...core.step import Outputs
from ...replay.bundle import Bundle, Entry, ReplayError
from ...replay.dealt import Replayed
from .step import TrlStep
from .touches import check_trl
from .trainer import GRPOTrainer, RLOOTrainer

_OF_RUN = ("gradloc", "health", "generation_batch_size", "report_to", "logging_dir", "beta", "use_vllm")
_OF_RUN += ("deepspeed", "fsdp", "fsdp_config")
"""Of the run's arguments: no part of the loss, or put in afterwards."""


def start_processes() -> None:
    """accelerate joins torchrun's, when the trainer is built."""


class ReplayStep(Replayed, TrlStep):
    """The event's step, as far as the bundle holds it: this process's micro-batches, see :class:`Replayed`."""

    def __init__(self, actor: Any, bundle: Bundle, places: list[Entry | None], tick: Callable[[], Any]):
        trainer = actor.trainer
        super().__init__(trainer, actor.model, trainer.accelerator.num_processes)
        self.places, self._tick = places, tick
        self._of_run = self.dp_size / bundle.dp_size
        self.window = bundle.event.step.num_micro_batches or len(places)
        self._given = [_inputs_of(bundle, entry or bundle.layout[0], self._of_run, trainer) for entry in places]
        trainer._watch = SimpleNamespace(step=self, localizer=self)

    @property
    def num_micro_batches(self) -> int:
        return len(self.places)

    def train(self, space: GradientSpace) -> None:
        """The training pass: puts the step's gradient into ``.grad`` and records what it leaves behind."""
        for index, inputs in enumerate(self._given):
            self.recall(index)
            with self.recording(inputs):  # keeps the micro-batch
                pass
            with self.in_pass(index == len(self.places) - 1):
                loss = self._own_loss(index, None, {}, {})
                self.trained(index, loss, self.outputs.log_prob)

    def _own_loss(self, *args: Any, **given: Any) -> torch.Tensor:
        return super()._own_loss(*args, **given) * self._of_run

    def log_probs(self, call: Callable[[], Any]) -> Any:
        forwarded = super().log_probs(call)
        self.outputs = Outputs(*forwarded)
        return forwarded


def _inputs_of(bundle: Bundle, entry: Entry, of_run: float, trainer: Any) -> dict[str, torch.Tensor]:
    """One micro-batch as TRL's loss gets it."""
    rows = {
        name: tensor[entry.first_row : entry.end_row] for name, tensor in bundle.tensors.items() if tensor.dim() > 1
    }
    num_response, device = rows["responses"].shape[1], trainer.accelerator.device
    old, mask = rows["old_log_probs"], rows["response_mask"]
    inputs = {
        "prompt_ids": rows["input_ids"][:, :-num_response],
        "prompt_mask": rows["attention_mask"][:, :-num_response],
        "completion_ids": rows["responses"],
        "completion_mask": rows["attention_mask"][:, -num_response:],
        "tool_mask": mask,
        "advantages": rows["advantages"],
    }
    if isinstance(trainer, trl.RLOOTrainer):
        inputs |= {"advantages": rows["advantages"][:, 0], "old_logps": (old * mask).sum(1)}
    elif not bundle.meta.on_policy:
        inputs["old_per_token_logps"] = old
    others = {"ref_log_prob": "ref_per_token_logps", "rollout_log_probs": "sampling_per_token_logps"}
    others["rollout_is_weights"] = "importance_sampling_ratio"
    inputs |= {theirs: rows[ours] for ours, theirs in others.items() if ours in rows}
    if "num_items_in_batch" in rows:
        inputs["num_items_in_batch"] = rows["num_items_in_batch"].max() * of_run
    return {name: value.to(device) for name, value in inputs.items()}


def build_actor(bundle: Bundle, model_path: str) -> Any:
    """TRL's trainer around the model at ``model_path``.

    Raises:
        ReplayError: the model cannot be loaded; or this TRL is not the one that the adapter is known of.
    """
    given = bundle.meta.actor
    kind, of_args = (RLOOTrainer, trl.RLOOConfig) if "normalize_advantages" in given else (GRPOTrainer, trl.GRPOConfig)
    names = {field.name for field in fields(of_args) if field.init}.difference(_OF_RUN)
    kept = {name: value for name, value in given.items() if name in names and not name.endswith("token")}
    kept |= {"output_dir": tempfile.mkdtemp(), "report_to": "none", "use_cpu": not torch.cuda.is_available()}
    kept |= {"beta": 0.0, "save_strategy": "no", "push_to_hub": False}
    try:
        check_trl()
        model = transformers.AutoModelForCausalLM.from_pretrained(model_path, local_files_only=True, dtype="auto")
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        data = Dataset.from_dict({"prompt": ["a"] * 1024})
        trainer = kind(
            model, _no_reward, args=of_args(**kept), train_dataset=data, processing_class=tokenizer, gradloc="off"
        )
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ReplayError(f"The model at {Path(model_path)} cannot be put into TRL's trainer: {first}") from error
    trainer.beta, trainer.use_vllm = given.get("beta", 0.0), bool(given.get("use_vllm"))
    model = trainer.accelerator.prepare(trainer.model).train()
    return SimpleNamespace(
        trainer=trainer, model=model, actor_module=model, device_name=trainer.accelerator.device.type
    )


def _no_reward(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)
