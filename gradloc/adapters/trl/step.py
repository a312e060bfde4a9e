# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of TRL as a step that can be run again.

TRL's ``_compute_loss`` gets log-probs and entropies from another method of the trainer's. That call is kept, and is the
forward; where TRL's own loss is asked for, it gives the recorded values instead.

Shapes: B rows of a micro-batch, P prompt and T completion positions.
"""

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers.integrations.fsdp import is_fsdp_managed_module
from trl.trainer import utils as trl_utils

from ...core.sharding import is_reduction_deferred
from ...core.step import Details, Groups, Numerics, Outputs, OwnLoss, Recorded, RngState, record
from ...loop.batch import Rows, at_first, joined
from ...touched import replaced
from ...watch.step import LoopMicroBatch, LoopStep, outputs_of

logger = logging.getLogger(__name__)

Forwarded = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""What TRL's method returns: log-probs (B, T), entropies (B, T), and a mixture of experts' balancing loss."""

_ENTROPY_CONTROLLER = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")
"""What TRL's loss changes beside the gradient: its entropy controller moves inside the step's last micro-batch."""
_PLAIN = {"beta": 0.0, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "_entropy_bonus_enabled": False}
"""A loss of the advantages alone."""


REWARD_KEY, OTHER_KEY = "gradloc_reward", "gradloc_other_advantage"
"""(B,) among TRL's inputs, which travel with it: each row's reward, and what its advantage would be had TRL divided by
its group's spread where it does not, or the other way."""
_WEIGHTS, _TRUNCATED = "importance_sampling_ratio", 1.5
"""Of trainer over engine, which TRL multiplies token losses with, and where the advice truncates it."""
_NAMES = {
    "prompt_ids": "prompt_ids",
    "prompt_mask": "prompt_mask",
    "completion_ids": "responses",
    "completion_mask": "completion_mask",
    "advantages": "advantages",
    "ref_per_token_logps": "ref_log_prob",
    "sampling_per_token_logps": "rollout_log_probs",
    "importance_sampling_ratio": "rollout_is_weights",
}
"""TRL's inputs, and what events call them."""
OF_PROMPT = ("prompt_ids", "prompt_mask")
_IN_LOSS = {"epsilon": "epsilon_low"}
"""What TRL's loss calls a setting of its config."""


class FusedStep(LoopStep):
    """All micro-batches of one optimizer step, whose log-probs are by TRL's kernel: it never holds all logits.

    The module is as TRL's trainer calls it, under DDP or FSDP2; ``num_ranks`` counts processes.
    """

    def __init__(self, trainer: Any, module: torch.nn.Module, num_ranks: int):
        scaler = trainer.accelerator.scaler
        super().__init__(module, num_ranks, lambda: 1.0 if scaler is None else scaler.get_scale())
        self.trainer = trainer

    def micro_batch(self, mask: torch.Tensor, ids: torch.Tensor, tensors: dict[str, torch.Tensor]) -> LoopMicroBatch:
        """The next one, (B, T) each; its forward follows."""
        accelerator, half = self.trainer.accelerator, {"bf16": torch.bfloat16, "fp16": torch.float16}
        return LoopMicroBatch(
            mask=mask,
            ids=ids,
            tensors=tensors,
            recorded=Recorded(RngState(accelerator.device)),
            autocast=self.trainer.compute_loss_context_manager,
            dtype=half.get(accelerator.mixed_precision, next(self.module.parameters()).dtype),
            is_deferred=is_reduction_deferred(self.module),
        )

    def kept(self) -> "FusedStep":
        """Return the first micro-batch alone, to be run again at the weights of a later step."""
        found = copy.copy(self)
        found.micro_batches = [copy.copy(self.micro_batches[0])]
        found.micro_batches[0].recorded = copy.copy(self.micro_batches[0].recorded)
        return found

    @property
    def num_positions(self) -> int:
        """Of the largest micro-batch's forward."""
        return max(each.mask.numel() for each in self.micro_batches)

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Outputs:
        """TRL always asks for entropies."""
        made = self.micro_batches[micro_batch]
        with made.autocast(), nullcontext() if torch.is_grad_enabled() else _float32_head(made.dtype):
            return outputs_of(made.forward())

    def forward_bytes(self) -> int:
        """A few tiles of logits, and in half precision the head's weight in float32."""
        tiles = 3 * min(self.num_positions, 4096) * trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE
        config = self.trainer.accelerator.unwrap_model(self.module).config.get_text_config()
        head = 0 if self.numerics.dtype == torch.float32 else config.vocab_size * config.hidden_size
        return 4 * (tiles + head)


