# SPDX-License-Identifier: Apache-2.0
"""One mini-batch of verl's engine as a step that can be replayed: all forwards and backwards are verl's own.

The engine keeps sequences end to end (``N`` positions of prompts and responses in one micro-batch). A position's
log-prob is that of the token after it, so a response's first log-prob stands at its prompt's last position.

Shapes: B rows of the micro-batch, T response positions, N positions.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from verl.trainer.ppo.core_algos import agg_loss
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.experimental.torch_functional import FusedLinearForPPO
from verl.workers.engine import FSDPEngineWithLMHead

from ...core.memory import precise_fused_readout, precise_readout
from ...core.probe import LossOfGiven, Recorded, RngState, let_through
from ...keys import ROW_KEY

__all__ = ["EngineStep"]

_FIELDS = {"log_probs": "log_prob", "entropy": "entropy", "values": "log_prob"}
"""Of verl's model output, and what they are called in a record; values are a critic's."""


class EngineStep(LossOfGiven):
    """One mini-batch of verl's FSDP engine, replayable: see :class:`~..core.probe.TrainingStep`.

    Args:
        engine: verl's ``FSDPEngineWithLMHead``.
        loss_function: verl's ``ppo_loss`` with the actor's config bound to it.
        dp_size: data-parallel ranks.
    """

    output, old = "log_probs", "old_log_probs"
    """Of verl's model output what the loss is about, and the batch's from before the update."""
    on_policy = False  # this verl's loss always takes the old log-probs that came with the batch

    def __init__(self, engine: FSDPEngineWithLMHead, loss_function: Callable, dp_size: int):
        self.engine, self.loss_function, self.dp_size = engine, loss_function, dp_size
        self.micro_batches: list[Any] = []
        self._recorded: list[Recorded] = []
        self._values: list[dict[str, torch.Tensor]] = []
        """Of each micro-batch, by the names of verl's model output: (N,), detached."""
        self._grads: list[dict[str, torch.Tensor]] = []
        """d loss / d value, as the backward delivered it: (N,)."""

    # ---- recording, while verl trains

    def before_forward(self, micro_batch: Any) -> None:
        """Take the next micro-batch (verl's TensorDict) and the random state before its forward."""
        self.micro_batches.append(micro_batch)
        rng = RngState(torch.device(get_device_name()))
        self._recorded.append(Recorded(rng=rng, is_value=self.output == "values"))
        self._values.append({})
        self._grads.append({})

    def after_forward(self, model_output: dict[str, torch.Tensor]) -> None:
        """Keep the last micro-batch's values and hook their coefficients; changes nothing and computes nothing."""
        for key in _FIELDS:
            value = model_output.get(key)
            if value is not None:
                self._values[-1][key] = value.detach().values()
                if value.requires_grad:
                    value.register_hook(partial(_keep, self._grads[-1], key))

    # ---- what the search may ask

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.engine._autocast_dtype

    @property
    def loss_scale(self) -> float:
        scaler = self.engine.scaler
        return 1.0 if scaler is None else scaler.get_scale()

    @property
    def temperature(self) -> float:
        return float(self.micro_batches[0]["temperature"])

    def recorded(self, micro_batch: int) -> Recorded:
        recorded, values = self._recorded[micro_batch], self._values[micro_batch]
        if values:  # padded when somebody asks, not while nothing spikes
            for key, value in values.items():
                setattr(recorded, _FIELDS[key], _unpack(value, self.micro_batches[micro_batch]))
            self._values[micro_batch] = {}
        return recorded

    def rows(self, micro_batch: int) -> list[int]:
        rows = self.micro_batches[micro_batch].get(ROW_KEY, None)
        if rows is None:
            return []
        return (rows.values() if rows.is_nested else rows).flatten().tolist()

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        return _padded(self._data(micro_batch)["response_mask"]).bool()

    def token_weights(self, micro_batch: int) -> torch.Tensor:
        config, mask = self._config, self.token_mask(micro_batch)
        token_losses = torch.zeros_like(mask, dtype=torch.float32, requires_grad=True)
        loss = agg_loss(token_losses, mask, config.loss_agg_mode, **config.global_batch_info)
        (weights,) = torch.autograd.grad(loss, token_losses)
        return weights.nan_to_num() / self.dp_size

    def in_pass(self, is_last: bool) -> AbstractContextManager[None]:
        return self.engine._gradient_sync_context(is_last_micro_batch=is_last)

    def forward(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        found = self._forward(micro_batch, self._data(micro_batch))
        return found[self.output], found.get("entropy")

    def entropies(self, micro_batch: int) -> torch.Tensor:
        data = self._data(micro_batch).copy()
        tu.assign_non_tensor(data, calculate_entropy=True)
        return self._forward(micro_batch, data)["entropy"]

    def forward_bytes(self) -> int:
        if self._is_fused:
            return 0
        module = getattr(self.engine.module, "_fsdp_wrapped_module", self.engine.module)
        ids = [micro_batch["input_ids"] for micro_batch in self.micro_batches]
        is_packed = tu.get_non_tensor_data(data=self.micro_batches[0], key="use_remove_padding", default=True)
        lengths = [nested.offsets().diff() for nested in ids]
        sizes = [int(each.sum() if is_packed else each.max() * len(each)) for each in lengths]
        vocabulary = getattr(module.config.get_text_config(), "vocab_size", 0)
        return 4 * max(sizes) * vocabulary // self.engine.ulysses_sequence_parallel_size

    def coefficients(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        # a coefficient is of this rank's own (scaled) loss; the step's gradient is the mean over the ranks
        factor = 1.0 / (self.dp_size * self.loss_scale)
        data = self.micro_batches[micro_batch]  # for its lengths, at every update: nothing of it is moved
        found = {key: _unpack(grad, data) * factor for key, grad in self._grads[micro_batch].items()}
        if self.output not in found:  # the loss does not depend on them
            found[self.output] = torch.zeros_like(self.recorded(micro_batch).log_prob)
        return found[self.output], found.get("entropy")

    def loss(self, micro_batch: int, selected: torch.Tensor | None) -> torch.Tensor:
        self._recorded[micro_batch].rng.restore()
        data = self._data(micro_batch)
        packed = None if selected is None else _pack(selected, data)

        def loss_of_selected(model_output: dict[str, torch.Tensor], **given: Any) -> tuple[torch.Tensor, dict]:
            if packed is not None:
                model_output = {key: _only(packed, value) for key, value in model_output.items()}
            return self.loss_function(model_output=model_output, **given)

        loss, _ = FSDPEngineWithLMHead.forward_step(self.engine, data, loss_of_selected, forward_only=False)
        scaler = self.engine.scaler
        return loss if scaler is None else scaler.scale(loss)

    def has_kl_term(self) -> bool:
        return bool(self._config.use_kl_loss)

    def loss_of_given(self, micro_batch: int, log_prob: torch.Tensor, is_without_kl: bool = False) -> torch.Tensor:
        data, entropy = self._data(micro_batch), self.recorded(micro_batch).entropy
        output = {self.output: _pack(log_prob, data)}
        if entropy is not None:
            output["entropy"] = _pack(entropy, data)
        loss_function = self._without_kl() if is_without_kl else self.loss_function
        loss, _ = loss_function(model_output=output, data=data, dp_group=self.engine.get_data_parallel_group())
        return loss

    def old_log_prob(self, micro_batch: int) -> torch.Tensor:
        """(B, T), as they came with the batch."""
        return _padded(self._data(micro_batch)[self.old])

    # ---- inside

    @property
    def _config(self) -> Any:
        return self.loss_function.keywords["config"]

    def _without_kl(self) -> Callable:
        config = copy.copy(self._config)
        object.__setattr__(config, "use_kl_loss", False)  # verl freezes its configs
        return partial(self.loss_function.func, **{**self.loss_function.keywords, "config": config})

    @property
    def _is_fused(self) -> bool:
        return tu.get_non_tensor_data(data=self.micro_batches[0], key="use_fused_kernels", default=False)

    def _data(self, micro_batch: int) -> Any:
        return self.micro_batches[micro_batch].to(get_device_id())

    def _precise_readout(self) -> AbstractContextManager[None]:
        if self._is_fused:
            return precise_fused_readout(FusedLinearForPPO, self.compute_dtype)
        return precise_readout(self.engine.module, self.compute_dtype)

    @torch.no_grad()
    def _forward(self, micro_batch: int, data: Any) -> dict[str, torch.Tensor]:
        self._recorded[micro_batch].rng.restore()
        with self._precise_readout():
            _, found = FSDPEngineWithLMHead.forward_step(self.engine, data, None, forward_only=True)
        output = found["model_output"]
        return {key: _unpack(output[key].values(), data) for key in _FIELDS if output.get(key) is not None}


def _keep(grads: dict[str, torch.Tensor], key: str, grad: torch.Tensor) -> None:
    grads[key] = grad.detach().values()


def _padded(values: torch.Tensor) -> torch.Tensor:
    return values.to_padded_tensor(0) if values.is_nested else values


def _places(data: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the log-prob of each response token stands among N positions, and which are tokens: int and bool (B, T)."""
    ends = data["input_ids"].offsets()[1:].to(device)
    lengths = data["responses"].offsets().diff().to(device)
    steps = torch.arange(int(lengths.max()), device=device)
    return (ends - lengths - 1).unsqueeze(1) + steps, steps < lengths.unsqueeze(1)


def _pack(values: torch.Tensor, data: Any) -> torch.Tensor:
    """From response tokens (B, T) to the positions that have their log-probs, (N,); 0 and False elsewhere."""
    places, is_token = _places(data, values.device)
    num_positions = int(data["input_ids"].offsets()[-1])
    return values.new_zeros(num_positions).index_put((places[is_token],), values[is_token])


def _unpack(values: torch.Tensor, data: Any) -> torch.Tensor:
    """The other way, (N,) to (B, T): 0 where there is no token."""
    places, is_token = _places(data, values.device)
    return torch.where(is_token, values[places.clamp(max=len(values) - 1)], 0)


def _only(packed: torch.Tensor, nested: torch.Tensor) -> torch.Tensor:
    """Let gradient through at these positions only; the values stay the same, bit for bit."""
    if nested is None or not nested.requires_grad:
        return nested
    return torch.nested.nested_tensor_from_jagged(let_through(packed, nested.values()), nested.offsets())
