# SPDX-License-Identifier: Apache-2.0
"""Where a demo's fault goes, drawn from a seed: for every trainer. Standard library only."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class FaultPlan:
    """Where the fault goes, before the batch it goes into exists."""

    step: int
    """The training step, counted from 1 as verl does."""
    sequence: float
    """Which sequence, in [0, 1): row floor(sequence * B) of the batch as the estimator sees it."""
    position: float
    """Which response token, in [0, 1): token floor(position * L) of that row's L tokens."""


def draw(seed: int, first_step: int, last_step: int) -> FaultPlan:
    """The plan for a seed: the same on every machine; steps are inclusive.

    Raises:
        ValueError: if the range of steps is empty.
    """
    if first_step > last_step:
        raise ValueError(f"last_step must be at least first_step ({first_step}), found {last_step}.")
    # Text, not hash(): the same in every process and every Python.
    source = random.Random(f"gradloc demo fault {seed}")
    return FaultPlan(source.randint(first_step, last_step), source.random(), source.random())
