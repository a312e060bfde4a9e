# SPDX-License-Identifier: Apache-2.0
"""Plant the demo's fault: at one step, one response token gets a huge advantage.

The fault is part of the demo and not of the patch, which must find it from gradients alone. The advantages are verl's
own GRPO. Step, sequence and position are drawn from a seed and recorded, so that the demo can check the event.

verl calls an advantage estimator with rewards, mask and uids only: no step, no token ids. So `observe()` must be called
before it, in the same process, with the same rows in the same order: `lab.experiments.cpu.reward` does that, and
`lab.experiments.verl09.demo` on verl 0.9.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from lab.experiments.fault_plan import FaultPlan
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est


@dataclass(frozen=True)
class Rows:
    """One training batch in the estimator's row order."""

    step: int
    uids: list
    rollout_indices: list
    responses: torch.Tensor
    """(B, T) token ids."""
    log_probs: torch.Tensor | None = None
    """(B, T) log-probs from the rollout; None if unknown."""


class Fault:
    """A plan with its advantage and the file to record it in.

    Args:
        seed, first_step, last_step: as in `FaultPlan.draw`.
        advantage: the planted one.
        record: path of the file.
        surest: in (0, 1]; tokens with a higher probability in the rollout are skipped. The gradient of a token's
            log-prob is proportional to 1 - p, so no advantage makes a spike of a token that a model is sure of.
    """

    def __init__(self, seed: int, first_step: int, last_step: int, advantage: float, record: str, surest: float = 1.0):
        self.plan = FaultPlan.draw(seed, first_step, last_step)
        self.advantage = float(advantage)
        self.record = Path(record)
        self.surest = float(surest)

    def plant(self, rows: Rows, advantages: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """Return the advantages (B, T); at the plan's step with the fault, which is recorded."""
        if rows.step != self.plan.step:
            return advantages
        eligible = response_mask
        if rows.log_probs is not None and self.surest < 1:
            eligible = response_mask * (rows.log_probs <= math.log(self.surest))
        row, position = self.plan.locate(eligible)
        faulty = advantages.clone()
        faulty[row, position] = self.advantage
        self.plan.write(
            self.record,
            uid=str(rows.uids[row]),
            rollout_index=int(rows.rollout_indices[row]),
            row=row,
            num_rows=len(rows.uids),
            position=position,
            token_id=int(rows.responses[row, position]),
            response_ids=rows.responses[row][response_mask[row].bool()].tolist(),
            advantage_before=float(advantages[row, position]),
            advantage_planted=self.advantage,
        )
        return faulty


_fault = None
_rows: Rows | None = None


def arm(fault) -> None:
    """Set the object whose `plant` method `grpo_with_fault` calls; None plants nothing."""
    global _fault
    _fault = fault


def armed():
    """Return the object that `arm` set."""
    return _fault


def observe(rows: Rows) -> None:
    """Set the rows of the estimator's next call."""
    global _rows
    _rows = rows


@register_adv_est("grpo_with_fault")
def grpo_with_fault(token_level_rewards, response_mask, index, config=None, **_):
    """Compute verl's GRPO advantages, with the armed fault at its step.

    Args:
        token_level_rewards: (B, T) float.
        response_mask: (B, T), 1 on response tokens.
        index: (B,) the prompts' uids.
        config: the `algorithm` section.

    Returns:
        Advantages and returns, (B, T) each. The returns never carry the fault.

    Raises:
        RuntimeError: if the rows last observed are not the ones given.
    """
    by_std = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    advantages, returns = compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=by_std
    )
    if _fault is None:
        return advantages, returns
    if _rows is None or list(_rows.uids) != list(index):
        raise RuntimeError(
            "grpo_with_fault got rows that were not observed: do not change the experiment's reward manager, "
            "use_reward_loop=False, and on verl 0.9 model.external_lib"
        )
    return _fault.plant(_rows, advantages, response_mask), returns
