# SPDX-License-Identifier: Apache-2.0
"""The planted response's advantage, and the record of what was planted.

`experiments.cpu.fault` has the estimator. What sees the same rows in the same order, just before and in the same
process, tells it which are planted: on verl 0.7 this reward manager, on 0.9 `experiments.verl09.explosion`.
"""

import json
import os
from pathlib import Path

import torch

from experiments.cpu import fault
from experiments.cpu.reward import ArithmeticReward, rows_of
from experiments.explosion import stale

RECORD = "planted.jsonl"
"""The file, within a run's folder, with one line for each step at which something was planted."""


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


class Plant:
    """What the estimator plants, in the place of a `fault.Fault`: an advantage on all tokens with a mark, (B, T)."""

    def __init__(self, marks: torch.Tensor, advantage: float):
        self.marks, self.advantage = marks, advantage

    def plant(self, _rows: fault.Rows, advantages: torch.Tensor, _response_mask: torch.Tensor) -> torch.Tensor:
        return torch.where(self.marks > 0, self.advantage, advantages)


def observe(rows: fault.Rows, marks: torch.Tensor, advantage: float, tokenizer) -> None:
    """Tells the estimator the rows of its next call and their (B, T) marks, and writes down what is planted."""
    fault.observe(rows)
    fault.arm(Plant(marks, advantage))
    for row in torch.nonzero(marks.any(-1)).flatten().tolist():
        response = rows.responses[row][marks[row] > 0].tolist()
        positions = torch.nonzero(marks[row] == stale.STALE).flatten().tolist()
        planted = {
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
        with (Path(os.environ["GRADLOC_RUN_DIR"]) / RECORD).open("a") as file:
            file.write(json.dumps(planted) + "\n")
