# SPDX-License-Identifier: Apache-2.0
"""Install the demo on verl 0.9 with Megatron."""

from typing import Any

from mbridge.core.llm_bridge import LLMBridge
from mbridge.core.util import unwrap_model

from lab.experiments.verl09 import demo, megatron

__all__ = ["demo"]

PAD, UNKNOWN = 0, 1

megatron.install()
megatron.engine_in("float32").start()

_original = LLMBridge.load_weights


def _load_weights(self: Any, models: list[Any], *args: Any, **given: Any) -> None:
    """Give the pad token another token's embedding: it is 0, and Megatron trains it, unlike transformers.

    A norm layer multiplies the gradient of a zero embedding by 1000, and the model sometimes writes pads: more spikes.
    """
    _original(self, models, *args, **given)
    for model in map(unwrap_model, models):
        embedding = getattr(model, "embedding", None)
        if embedding is not None and embedding.word_embeddings.vocab_start_index == 0:
            weight = embedding.word_embeddings.weight.data
            weight[PAD] = weight[UNKNOWN]


LLMBridge.load_weights = _load_weights
