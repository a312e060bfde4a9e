# SPDX-License-Identifier: Apache-2.0
"""verl's own math-verify scoring, in the form that `custom_reward_function` wants."""

# verl.utils.reward_score.math_verify catches every exception and scores 0, the missing package
# included: importing it here turns a run of zero rewards into an error at start.
import math_verify  # noqa: F401

from verl.utils.reward_score.math_verify import compute_score


def score(data_source, solution_str: str, ground_truth: str, extra_info=None, **_) -> float:
    """1.0 when the last boxed or plain answer equals the ground truth, else 0.0."""
    return float(compute_score(solution_str, ground_truth))
