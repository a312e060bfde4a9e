# SPDX-License-Identifier: Apache-2.0
"""Score arithmetic by rule; loaded by `reward_manager.source=importlib`."""

import torch

from lab.experiments.cpu import fault
from lab.experiments.cpu.arithmetic import score
from verl.workers.reward_manager.naive import NaiveRewardManager


def is_runaway(responses: torch.Tensor, response_mask: torch.Tensor, eos: int) -> torch.Tensor:
    """Return (B,) bool: which rows of (B, T) responses reached the length limit without an end token."""
    return response_mask.bool().all(-1) & (responses[:, -1] != eos)


def rows_of(data) -> fault.Rows:
    """Return the rows of a training batch for the fault."""
    return fault.Rows(
        step=data.meta_info["demo_step"],
        uids=list(data.non_tensor_batch["uid"]),
        rollout_indices=list(data.non_tensor_batch["rollout_index"]),
        responses=data.batch["responses"],
        log_probs=data.batch.get("rollout_log_probs"),
    )


class ArithmeticReward(NaiveRewardManager):
    """verl's naive manager with `score`; it also passes the rows to the demo's fault.

    Args:
        runaway_penalty: factor of the reward of a training response that reached the length limit without an end.
        fault_settings: arguments of `fault.Fault`; None plants nothing.
    """

    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key, runaway_penalty=1.0, fault_settings=None):
        super().__init__(tokenizer, num_examine, score, reward_fn_key)
        self.runaway_penalty = float(runaway_penalty)
        fault.arm(fault.Fault(**fault_settings) if fault_settings else None)

    def __call__(self, data, return_dict=False):
        """Score the rows; those of a validation are not passed to the fault, and have no penalty."""
        if data.meta_info.get("validate"):
            return super().__call__(data, return_dict)
        fault.observe(rows_of(data))
        result = super().__call__(data, return_dict)
        responses = data.batch["responses"]
        mask = data.batch["attention_mask"][:, -responses.shape[1] :]
        rewards = result["reward_tensor"] if return_dict else result
        rewards[is_runaway(responses, mask, self.tokenizer.eos_token_id)] *= self.runaway_penalty
        return result
