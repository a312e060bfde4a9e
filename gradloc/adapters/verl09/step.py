# SPDX-License-Identifier: Apache-2.0
"""One mini-batch of verl's engine as a step that can be replayed: all forwards and backwards are verl's own.

Shapes: B rows of the micro-batch, T response positions, N positions: see :mod:`.packed`.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch

from verl.trainer.ppo.core_algos import agg_loss
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine import FSDPEngineWithLMHead
from verl.workers.utils.padding import response_to_nested

from ...core.step import Details, Numerics, Outputs, OwnLoss, Recorded, RngState
from ...keys import ROW_KEY
from ..verl_common.losses import changed, weights_of
from ..verl_common.precise import logit_bytes, readout_of
from .offload import set_aside, settled
from .packed import Layout, padded

FIELDS = {"log_probs": "log_prob", "entropy": "entropy", "values": "log_prob"}
"""Of verl's model output, and what they are called in a record; values are a critic's."""


class EngineStep(OwnLoss):
    """One mini-batch of verl's FSDP engine, replayable: see :class:`~...core.step.TrainingStep`.

    Args:
        engine: verl's ``FSDPEngineWithLMHead``.
        loss_function: verl's ``ppo_loss`` with the actor's config bound to it.
        dp_size: data-parallel ranks.
    """

    output, old, factor = "log_probs", "old_log_probs", 1.0
    """Of verl's model output what the loss is about, the batch's from before the update, and what the mean of the
    tokens' losses is multiplied with."""

    def __init__(self, engine: FSDPEngineWithLMHead, loss_function: Callable, dp_size: int):
        self.engine, self.loss_function, self.dp_size = engine, loss_function, dp_size
        self.micro_batches: list[Any] = []
        self._recorded: list[Recorded] = []
        self._packed: list[dict[str, torch.Tensor]] = []
        """Of each micro-batch, by a record's names, what verl's model gave and the backward delivered: (N,)."""
        self._layouts: dict[int, Layout] = {}

    # ---- recording, while verl trains

    def before_forward(self, micro_batch: Any) -> None:
        """Keep the next micro-batch (verl's TensorDict) and the random state before its forward."""
        self.micro_batches.append(micro_batch)
        rng = RngState(torch.device(get_device_name()))
        self._recorded.append(Recorded(rng=rng, is_value=self.output == "values"))
        self._packed.append({})

    def after_forward(self, model_output: dict[str, torch.Tensor], number: int = -1) -> None:
        """Keep the values of the last micro-batch, or of this one, and hook their coefficients; computes nothing."""
        packed = self._packed[number]
        for key, name in FIELDS.items():
            value = model_output.get(key)
            if value is not None:
                packed[name] = value.detach().values()
                if value.requires_grad:
                    value.register_hook(partial(_keep, packed, f"{name}_coefficient"))

    # ---- what the search may ask

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)

    @property
    def numerics(self) -> Numerics:
        scale = 1.0 if self.engine.scaler is None else self.engine.scaler.get_scale()
        return Numerics(
            self.engine._autocast_dtype,
            scale,
            1.0 / (self.dp_size * scale),
            float(self.micro_batches[0]["temperature"]),
            self.reduces_once,
        )

    @property
    def reduces_once(self) -> bool:
        return getattr(self.engine.engine_config, "use_no_sync_for_gradient_accumulation", True)

    def recorded(self, micro_batch: int) -> Recorded:
        recorded, packed = self._recorded[micro_batch], self._packed[micro_batch]
        while packed:  # padded when somebody asks, not while nothing spikes
            name = next(iter(packed))
            setattr(recorded, name, self._layout(micro_batch).unpack(packed[name]))
            del packed[name]  # once that has gone well
        return recorded

    def rows(self, micro_batch: int) -> list[int]:
        rows = self.micro_batches[micro_batch].get(ROW_KEY, None)
        if rows is None:
            return []
        return (rows.values() if rows.is_nested else rows).flatten().tolist()

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        return padded(self.micro_batches[micro_batch]["response_mask"]).bool().to(get_device_id())

    def details(self, micro_batch: int) -> Details:
        mask, data, config = self.token_mask(micro_batch), self.micro_batches[micro_batch], self._config
        sizes = {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
        sizes["loss_scale_factor"] = config.loss_scale_factor
        weights = weights_of(mask, lambda losses: self.factor * agg_loss(losses, mask, config.loss_agg_mode, **sizes))
        # this verl's loss always takes the old log-probs that came with the batch
        return Details(padded(data[self.old]).to(get_device_id()), weights / self.dp_size)

    def in_pass(self, is_last: bool) -> AbstractContextManager[None]:
        return self.engine._gradient_sync_context(is_last_micro_batch=is_last)

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Outputs:
        data = self._data(micro_batch)
        if needs_entropy:
            data = data.copy()
            tu.assign_non_tensor(data, calculate_entropy=True)
        output = self._run_forward(micro_batch, data)
        unpack = self._layout(micro_batch).unpack
        found = {FIELDS[key]: unpack(output[key].values()) for key in FIELDS if output.get(key) is not None}
        return Outputs(**found)

    def forward_bytes(self) -> int:
        if is_fused(self.micro_batches[0]):
            return 0
        module = getattr(self.engine.module, "_fsdp_wrapped_module", self.engine.module)
        ids = [micro_batch["input_ids"] for micro_batch in self.micro_batches]
        is_packed = tu.get_non_tensor_data(data=self.micro_batches[0], key="use_remove_padding", default=True)
        lengths = [nested.offsets().diff() for nested in ids]
        sizes = [int(each.sum() if is_packed else each.max() * len(each)) for each in lengths]
        vocabulary = getattr(module.config.get_text_config(), "vocab_size", 0)
        has_entropy = tu.get_non_tensor_data(data=self.micro_batches[0], key="calculate_entropy", default=False)
        is_whole = has_entropy and not self.engine.engine_config.entropy_from_logits_with_chunking
        each = logit_bytes(self.numerics.temperature != 1, is_whole)
        return int(max(sizes) * vocabulary * each) // self.engine.ulysses_sequence_parallel_size

    @property
    def without_kl(self) -> dict[str, Any] | None:
        has_term = bool(self._config.use_kl_loss) and "distillation_config" not in self.loss_function.keywords
        return {"use_kl_loss": False} if has_term else None

    def coefficients_under(
        self, micro_batch: int, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Outputs:
        pack, recorded, of_verl = self._layout(micro_batch).pack, self.recorded(micro_batch), self.loss_function
        of_changed = {**of_verl.keywords, "config": changed(self._config, **settings)}
        values = [
            None if value is None else value.detach().float().clone() for value in (recorded.log_prob, recorded.entropy)
        ]
        leaves = [value.requires_grad_() for value in values if value is not None]
        data = self._data(micro_batch)
        if tensors:
            data = data.copy()
            for name, value in tensors.items():
                data[name] = response_to_nested(value, data["response_mask"])
        with torch.enable_grad():
            pairs = zip((self.output, "entropy"), values, strict=True)
            output = {key: pack(value) for key, value in pairs if value is not None}
            group = self.engine.get_data_parallel_group()
            loss, _ = partial(of_verl.func, *of_verl.args, **of_changed)(model_output=output, data=data, dp_group=group)
        return Outputs(*torch.autograd.grad(loss, leaves, allow_unused=True))

    # ---- inside

    @property
    def _config(self) -> Any:
        return self.loss_function.keywords["config"]

    def _layout(self, micro_batch: int) -> Layout:
        if micro_batch not in self._layouts:
            self._layouts[micro_batch] = Layout(self.micro_batches[micro_batch], torch.device(get_device_name()))
        return self._layouts[micro_batch]

    def _data(self, micro_batch: int) -> Any:
        return self.micro_batches[micro_batch].to(get_device_id())

    def _run_forward(self, micro_batch: int, data: Any) -> Mapping[str, torch.Tensor]:
        """verl's forward; its model output, with a graph where gradients are enabled."""
        kept: dict[str, torch.Tensor] = {}

        def keep(model_output: dict[str, torch.Tensor], **_: Any) -> tuple[torch.Tensor, dict]:
            kept.update(model_output)
            return torch.zeros((), device=get_device_name()), {}

        with ExitStack() as around:
            if torch.is_grad_enabled():
                around.enter_context(settled(self.engine))
            else:
                around.enter_context(readout_of(self.engine.module, self.numerics.dtype, is_fused(data)))
                around.enter_context(set_aside())
            FSDPEngineWithLMHead.forward_step(self.engine, data, keep, forward_only=not torch.is_grad_enabled())
        return kept


class CriticStep(EngineStep):
    """One mini-batch of verl's critic: its values stand where the actor's log-probs stand."""

    output, old, factor = "values", "values", 0.5

    @property
    def without_kl(self) -> None:
        """A critic has no such term."""

    def forward_bytes(self) -> int:
        return 0


def is_fused(data: Any) -> bool:
    """Whether verl computes the log-probs of a micro-batch by its fused kernel."""
    return tu.get_non_tensor_data(data=data, key="use_fused_kernels", default=False)


def _keep(packed: dict[str, torch.Tensor], name: str, grad: torch.Tensor) -> None:
    packed[name] = grad.detach().values()
