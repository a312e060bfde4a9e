# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of TRL as a step that can be run again.

TRL's ``_compute_loss`` gets log-probs and entropies from another method of the trainer's. That call is kept, and is the
forward; where TRL's own loss is asked for, it gives the recorded values instead.

Shapes: B rows of a micro-batch, P prompt and T completion positions.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from transformers.integrations.fsdp import is_fsdp_managed_module
from trl.trainer import utils as trl_utils

from ...core.step import Details, Numerics, Outputs, OwnLoss, Recorded, RngState, record
from ...touched import replaced

Forwarded = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""What TRL's method returns: log-probs (B, T), entropies (B, T), and a mixture of experts' balancing loss."""

_ENTROPY_CONTROLLER = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")
"""What TRL's loss changes beside the gradient: its entropy controller moves inside the step's last micro-batch."""
_PLAIN = {"beta": 0.0, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "_entropy_bonus_enabled": False}
"""A loss of the advantages alone."""


class TrlStep(OwnLoss):
    """All micro-batches of one optimizer step: see :class:`~...core.step.TrainingStep`.

    The model is as TRL's trainer calls it, under DDP or FSDP2; ``dp_size`` counts processes.
    """

    window: int | None = None
    """Micro-batches of the whole step, where a replay's process does not have them all."""

    def __init__(self, trainer: Any, model: torch.nn.Module, dp_size: int):
        self.trainer, self.model, self.dp_size = trainer, model, dp_size
        self.inputs: list[dict[str, Any]] = []
        self._recorded: list[Recorded] = []
        self._calls: list[Callable[[], Forwarded]] = []
        """Each micro-batch's forward, as TRL's loss called it."""
        self._entropy_masks: list[torch.Tensor | None] = []
        self._before = {name: getattr(trainer, name) for name in _ENTROPY_CONTROLLER if hasattr(trainer, name)}
        self._present = -1
        self._given: Forwarded | None = None
        self.is_asking = False
        """Whether the loss that runs is recorded, or asked for here."""

    # ---- what the trainer's methods go through

    @contextmanager
    def recording(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Around training's loss of the next micro-batch."""
        self.inputs.append(inputs)
        self._recorded.append(Recorded(rng=RngState(self.trainer.accelerator.device)))
        self._entropy_masks.append(None)
        with self._asking(len(self.inputs) - 1, None):
            yield

    def log_probs(self, call: Callable[[], Forwarded]) -> Forwarded:
        """In place of TRL's forward, which ``call`` runs."""
        if self._given is not None:
            return self._given
        forwarded = call()
        self._calls[self._present :] = [call]
        record(self._recorded[self._present], Outputs(*forwarded))
        return forwarded

    def high_entropy_mask(self, call: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """In place of TRL's, whose quantile is over all ranks: asked again, it is the mask that training had."""
        if self._given is None:
            self._entropy_masks[self._present] = call()
        return self._entropy_masks[self._present]

    # ---- what the search may ask

    @property
    def num_micro_batches(self) -> int:
        return len(self.inputs)

    @property
    def numerics(self) -> Numerics:
        accelerator, half = self.trainer.accelerator, {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = half.get(accelerator.mixed_precision, next(self.model.parameters()).dtype)
        scale = 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
        weight = 1.0 / (self.dp_size * scale)
        return Numerics(dtype, scale, weight, float(self.trainer.temperature), self.reduces_once)

    @property
    def reduces_once(self) -> bool:
        syncs_each = self.trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        return self.dp_size > 1 and not syncs_each

    def recorded(self, micro_batch: int) -> Recorded:
        return self._recorded[micro_batch]

    def rows(self, micro_batch: int) -> list[int]:
        """Rank by rank, micro-batch by micro-batch: the order in which the driver gets the rows."""
        sizes = [len(inputs["prompt_ids"]) for inputs in self.inputs]
        first = self.trainer.accelerator.process_index * sum(sizes) + sum(sizes[:micro_batch])
        return list(range(first, first + sizes[micro_batch]))

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        return mask_of(self.inputs[micro_batch]).bool()

    def details(self, micro_batch: int) -> Details:
        on_policy = not {"old_per_token_logps", "old_logps"} & self.inputs[0].keys()
        return Details(self.old_log_prob(micro_batch), self._weights(micro_batch), on_policy)

    def old_log_prob(self, micro_batch: int) -> torch.Tensor:
        """(B, T): the current ones where TRL takes them; of RLOO, which keeps sums, the difference spread evenly."""
        inputs, now = self.inputs[micro_batch], self._recorded[micro_batch].log_prob
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
        return trainer.accelerator.no_sync(self.model)

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Outputs:
        """TRL always asks for entropies."""
        is_training = torch.is_grad_enabled()
        with self.trainer.compute_loss_context_manager():
            with nullcontext() if is_training else _float32_head(self.numerics.dtype):
                return Outputs(*self._calls[micro_batch]())

    def forward_bytes(self) -> int:
        """TRL never holds all logits: a few tiles of them, and in half precision the head's weight in float32."""
        positions = max(inputs["prompt_ids"].numel() + inputs["completion_ids"].numel() for inputs in self.inputs)
        tiles = 3 * min(positions, 4096) * trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE
        config = self.trainer.accelerator.unwrap_model(self.model).config.get_text_config()
        head = 0 if self.numerics.dtype == torch.float32 else config.vocab_size * config.hidden_size
        return 4 * (tiles + head)

    @property
    def without_kl(self) -> dict[str, Any] | None:
        has_term = "ref_per_token_logps" in self.inputs[0] and self.trainer.beta != 0.0
        return {"beta": 0.0} if has_term else None

    def coefficients_under(
        self, micro_batch: int, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Outputs:
        recorded = self._recorded[micro_batch]
        log_prob, entropy = (
            value.detach().float().clone().requires_grad_() for value in (recorded.log_prob, recorded.entropy)
        )
        with torch.enable_grad():
            loss = self._own_loss(micro_batch, (log_prob, entropy, None), settings, tensors or {})
        return Outputs(*torch.autograd.grad(loss, [log_prob, entropy], allow_unused=True))

    # ---- inside

    def _weights(self, micro_batch: int) -> torch.Tensor:
        """Read off TRL's own loss: where all ratios and advantages are 1, its derivative by each log-prob."""
        mask, recorded = self.token_mask(micro_batch), self._recorded[micro_batch]
        zero = torch.zeros_like(recorded.log_prob, dtype=torch.float32)
        log_prob, ones = zero.clone().requires_grad_(), zero + 1
        plain = {
            "advantages": ones[:, 0],
            "old_per_token_logps": zero,
            "old_logps": zero[:, 0],
            "importance_sampling_ratio": ones,
        }
        with torch.enable_grad():
            loss = self._own_loss(micro_batch, (log_prob, zero, None), _PLAIN, plain)
        (derivative,) = torch.autograd.grad(loss, log_prob)
        return -derivative * mask / self.dp_size

    def _own_loss(
        self, micro_batch: int, given: Forwarded, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """TRL's loss of these log-probs and entropies, but for what is changed, unscaled; it leaves nothing behind."""
        trainer, window = self.trainer, self.window or len(self.inputs)
        states = {**self._before, "_metrics": {"train": defaultdict(list)}, "aux_loss_enabled": False}
        states |= {"current_gradient_accumulation_steps": window}
        of_args = {name: value for name, value in settings.items() if not hasattr(trainer, name)}
        states |= {name: value for name, value in settings.items() if name not in of_args}
        inputs = {**self.inputs[micro_batch], **tensors}
        with self._asking(micro_batch, given), replaced(trainer, **states), replaced(trainer.args, **of_args):
            with replaced(trainer.accelerator, **_ALONE), trainer.compute_loss_context_manager():
                loss = trainer._compute_loss(self.model, inputs)
        return loss if trainer.loss_is_scaled_for_ga else loss / window

    @contextmanager
    def _asking(self, micro_batch: int, given: Forwarded | None) -> Iterator[None]:
        self._present, self._given, self.is_asking = micro_batch, given, True
        try:
            yield
        finally:
            self._given, self.is_asking = None, False


def _same(values: Any, *_: Any, **__: Any) -> Any:
    return values


_ALONE = {name: _same for name in ("gather", "gather_for_metrics", "reduce")}
"""TRL's loss sums its metrics over the ranks; here nobody reads them, and one rank may run it alone."""


class _Float32Head:
    """TRL's kernel for log-probs, in float32."""

    kernel: Any = trl_utils._ChunkedLogProbFunction

    @classmethod
    def apply(cls, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *others: Any) -> Any:
        with torch.autocast(hidden.device.type, enabled=False):
            return cls.kernel.apply(hidden.float(), weight.float(), None if bias is None else bias.float(), *others)


def _float32_head(compute_dtype: torch.dtype) -> AbstractContextManager[None]:
    """Log-probs as precisely as can be: TRL projects in the compute dtype."""
    is_precise = compute_dtype == torch.float32
    return nullcontext() if is_precise else replaced(trl_utils, _ChunkedLogProbFunction=_Float32Head)


def mask_of(inputs: dict[str, Any]) -> torch.Tensor:
    """The tokens that are trained on, (B, T): of the completion without what a tool wrote."""
    mask = inputs["completion_mask"]
    return mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]
