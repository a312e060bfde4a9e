# SPDX-License-Identifier: Apache-2.0
"""Answers that the tests of the reward share."""

# Math-Verify parses it in milliseconds; sympy then multiplies it out for longer than anyone waits.
HANGING = r"The answer is $\boxed{9^{9^{9^9}}}$."


def boxed(answer) -> str:
    return r"So the answer is \boxed{" + str(answer) + "}."


def boxed_gold(answer) -> str:
    """What compute_score makes of a ground truth."""
    return r"\boxed{" + str(answer) + "}"


def pids(pool) -> set[int]:
    return {worker._process.pid for worker in filter(None, pool.workers) if worker.is_alive()}
