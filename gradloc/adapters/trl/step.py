# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of a TRL trainer, with TRL's own loss under other settings.

Shapes: B rows of a micro-batch, P prompt and T completion positions.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from trl.trainer import utils as trl_utils

from ...core.ranks import Ranks
from ...core.step import Details, Groups, LossReplay, Outputs, backward_factor
from ...loop.batch import Rows, at_first, stack_rows
from ...private_api import replaced
from ...watch.forwarded import RecordedForward
from ...watch.tap_step import TapStep
from ...watch.taps import ModelTap

logger = logging.getLogger(__name__)

_ENTROPY_CONTROLLER = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")
"""Attributes that TRL's loss changes: its entropy controller moves in the step's last micro-batch."""
_PLAIN = {"beta": 0.0, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "_entropy_bonus_enabled": False}
"""A loss of the advantages alone."""


REWARD_KEY, OTHER_KEY = "gradloc_reward", "gradloc_other_advantage"
"""Keys among TRL's inputs of each row's reward (B,), and of its advantage with the division by the group's spread
toggled (B,)."""
_WEIGHTS, _TRUNCATED = "importance_sampling_ratio", 1.5
"""TRL's factor on token losses, the ratio of trainer over engine, and the advice's bound on it."""
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
"""Name of TRL's input -> name of the tensor in events."""
OF_PROMPT = ("prompt_ids", "prompt_mask")
_IN_LOSS = {"epsilon": "epsilon_low"}
"""Name of a config's setting -> its name in TRL's loss."""


class TrlStep(TapStep, LossReplay):
    """All micro-batches of one optimizer step."""

    trainer_name = "trl"

    def __init__(self, trainer: Any, tap: ModelTap, ranks: Ranks):
        super().__init__(tap, ranks)
        self.trainer, self.temperature = trainer, float(getattr(trainer, "temperature", 1.0))
        self._before = {name: getattr(trainer, name) for name in _ENTROPY_CONTROLLER if hasattr(trainer, name)}

    def take(self, forwards: Sequence[RecordedForward]) -> None:
        super().take(forwards)
        if self.has_log_probs:
            self.backward_factor = backward_factor(self.trainer.accelerator.scaler)

    def forward_bytes(self) -> int:
        """Return the bytes of the logits' tiles in TRL's kernel, and in half precision of the head in float32."""
        if not self.has_log_probs:
            return super().forward_bytes()
        most = max(each.forwarded.recorded.log_prob.numel() for each in self.micro_batches)
        tiles = 3 * min(most, 4096) * trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE
        config = self.trainer.accelerator.unwrap_model(self.module).config.get_text_config()
        head = 0 if self.dtype == torch.float32 else config.vocab_size * config.hidden_size
        return 4 * (tiles + head)

    @staticmethod
    def precisely(dtype: torch.dtype) -> AbstractContextManager[None]:
        """Return a context in which TRL's kernel projects in float32, not in the compute dtype."""
        if dtype == torch.float32:
            return nullcontext()
        kernel: Any = trl_utils._ChunkedLogProbFunction

        def apply(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *others: Any) -> Any:
            with torch.autocast(hidden.device.type, enabled=False):
                return kernel.apply(hidden.float(), weight.float(), None if bias is None else bias.float(), *others)

        return replaced(trl_utils, _ChunkedLogProbFunction=SimpleNamespace(apply=apply))

    # ---- a loss of advantages

    @property
    def knows_loss(self) -> bool:  # type: ignore[override]
        """True where the loss is made of advantages and of the same log-probs as TRL's own loss."""
        return self.has_log_probs and all("inputs" in each.forwarded.known for each in self.micro_batches)

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """Inputs of the trainer's loss, for each micro-batch."""
        return [each.forwarded.known["inputs"] for each in self.micro_batches]

    def details(self, micro_batch: int) -> Details:
        if not self.knows_loss:
            return super().details(micro_batch)
        return Details(self.old_log_prob(micro_batch), self._weights(micro_batch))

    def old_log_prob(self, micro_batch: int) -> torch.Tensor:
        """Return old log-probs (B, T): the current ones where TRL uses these, RLOO's sums spread over tokens."""
        inputs, now = self.inputs[micro_batch], self.recorded(micro_batch).log_prob
        if "old_logps" in inputs:
            mask = inputs["completion_mask"]
            moved = (now * mask).sum(1) - inputs["old_logps"]
            return now - (moved / mask.sum(1).clamp(min=1)).unsqueeze(1) * mask
        return inputs.get("old_per_token_logps", now)

    @property
    def without_kl(self) -> dict[str, Any] | None:
        has_term = self.knows_loss and "ref_per_token_logps" in self.inputs[0] and self.trainer.beta != 0.0
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
        """Compute TRL's loss; the trainer is left unchanged."""
        trainer, window = self.trainer, len(self.inputs)
        states = {**self._before, "_metrics": {"train": defaultdict(list)}, "aux_loss_enabled": False}
        states |= {"current_gradient_accumulation_steps": window}
        settings = {_IN_LOSS.get(name, name): value for name, value in settings.items()}
        arguments = {name: value for name, value in settings.items() if not hasattr(trainer, name)}
        states |= {name: value for name, value in settings.items() if name not in arguments}
        inputs, kept = {**self.inputs[micro_batch], **tensors}, self.micro_batches[micro_batch].forwarded.known
        staged = (*within_stage(kept["stage"], *given[:2]), *given[2:])
        states["_get_per_token_logps_and_entropies"] = lambda *_, **__: staged
        states["get_high_entropy_mask"] = lambda *_, **__: kept["entropy_mask"]  # over all ranks, as training had it
        with replaced(trainer, **states), replaced(trainer.args, **arguments):
            with replaced(trainer.accelerator, **_ALONE), trainer.compute_loss_context_manager():
                loss = trainer._compute_loss(self.module, inputs)
        return loss if trainer.loss_is_scaled_for_ga else loss / window

    def all_rows(self) -> Rows:
        """Return :meth:`TapStep.all_rows` and TRL's inputs; prompts are (R, P)."""
        if not self.knows_loss:
            return super().all_rows()
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
        return stack_rows(parts, OF_PROMPT)

    # ---- inside

    def _weights(self, micro_batch: int) -> torch.Tensor | None:
        """Return the loss's derivative by each log-prob where all ratios and advantages are 1.

        None where a user's own loss does not take such a batch.
        """
        zero = torch.zeros_like(self.recorded(micro_batch).log_prob, dtype=torch.float32)
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
        return -derivative / self.num_ranks


_ALONE = dict.fromkeys(("gather", "gather_for_metrics", "reduce"), lambda values, *_, **__: values)
"""Replaces the collectives of TRL's metrics, so that one rank can run the loss alone."""


def within_stage(stage: torch.Tensor | None, *values: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return the values (B, T) with a gradient for the stage's tokens alone; with None for all."""
    if stage is None:
        return [*values]
    return [None if value is None else value.where(stage, value.detach()) for value in values]


def mask_of(inputs: dict[str, Any]) -> torch.Tensor:
    """Return the trained tokens, (B, T): those of the completion that no tool wrote."""
    mask = inputs["completion_mask"]
    return mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]
