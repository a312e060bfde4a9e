# SPDX-License-Identifier: Apache-2.0
"""The planted response's advantage, and the record of what was planted.

verl calls an advantage estimator with rewards, mask and uids only. What sees the same rows in the
same order, just before and in the same process, tells it which are planted: on verl 0.7 this reward
manager, on 0.9 `experiments.verl09.explosion`.
"""

import json
import os
from pathlib import Path

import torch

from experiments.cpu.fault import Rows
from experiments.cpu.reward import ArithmeticReward, rows_of
from experiments.explosion import stale
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est

RECORD = "planted.jsonl"
"""The file, within a run's folder, with one line for each step at which something was planted."""

_uids: list = []
_in_row: torch.Tensor | None = None
_advantage = 0.0


class ExplosionReward(ArithmeticReward):
    """The demo's reward manager; it passes the marks on and writes down what is planted.

    Args:
        advantage: what the planted response's tokens get.
        kwargs: as `ArithmeticReward`.
    """

    def __init__(self, *args, advantage: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.advantage = float(advantage)

    def __call__(self, data, return_dict=False):
        """Scores the rows; those of a validation have no marks."""
        if not data.meta_info.get("validate"):
            observe(rows_of(data), data.batch[stale.KEY], self.advantage, self.tokenizer)
        return super().__call__(data, return_dict)


def planted(rows: Rows, marks: torch.Tensor, tokenizer) -> list[dict]:
    """One entry for each planted response of a batch: where it is and which tokens are stale."""
    lines = []
    for row in torch.nonzero(marks.any(-1)).flatten().tolist():
        response = rows.responses[row][marks[row] > 0].tolist()
        positions = torch.nonzero(marks[row] == stale.STALE).flatten().tolist()
        lines.append(
            {
                "step": rows.step,
                "uid": str(rows.uids[row]),
                "rollout_index": int(rows.rollout_indices[row]),
                "row": row,
                "num_rows": len(marks),
                "length": len(response),
                "positions": positions,
                "token_ids": [response[i] for i in positions],
                "text": tokenizer.decode(response),
            }
        )
    return lines


def observe(rows: Rows, marks: torch.Tensor, advantage: float, tokenizer) -> None:
    """Tells the estimator the rows of its next call and their (B, T) marks, and writes down what is planted."""
    global _uids, _in_row, _advantage
    _uids, _in_row, _advantage = rows.uids, marks > 0, advantage
    for line in planted(rows, marks, tokenizer):
        with (Path(os.environ["GRADLOC_RUN_DIR"]) / RECORD).open("a") as file:
            file.write(json.dumps(line) + "\n")


@register_adv_est("grpo_with_explosion")
def grpo_with_explosion(token_level_rewards, response_mask, index, config=None, **_):
    """verl's GRPO advantages, with the planted response's replaced.

    Args:
        token_level_rewards: (B, T) float.
        response_mask: (B, T), 1 on response tokens.
        index: (B,) the prompts' uids.
        config: the `algorithm` section.

    Returns:
        Advantages and returns, (B, T) each; the returns are GRPO's.

    Raises:
        RuntimeError: if the rows last observed are not the ones given.
    """
    by_std = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    advantages, returns = compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=by_std
    )
    if _in_row is None or _uids != list(index):
        raise RuntimeError(
            "grpo_with_explosion saw rows that nobody told it of: on verl 0.7.0 set "
            "reward_manager.name=ExplosionReward and reward_model.use_reward_loop=False; on 0.9, "
            "model.external_lib=experiments.verl09.explosion"
        )
    return torch.where(_in_row, _advantage, advantages), returns
