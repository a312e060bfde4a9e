# SPDX-License-Identifier: Apache-2.0
"""The planted response's advantage, and the record of what was planted.

verl calls an advantage estimator with rewards, mask and uids only. The reward manager sees the same
rows in the same order, just before and in the same process, and so tells it which are planted.
"""

import json
import os
from pathlib import Path

import torch

from experiments.cpu.reward import ArithmeticReward
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
            observe(data.non_tensor_batch["uid"], data.batch[stale.KEY], self.advantage)
            for line in planted(data, self.tokenizer):
                with (Path(os.environ["GRADLOC_RUN_DIR"]) / RECORD).open("a") as file:
                    file.write(json.dumps(line) + "\n")
        return super().__call__(data, return_dict)


def planted(data, tokenizer) -> list[dict]:
    """One entry for each planted response of a batch: where it is and which tokens are stale."""
    marks = data.batch[stale.KEY]
    lines = []
    for row in torch.nonzero(marks.any(-1)).flatten().tolist():
        response = data.batch["responses"][row][marks[row] > 0].tolist()
        positions = torch.nonzero(marks[row] == stale.STALE).flatten().tolist()
        lines.append(
            {
                "step": data.meta_info["demo_step"],
                "uid": str(data.non_tensor_batch["uid"][row]),
                "rollout_index": int(data.non_tensor_batch["rollout_index"][row]),
                "row": row,
                "num_rows": len(marks),
                "length": len(response),
                "positions": positions,
                "token_ids": [response[i] for i in positions],
                "text": tokenizer.decode(response),
            }
        )
    return lines


def observe(uids, marks: torch.Tensor, advantage: float) -> None:
    """Tells the estimator the rows of its next call and their marks."""
    global _uids, _in_row, _advantage
    _uids, _in_row, _advantage = list(uids), marks > 0, advantage


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
            "grpo_with_explosion saw rows that the reward manager did not: set "
            "reward_manager.name=ExplosionReward and reward_model.use_reward_loop=False"
        )
    return torch.where(_in_row, _advantage, advantages), returns
