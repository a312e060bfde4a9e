# SPDX-License-Identifier: Apache-2.0
"""Math-Verify's score as the reward, plugged in by `reward_manager.source=importlib`."""

from experiments import math_reward
from experiments.cpu.reward import ArithmeticReward


class TaskReward(ArithmeticReward):
    """The demo's reward manager, with the project's mathematical score: 1 for the right answer, else 0."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.compute_score = math_reward.score
