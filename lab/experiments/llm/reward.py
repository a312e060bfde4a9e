# SPDX-License-Identifier: Apache-2.0
"""The rewards, plugged in by `reward_manager.source=importlib`: Math-Verify's score, and two that go wrong.

`error` and `length` are rewards that people have written: the first has no lower bound, the second pays for every word.
"""

import re

from gradloc.rewards import math_verify
from lab.experiments.cpu.reward import ArithmeticReward
from verl.trainer.ppo.core_algos import register_adv_est

NUMBER = re.compile(r"\d+")
LONGEST = 240
"""Characters that `length` pays 1 for."""


def error(data_source, solution_str: str, ground_truth: str, extra_info=None, **_) -> float:
    """Minus the squared error of the last number, and of a 0 where there is none.

    >>> error(None, "2 + 2 = 7", "4")
    -9.0
    """
    numbers = NUMBER.findall(solution_str)
    return -((float(numbers[-1] if numbers else 0) - float(ground_truth)) ** 2)


def length(data_source, solution_str: str, ground_truth: str, extra_info=None, **_) -> float:
    """The answer's length in characters, as a share of `LONGEST`."""
    return len(solution_str) / LONGEST


SCORES = {"right": math_verify.score, "error": error, "length": length}


class TaskReward(ArithmeticReward):
    """The demo's reward manager, with another score.

    Args:
        kind: `right` (1 for the right answer, else 0), `error` or `length`.
        kwargs: as `ArithmeticReward`.
    """

    def __init__(self, *args, kind: str = "right", **kwargs):
        super().__init__(*args, **kwargs)
        self.compute_score = SCORES[kind]


@register_adv_est("negative_only")
def negative_only(token_level_rewards, response_mask, **_):
    """-1 on every token of an answer that is not right, 0 on the others: wrong answers are pushed down, none up.

    Args:
        token_level_rewards: (B, T) float; an answer's are its score, in [0, 1].
        response_mask: (B, T), 1 on response tokens.

    Returns:
        Advantages and returns, (B, T) each, the same.
    """
    advantages = (token_level_rewards.sum(-1, keepdim=True) - 1) * response_mask
    return advantages, advantages