class TrlStep(FusedStep, OwnLoss):
    """Of a loss of advantages: see :class:`~...core.step.TrainingStep`."""

    trainer_name = "trl"
    dp_size = property(lambda self: self.num_ranks)

    def __init__(self, trainer: Any, module: torch.nn.Module, num_ranks: int):
        super().__init__(trainer, module, num_ranks)
        self.inputs: list[dict[str, Any]] = []
        self._entropy_masks: list[torch.Tensor | None] = []
        self._stages: list[torch.Tensor | None] = []
        """Of each micro-batch, bool (B, T): the tokens of Lopti's stage; None without."""
        self._before = {name: getattr(trainer, name) for name in _ENTROPY_CONTROLLER if hasattr(trainer, name)}
        self._present = -1
        self._given: Forwarded | None = None
        self.is_asking = False
        """Whether the loss that runs is recorded, or asked for here."""

    def kept(self) -> "TrlStep":
        found: Any = super().kept()
        found.inputs, found._entropy_masks, found._stages = self.inputs[:1], self._entropy_masks[:1], self._stages[:1]
        return found

    # ---- what the trainer's methods go through

    @contextmanager
    def recording(self, inputs: dict[str, Any], stage: float | None = None) -> Iterator[None]:
        """Around training's loss of the next micro-batch; ``stage`` says which of its tokens move the weights: those
        with an old probability under it, or from minus it on."""
        mask = mask_of(inputs).bool()
        is_low = None if stage is None else inputs["old_per_token_logps"].exp() < abs(stage)
        self._stages.append(is_low if stage is None or stage > 0 else ~is_low)
        advantages = inputs["advantages"].view(len(mask), -1).expand(mask.shape)
        self.inputs.append(inputs)
        self.micro_batches.append(self.micro_batch(mask, inputs["completion_ids"], {"advantages": advantages}))
        self._entropy_masks.append(None)
        with self._asking(len(self.inputs) - 1, None):
            yield

    def log_probs(self, call: Callable[[], Forwarded]) -> Forwarded:
        """In place of TRL's forward, which ``call`` runs."""
        forwarded = self._given
        if forwarded is None:
            forwarded, made = call(), self.micro_batches[self._present]
            made.forward = call
            record(made.recorded, Outputs(*forwarded))
        stage, (log_prob, entropy, beside) = self._stages[self._present], forwarded
        if stage is None:
            return forwarded
        kept = [None if value is None else value.where(stage, value.detach()) for value in (log_prob, entropy)]
        return kept[0], kept[1], beside  # the loss is the same, and what flows back is the stage's

    def high_entropy_mask(self, call: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """In place of TRL's, whose quantile is over all ranks: asked again, it is the mask that training had."""
        if self._given is None:
            self._entropy_masks[self._present] = call()
        return self._entropy_masks[self._present]

    # ---- what the search may ask

    @property
    def numerics(self) -> Numerics:
        return replace(super().numerics, temperature=float(self.trainer.temperature))

    @property
    def reduces_once(self) -> bool:
        syncs_each = self.trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        return self.num_ranks > 1 and not syncs_each

    def details(self, micro_batch: int) -> Details:
        return Details(self.old_log_prob(micro_batch), self._weights(micro_batch))

    def old_log_prob(self, micro_batch: int) -> torch.Tensor:
        """(B, T): the current ones where TRL takes them; of RLOO, which keeps sums, the difference spread evenly."""
        inputs, now = self.inputs[micro_batch], self.recorded(micro_batch).log_prob
        if "old_logps" in inputs:
            mask = inputs["completion_mask"]
            moved = (now * mask).sum(1) - inputs["old_logps"]
            return now - (moved / mask.sum(1).clamp(min=1)).unsqueeze(1) * mask
        return inputs.get("old_per_token_logps", now)

    def in_pass(self, is_last: bool) -> AbstractContextManager[None]:
        trainer = self.trainer
        if is_last or trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            return nullcontext()
        if trainer.is_distributed_loading_by_transformers and is_fsdp_managed_module(trainer.model):
            return trainer._defer_fsdp_gradient_reduction()
        return trainer.accelerator.no_sync(self.module)

    @property
    def num_positions(self) -> int:
        return max(inputs["prompt_ids"].numel() + inputs["completion_ids"].numel() for inputs in self.inputs)

    @property
    def without_kl(self) -> dict[str, Any] | None:
        has_term = "ref_per_token_logps" in self.inputs[0] and self.trainer.beta != 0.0
        return {"beta": 0.0} if has_term else None

    @property
    def without_entropy(self) -> dict[str, Any] | None:
        return {"_entropy_bonus_enabled": False} if getattr(self.trainer, "_entropy_bonus_enabled", False) else None

    def setting(self, name: str) -> Any:
        trainer, name = self.trainer, _IN_LOSS.get(name, name)
        return getattr(trainer if hasattr(trainer, name) else trainer.args, name)

    def tensors_under(self, name: str, micro_batch: int, groups: Groups | None) -> dict[str, torch.Tensor] | None:
        inputs, mode = self.inputs[micro_batch], getattr(self.trainer, "vllm_importance_sampling_mode", "")
        if OTHER_KEY in inputs and name == ("mean_only" if self.trainer.scale_rewards == "group" else "divide"):
            return {"advantages": inputs[OTHER_KEY]}
        if name != "truncate" or _WEIGHTS not in inputs or "truncate" not in mode:  # RLOO has no such weights
            return None
        return {_WEIGHTS: inputs[_WEIGHTS].clamp(max=_TRUNCATED)}

    def loss_under(
        self, micro_batch: int, given: Outputs, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """It leaves nothing behind in the trainer."""
        trainer, window = self.trainer, len(self.inputs)
        states = {**self._before, "_metrics": {"train": defaultdict(list)}, "aux_loss_enabled": False}
        states |= {"current_gradient_accumulation_steps": window}
        settings = {_IN_LOSS.get(name, name): value for name, value in settings.items()}
        arguments = {name: value for name, value in settings.items() if not hasattr(trainer, name)}
        states |= {name: value for name, value in settings.items() if name not in arguments}
        inputs = {**self.inputs[micro_batch], **tensors}
        with self._asking(micro_batch, given), replaced(trainer, **states), replaced(trainer.args, **arguments):
            with replaced(trainer.accelerator, **_ALONE), trainer.compute_loss_context_manager():
                loss = trainer._compute_loss(self.module, inputs)
        return loss if trainer.loss_is_scaled_for_ga else loss / window

    def all_rows(self) -> Rows:
        """Prompts are (R, P)."""
        parts = []
        for index, inputs in enumerate(self.inputs):
            mask = mask_of(inputs)
            values = {ours: inputs[theirs] for theirs, ours in _NAMES.items() if inputs.get(theirs) is not None}
            values |= {"response_mask": mask, "old_log_probs": self.old_log_prob(index)}
            if REWARD_KEY in inputs:
                values["token_level_scores"] = at_first(inputs[REWARD_KEY], mask)
            wide = {
                name: value if name in OF_PROMPT else value.view(len(mask), -1).expand_as(mask)
                for name, value in values.items()
            }
            parts.append({name: value.detach().cpu() for name, value in wide.items()})
        return joined(parts, OF_PROMPT)

    # ---- inside

    def _weights(self, micro_batch: int) -> torch.Tensor | None:
        """Read off the loss: where all ratios and advantages are 1, its derivative by each log-prob.

        None where a user's own loss does not take such a batch.
        """
        mask, recorded = self.token_mask(micro_batch), self.recorded(micro_batch)
        zero = torch.zeros_like(recorded.log_prob, dtype=torch.float32)
        log_prob, ones = zero.clone().requires_grad_(), zero + 1
        plain = {
            "advantages": torch.ones_like(self.inputs[micro_batch]["advantages"]),
            "old_per_token_logps": zero,
            "old_logps": zero[:, 0],
            _WEIGHTS: ones,
        }
        try:
            with torch.enable_grad():
                loss = self.loss_under(micro_batch, Outputs(log_prob, zero), _PLAIN, plain)
            (derivative,) = torch.autograd.grad(loss, log_prob)
        except Exception as error:
            logger.info("gradloc: this loss does not say what a token weighs in it: %s", error)
            return None
        return -derivative * mask / self.num_ranks

    @contextmanager
    def _asking(self, micro_batch: int, given: Forwarded | None) -> Iterator[None]:
        self._present, self._given, self.is_asking = micro_batch, given, True
        try:
            yield
        finally:
            self._given, self.is_asking = None, False


_ALONE = dict.fromkeys(("gather", "gather_for_metrics", "reduce"), lambda values, *_, **__: values)
"""TRL's loss sums its metrics over the ranks; here nobody reads them, and one rank may run it alone."""


def _float32_head(compute_dtype: torch.dtype) -> AbstractContextManager[None]:
    """Log-probs as precisely as can be: TRL's kernel projects in the compute dtype."""
    if compute_dtype == torch.float32:
        return nullcontext()
    kernel: Any = trl_utils._ChunkedLogProbFunction

    def apply(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *others: Any) -> Any:
        with torch.autocast(hidden.device.type, enabled=False):
            return kernel.apply(hidden.float(), weight.float(), None if bias is None else bias.float(), *others)

    return replaced(trl_utils, _ChunkedLogProbFunction=SimpleNamespace(apply=apply))


def mask_of(inputs: dict[str, Any]) -> torch.Tensor:
    """The tokens that are trained on, (B, T): of the completion without what a tool wrote."""
    mask = inputs["completion_mask"]
    return mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]
