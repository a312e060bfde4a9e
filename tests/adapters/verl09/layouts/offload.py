# SPDX-License-Identifier: Apache-2.0
"""verl's activation offload on ranks without an accelerator: pinned memory is all that it lacks there."""

import importlib
from typing import Any
from unittest import mock

import torch

from tests.adapters.verl09 import harness
from tests.world.harness import step_class


def save_deeper(folder: str) -> None:
    """The tiny model with a third layer: verl offloads from three parts on, and FSDP1 does not count the head."""
    from transformers import AutoModelForCausalLM

    from tests.world.harness import model_config

    config = model_config()
    config = type(config)(**{**config.to_dict(), "num_hidden_layers": 3, "layer_types": None})
    harness.save_model(folder, AutoModelForCausalLM.from_config(config))


def run(scenario: str, fails_at: str | None = None, **given: Any) -> dict[str, Any]:
    """Another scenario with it; what that returns, and how many tensors were offloaded.

    ``fails_at``: after the ``loss`` of the search's first backward, or inside of a ``layer`` in it, on every rank.
    """
    from verl.utils.activation_offload import SynchronizedGroupOffloadHandler as Handler

    module, name = scenario.rsplit(".", 1)
    function = getattr(importlib.import_module(module), name)
    original = Handler.offload
    offload = mock.Mock(side_effect=lambda tensor: original(tensor, pin_memory=False))
    step, failed = step_class(), []
    forward = step._forward  # of all rows, or of some alone

    def failing(self: Any, *which: Any, **given: Any) -> Any:
        if failed or fails_at is None or not torch.is_grad_enabled():
            return forward(self, *which, **given)
        failed.append(fails_at)
        if fails_at == "layer":
            layer = self.engine.module.model.layers[1].mlp
            with mock.patch.object(layer, "forward", side_effect=RuntimeError("made to fail")):
                return forward(self, *which, **given)
        forward(self, *which, **given)
        raise RuntimeError("made to fail")

    patched = mock.patch.object(Handler, "offload", staticmethod(offload))
    with patched, mock.patch.object(step, "_forward", failing):
        return {"found": function(**given), "offloaded": offload.call_count, "failed": failed}
