# SPDX-License-Identifier: Apache-2.0
"""Run a bundle's micro-batches again, on a plain model and one process.

A backward begins with the coefficients that the run's own backward left, so neither loss nor trainer is needed.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..core.step import Details, Outputs, TrainingStep, run_backward
from .bundle import Bundle


class ReplayStep(TrainingStep):
    """The event's step, as far as the bundle holds it.

    All ranks' micro-batches are this process', in the order of the bundle's layout. Shapes: B rows, T response
    positions.

    Args:
        model: from :func:`.model.load`.
        bundle: its tensors go to ``device``, where the model is.
        tick: called after every forward.
    """

    def __init__(self, model: torch.nn.Module, bundle: Bundle, device: torch.device, tick: Callable[[], Any]):
        scale = bundle.meta.loss_scale or 1.0
        super().__init__(device, 1, 1.0 / scale)
        self.dtype, self.temperature = bundle.dtype, bundle.meta.temperature
        self.is_value = bundle.is_critics
        self._model, self._bundle, self._tick = model, bundle, tick
        self._micro_batches = [bundle.micro_batch(entry, device) for entry in bundle.layout]
        self._multi_modal = [bundle.multi_modal_inputs(entry, device) for entry in bundle.layout]

    def train(self) -> None:
        """Put the gradient of all tokens, times the scale, into ``.grad``, and record what the search reads."""
        for index, tensors in enumerate(self._micro_batches):
            torch.manual_seed(index)  # dropout's, which is the same in every pass
            self.before_forward(tensors)
            outputs = self.forward(index)
            self.after_forward(outputs)
            coefficients = [tensors.get(f"{name}_coefficients") for name in ("log_prob", "entropy")]
            run_backward(outputs, Outputs(*(c if c is None else c / self.backward_factor for c in coefficients)))

    def rows(self, micro_batch: int) -> list[int]:
        return list(range(*self._bundle.layout[micro_batch].rows))

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        return self._micro_batches[micro_batch]["response_mask"]

    def details(self, micro_batch: int) -> Details:
        """Weigh each token as in a mean over the run's whole step, which may be more than the bundle holds."""
        return Details(weights=self.token_mask(micro_batch) / self._bundle.num_tokens)

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Outputs:
        tensors, dtype = self._micro_batches[micro_batch], self.dtype
        inputs = {name: tensors[name] for name in ("input_ids", "attention_mask")}
        positions, width = tensors["position_ids"], tensors["response_mask"].shape[1]
        inputs["position_ids"] = positions.transpose(0, 1) if positions.dim() == 3 else positions
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            output = self._model(**inputs, **self._multi_modal[micro_batch], use_cache=False)
        logits = output.logits[:, -width - 1 : -1].float()
        self._tick()
        if self.is_value:
            return Outputs(logits.squeeze(-1))
        log_probs = (logits / self.temperature).log_softmax(-1)
        log_prob = log_probs.gather(-1, tensors["input_ids"][:, -width:, None]).squeeze(-1)
        has_entropy = needs_entropy or "entropy_coefficients" in tensors
        return Outputs(log_prob, -(log_probs.exp() * log_probs).sum(-1) if has_entropy else None)
