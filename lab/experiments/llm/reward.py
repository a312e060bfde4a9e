# SPDX-License-Identifier: Apache-2.0
"""Rewards loaded by `reward_manager.source=importlib`: Math-Verify's score, and two bad ones.

`error` has no lower bound, and `length` rewards every word; both occur in practice.
"""

import re

from lab.experiments.cpu.reward import ArithmeticReward
from lab.rewards import math_verify
from verl.trainer.ppo.core_algos import register_adv_est

NUMBER = re.compile(r"\d+")
LONGEST = 240
"""Number of characters for which `length` is 1."""


def error(data_source, solution_str: str, ground_truth: str, extra_info=None, **_) -> float:
    """Return minus the squared error of the last number, or of 0 if there is none.

    >>> error(None, "2 + 2 = 7", "4")
    -9.0
    """
    numbers = NUMBER.findall(solution_str)
    return -((float(numbers[-1] if numbers else 0) - float(ground_truth)) ** 2)


def length(data_source, solution_str: str, ground_truth: str, extra_info=None, **_) -> float:
    """Return the answer's length in characters, divided by `LONGEST`."""
    return len(solution_str) / LONGEST


SCORES = {"right": math_verify.score, "error": error, "length": length}


class TaskReward(ArithmeticReward):
    """The demo's reward manager with another score.

    Args:
        kind: `right` (1 for the right answer, else 0), `error` or `length`.
        kwargs: of `ArithmeticReward`.
    """

    def __init__(self, *args, kind: str = "right", **kwargs):
        super().__init__(*args, **kwargs)
        self.compute_score = SCORES[kind]


@register_adv_est("negative_only")
def negative_only(token_level_rewards, response_mask, **_):
    """Return -1 on every token of a wrong answer and 0 elsewhere: wrong answers are pushed down, none up.

    Args:
        token_level_rewards: (B, T) float; a row's sum is its score, in [0, 1].
        response_mask: (B, T), 1 on response tokens.

    Returns:
        Advantages and returns, (B, T) each; they are equal.
    """
    advantages = (token_level_rewards.sum(-1, keepdim=True) - 1) * response_mask
    return advantages, advantages
