# SPDX-License-Identifier: Apache-2.0
"""Math-Verify's score of an answer, from processes of its own and under a time limit.

verl's own swallows every error, a missing package included, and scores 0; and it hangs on what a model may write.
"""

from . import math_pool


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **_: object) -> float:
    """Return as verl calls it: ``custom_reward_function.path=pkg://lab.rewards.math_verify``, ``name=score``."""
    return compute_score(solution_str, ground_truth)


def compute_score(
    model_output: str, ground_truth: str, timeout_score: float = 0, timeout_s: float = math_pool.TIMEOUT_S
) -> float:
    """Return 1.0 if Math-Verify finds the last answer equal, else 0.0; ``timeout_score`` if it takes longer."""
    try:
        return math_pool.score("\\boxed{" + ground_truth + "}", model_output, timeout_s)
    except math_pool.ScoringTimeout:
        return timeout_score
    except math_pool.ScoringError:  # counted and logged by the pool
        return 0.0
