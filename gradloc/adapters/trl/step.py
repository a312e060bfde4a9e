# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of TRL as a step that can be replayed: its forwards and losses are TRL's ``_compute_loss``.

That method gets log-probs and entropies from another one of the trainer's. There a replay steps in: it lets the
gradient of chosen tokens through, gives other values, or takes the values and breaks off.

Shapes: B rows of a micro-batch, P prompt and T completion positions.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from transformers.integrations.fsdp import is_fsdp_managed_module
from trl.trainer import utils as trl_utils

from ...core.step import LossOfGiven, Recorded, RngState, let_through, record
from ...touched import replaced

Forwarded = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""What TRL's method returns: log-probs (B, T), entropies (B, T), and a mixture of experts' balancing loss."""

_ENTROPY_CONTROLLER = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")
"""What TRL's loss changes beside the gradient: its entropy controller moves inside the step's last micro-batch."""
_PLAIN = {"beta": 0.0, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "_entropy_bonus_enabled": False}
"""A loss of the advantages alone."""


class TrlStep(LossOfGiven):
    """All micro-batches of one optimizer step: see :class:`~...core.step.TrainingStep`.

    The model is as TRL's trainer calls it, under DDP or FSDP2; ``dp_size`` counts processes.
    """

    window: int | None = None
    """Micro-batches of the whole step, where a replay's process does not have them all."""

    def __init__(self, trainer: Any, model: torch.nn.Module, dp_size: int):
        self.trainer, self.model, self.dp_size = trainer, model, dp_size
        self.inputs: list[dict[str, Any]] = []
        self._recorded: list[Recorded] = []
        self._entropy_masks: list[torch.Tensor | None] = []
        self._before = {name: getattr(trainer, name) for name in _ENTROPY_CONTROLLER if hasattr(trainer, name)}
        self._present = -1
        self._way: Callable[[Callable[[], Forwarded]], Forwarded] | None = None

    # ---- what the trainer's methods go through

    @property
    def is_asking(self) -> bool:
        """Whether the loss that runs is recorded or replayed here."""
        return self._way is not None

    @contextmanager
    def recording(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Around training's loss of the next micro-batch."""
        self.inputs.append(inputs)
        self._recorded.append(Recorded(rng=RngState(self.trainer.accelerator.device)))
        self._entropy_masks.append(None)
        with self._asking(len(self.inputs) - 1, self._record):
            yield

    def log_probs(self, call: Callable[[], Forwarded]) -> Forwarded:
        """In place of TRL's forward, which ``call`` runs."""
        assert self._way is not None
        return self._way(call)

    def high_entropy_mask(self, call: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """In place of TRL's, whose quantile is over all ranks: replays take the mask that training had."""
        if self._way == self._record:
            self._entropy_masks[self._present] = call()
        return self._entropy_masks[self._present]

    # ---- what the search may ask

    @property
    def num_micro_batches(self) -> int:
        return len(self.inputs)

    @property
    def compute_dtype(self) -> torch.dtype:
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return half.get(self.trainer.accelerator.mixed_precision, next(self.model.parameters()).dtype)

    @property
    def loss_scale(self) -> float:
        scaler = self.trainer.accelerator.scaler
        return 1.0 if scaler is None else scaler.get_scale()

    @property
    def temperature(self) -> float:
        return float(self.trainer.temperature)

    @property
    def on_policy(self) -> bool:
        return not {"old_per_token_logps", "old_logps"} & self.inputs[0].keys()

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

    def token_weights(self, micro_batch: int) -> torch.Tensor:
        """Read off TRL's own loss: where all ratios and advantages are 1, its derivative by each log-prob."""
        mask = self.token_mask(micro_batch)
        zero = torch.zeros_like(mask, dtype=torch.float32)
        log_prob, ones = zero.clone().requires_grad_(), zero + 1
        plain = {
            "advantages": ones[:, 0],
            "old_per_token_logps": zero,
            "old_logps": zero[:, 0],
            "importance_sampling_ratio": ones,
        }
        loss = self._loss_of_given(micro_batch, log_prob, zero, plain, _PLAIN)
        (derivative,) = torch.autograd.grad(loss, log_prob)
        return -derivative * mask / self.dp_size

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

    @torch.no_grad()
    def forward(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._recorded[micro_batch].rng.restore()
        try:
            with _float32_head(self.compute_dtype):
                self._loss(micro_batch, _take)
        except _Taken as taken:
            log_probs, entropies = taken.args
            return log_probs, entropies
        raise AssertionError("TRL's loss did not ask for log-probs")

    def entropies(self, micro_batch: int) -> torch.Tensor:
        entropies = self.forward(micro_batch)[1]
        assert entropies is not None  # TRL always asks for them
        return entropies

    def forward_bytes(self) -> int:
        """TRL never holds all logits: a few tiles of them, and in half precision the head's weight in float32."""
        positions = max(inputs["prompt_ids"].numel() + inputs["completion_ids"].numel() for inputs in self.inputs)
        tiles = 3 * min(positions, 4096) * trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE
        config = self.trainer.accelerator.unwrap_model(self.model).config.get_text_config()
        head = 0 if self.compute_dtype == torch.float32 else config.vocab_size * config.hidden_size
        return 4 * (tiles + head)

    def loss(self, micro_batch: int, selected: torch.Tensor | None) -> torch.Tensor:
        self._recorded[micro_batch].rng.restore()
        loss = self._loss(micro_batch, partial(_only, selected))
        scaler = self.trainer.accelerator.scaler
        return loss if scaler is None else scaler.scale(loss)

    # ---- a loss of given log-probs, see LossOfGiven

    def has_kl_term(self) -> bool:
        return "ref_per_token_logps" in self.inputs[0] and self.trainer.beta != 0.0

    def loss_of_given(self, micro_batch: int, log_prob: torch.Tensor, is_without_kl: bool = False) -> torch.Tensor:
        changed = {"beta": 0.0} if is_without_kl else {}
        return self._loss_of_given(micro_batch, log_prob, self._recorded[micro_batch].entropy, {}, changed)

    # ---- inside

    def _loss_of_given(
        self, micro_batch: int, log_prob: torch.Tensor, entropy: Any, inputs: dict[str, Any], changed: dict[str, Any]
    ) -> torch.Tensor:
        given = log_prob, entropy, None
        return self._loss(micro_batch, lambda call: given, inputs, {**changed, "aux_loss_enabled": False})

    def _loss(
        self, micro_batch: int, way: Any, inputs: dict[str, Any] | None = None, changed: dict[str, Any] | None = None
    ) -> torch.Tensor:
        """TRL's loss of a micro-batch as training had it, but for what is changed; it leaves nothing behind."""
        trainer, window = self.trainer, self.window or len(self.inputs)
        states = {**self._before, "_metrics": {"train": defaultdict(list)}}
        states |= {"current_gradient_accumulation_steps": window, **(changed or {})}
        inputs = {**self.inputs[micro_batch], **(inputs or {})}
        with self._asking(micro_batch, way), replaced(trainer, **states), replaced(trainer.accelerator, **_ALONE):
            with trainer.compute_loss_context_manager():
                loss = trainer._compute_loss(self.model, inputs)
        return loss if trainer.loss_is_scaled_for_ga else loss / window

    @contextmanager
    def _asking(self, micro_batch: int, way: Any) -> Iterator[None]:
        self._present, self._way = micro_batch, way
        try:
            yield
        finally:
            self._way = None

    def _record(self, call: Callable[[], Forwarded]) -> Forwarded:
        forwarded = call()
        record(self._recorded[self._present], *forwarded[:2])
        return forwarded


class _Taken(Exception):
    """A forward has given what it was run for: log-probs and entropies."""


def _take(call: Callable[[], Forwarded]) -> Forwarded:
    raise _Taken(*call()[:2])


def _only(selected: torch.Tensor | None, call: Callable[[], Forwarded]) -> Forwarded:
    log_probs, entropies, aux_loss = call()
    if selected is None:
        return log_probs, entropies, aux_loss
    return let_through(selected, log_probs), let_through(selected, entropies), aux_loss


def _same(values: Any, *_: Any, **__: Any) -> Any:
    return values


_ALONE = {name: _same for name in ("gather", "gather_for_metrics", "reduce")}
"""TRL's loss sums its metrics over the ranks; in a replay nobody reads them, and one rank may run it alone."""


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
