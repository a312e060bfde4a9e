# SPDX-License-Identifier: Apache-2.0
"""vLLM on a machine without an accelerator, as verl 0.9's own rollout: `rollout.name=vllm`.

verl's server, its requests and its transfer of weights (through shared memory, where a device has no handles to pass
on) work on a CPU as they are. vLLM's own preparation of the weights for a CPU does not: it drops what it has packed.
"""

import torch
from vllm.model_executor.layers import utils

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


def _keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Not packed and dropped: the next step's weights are loaded into them."""
    layer.cpu_linear = torch.nn.functional.linear


class Worker(vLLMColocateWorkerExtension):
    """`engine_kwargs.vllm.worker_extension_cls`: verl's, which the trainer's weights are sent to."""

    def __new__(cls, **given):
        utils.dispatch_cpu_unquantized_gemm = _keep_weights
        return super().__new__(cls, **given)
