# SPDX-License-Identifier: Apache-2.0
"""The slow obvious way: every token's gradient by its own backward, on an unsharded model.

Shares no code with the probes. The loss is verl's; its derivatives by each log-prob and entropy are
taken on leaves, then every token gets a backward of its own through the plain model.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist


def token_gradients(trainer: Any, model: torch.nn.Module, batch: Any) -> dict[tuple[int, int, int, int], torch.Tensor]:
    """Gradient of every response token of the first mini-batch in the step's loss.

    Args:
        trainer: supplies config and loss; its sharded module is not run.
        model: an unsharded model with the same weights.
        batch: the whole batch as dispatched.

    Returns:
        (rank, micro_batch, row in it, position) -> flat gradient, averaged over ranks.
    """
    from verl.workers.actor.dp_actor import DataParallelPPOActor

    config = trainer.actor.config
    plain = DataParallelPPOActor.__new__(DataParallelPPOActor)
    plain.__dict__.update(trainer.actor.__dict__)
    plain.actor_module = copy.deepcopy(model).train()
    plain.gradient_accumulation = config.ppo_mini_batch_size // config.ppo_micro_batch_size_per_gpu
    params = [param for param in plain.actor_module.parameters() if param.requires_grad]
    num_ranks = dist.get_world_size()
    gradients = {}
    for rank, local in enumerate(batch.chunk(num_ranks)):
        mini_batches = local.split(config.ppo_mini_batch_size)
        on_policy = len(mini_batches) == 1 and config.ppo_epochs == 1
        for index, micro_batch in enumerate(mini_batches[0].split(config.ppo_micro_batch_size_per_gpu)):
            inputs = {**micro_batch.batch}
            entropy, log_prob = plain._forward_for_loss(inputs, 1.0)
            leaf = log_prob.detach().requires_grad_()
            entropy_leaf = None if entropy is None else entropy.detach().requires_grad_()
            scratch = {"actor/pg_loss": 0.0, "actor/kl_loss": 0.0}
            loss = plain._micro_batch_loss(inputs, leaf, entropy_leaf, on_policy, scratch, {}, {})
            loss.backward()
            for row, position in inputs["response_mask"].nonzero().tolist():
                root = log_prob[row, position] * leaf.grad[row, position]
                if entropy is not None and entropy_leaf.grad is not None:
                    root = root + entropy[row, position] * entropy_leaf.grad[row, position]
                grads = torch.autograd.grad(root, params, retain_graph=True)
                gradients[rank, index, row, position] = torch.cat([g.flatten() for g in grads]) / num_ranks
    return gradients
