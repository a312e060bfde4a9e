# SPDX-License-Identifier: Apache-2.0
"""Run vLLM as verl 0.9's rollout on a machine without an accelerator: `rollout.name=vllm`.

verl's server, requests and transfer of weights through shared memory work on a CPU. vLLM's preparation of the weights
for a CPU does not: it drops the weights that it has packed.
"""

import torch
from vllm.model_executor.layers import utils

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


def _keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Keep the weights, since the next step's are loaded into them."""
    layer.cpu_linear = torch.nn.functional.linear


class Worker(vLLMColocateWorkerExtension):
    """verl's extension that receives the weights, for `engine_kwargs.vllm.worker_extension_cls`."""

    def __new__(cls, **given):
        utils.dispatch_cpu_unquantized_gemm = _keep_weights
        return super().__new__(cls, **given)
