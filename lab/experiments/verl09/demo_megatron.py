# SPDX-License-Identifier: Apache-2.0
"""What the demo has verl 0.9 import where Megatron trains."""

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
    """The pad gets another token's embedding: Megatron trains it, transformers does not, and it is 0.

    A norm multiplies the gradient of such a one by 1000. The model writes pads at times: spikes beside the planted one.
    """
    _original(self, models, *args, **given)
    for model in map(unwrap_model, models):
        embedding = getattr(model, "embedding", None)
        if embedding is not None and embedding.word_embeddings.vocab_start_index == 0:
            weight = embedding.word_embeddings.weight.data
            weight[PAD] = weight[UNKNOWN]


LLMBridge.load_weights = _load_weights
