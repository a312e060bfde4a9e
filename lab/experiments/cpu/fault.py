# SPDX-License-Identifier: Apache-2.0
"""The demo's fault: at one step, one response token gets a huge advantage.

It belongs to the demo and never to the patch, which must find it from gradients alone. The
advantages are verl's own GRPO; step, sequence and position are drawn from a seed, and what was
planted is written down, so that the demo can say whether the event names exactly that token.

verl calls an advantage estimator with rewards, mask and uids only: no step, no token ids. So what
sees the same rows in the same order, just before and in the same process, calls `observe()` first:
`lab.experiments.cpu.reward`, on verl 0.9 `lab.experiments.verl09.demo`.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lab.experiments.settings import FaultPlan, draw
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
    """(B, T) what the rollout gave them; None where it is not known."""


def locate(plan: FaultPlan, mask: torch.Tensor) -> tuple[int, int]:
    """Row and position of the planted token in a (B, T) mask of those that it may be.

    Rows without one cannot hold the fault and are passed over.
    """
    rows = torch.nonzero(mask.sum(-1) > 0).flatten().tolist()
    row = rows[int(plan.sequence * len(rows))]
    positions = torch.nonzero(mask[row]).flatten().tolist()
    return row, positions[int(plan.position * len(positions))]


class Fault:
    """A plan, its size, and the file that says what came of it.

    Args:
        seed, first_step, last_step: what `draw` takes.
        advantage: what the token gets.
        record: the file.
        surest: a token whose probability in the rollout was higher is passed over, in (0, 1]: the gradient of a token's
            log-prob goes with 1 - p, so that a pretrained model has tokens that no advantage makes a spike of.
    """

    def __init__(self, seed: int, first_step: int, last_step: int, advantage: float, record: str, surest: float = 1.0):
        self.plan = draw(seed, first_step, last_step)
        self.seed = seed
        self.advantage = float(advantage)
        self.record = Path(record)
        self.surest = float(surest)

    def plant(self, rows: Rows, advantages: torch.Tensor, response_mask: torch.Tensor):
        """Returns the advantages, with the fault when it is due, and then writes the record."""
        if rows.step != self.plan.step:
            return advantages
        eligible = response_mask
        if rows.log_probs is not None and self.surest < 1:
            eligible = response_mask * (rows.log_probs <= math.log(self.surest))
        row, position = locate(self.plan, eligible)
        faulty = advantages.clone()
        faulty[row, position] = self.advantage
        planted = {
            "seed": self.seed,
            "plan": asdict(self.plan),
            "step": rows.step,
            "uid": str(rows.uids[row]),
            "rollout_index": int(rows.rollout_indices[row]),
            "row": row,
            "num_rows": len(rows.uids),
            "position": position,
            "token_id": int(rows.responses[row, position]),
            "response_ids": rows.responses[row][response_mask[row].bool()].tolist(),
            "advantage_before": float(advantages[row, position]),
            "advantage_planted": self.advantage,
        }
        self.record.write_text(json.dumps(planted, indent=2) + "\n", encoding="utf-8")
        return faulty


_fault = None
_rows: Rows | None = None


def arm(fault) -> None:
    """Sets the fault that `grpo_with_fault` plants, of which it calls `plant`; None plants nothing."""
    global _fault
    _fault = fault


def armed():
    """The fault that `grpo_with_fault` plants."""
    return _fault


def observe(rows: Rows) -> None:
    """Tells the estimator which rows its next call is about."""
    global _rows
    _rows = rows


@register_adv_est("grpo_with_fault")
def grpo_with_fault(token_level_rewards, response_mask, index, config=None, **_):
    """verl's GRPO advantages, with the armed fault when its step has come.

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
            "grpo_with_fault saw rows that nobody told it of: leave the experiment's reward manager, "
            "use_reward_loop=False, and on verl 0.9 model.external_lib as they are"
        )
    return _fault.plant(_rows, advantages, response_mask), returns
