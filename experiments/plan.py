# SPDX-License-Identifier: Apache-2.0
"""Where a demo's fault goes, drawn from a seed, and its settings: for every trainer. Standard library only."""

import random
from dataclasses import dataclass, fields


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
        raise ValueError(f"the fault needs a step between {first_step} and {last_step}: none is")
    # Text, not hash(): the same in every process and every Python.
    source = random.Random(f"gradloc demo fault {seed}")
    return FaultPlan(source.randint(first_step, last_step), source.random(), source.random())


class Settings:
    """A demo's settings: subclasses are dataclasses whose fields have defaults."""

    @classmethod
    def parse(cls, overrides: list[str]) -> "Settings":
        """From key=value.

        Raises:
            SystemExit: one sentence, for a key that there is not.
        """
        kinds = {field.name: type(field.default) for field in fields(cls)}
        pairs = [text.partition("=")[::2] for text in overrides]
        wrong = next((key for key, _ in pairs if key not in kinds), None)
        if wrong is not None:
            raise SystemExit(f"{wrong} is nothing that this demo takes: there are {', '.join(kinds)}.")
        return cls(**{key: kinds[key](value) for key, value in pairs})
