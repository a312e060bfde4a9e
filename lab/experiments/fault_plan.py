# SPDX-License-Identifier: Apache-2.0
"""Decide which token a demo damages, and record it. Needs no package."""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FaultPlan:
    """The place of a demo's fault, drawn before its batch exists."""

    seed: int
    step: int
    """Training step, counted from 1 as verl does."""
    sequence: float
    """In [0, 1): entry floor(sequence * B) of the B rows that have an eligible token."""
    position: float
    """In [0, 1): entry floor(position * L) of that row's L eligible tokens."""

    @classmethod
    def draw(cls, seed: int, first_step: int, last_step: int) -> "FaultPlan":
        """Draw a plan, the same on every machine; both steps are inclusive.

        Raises:
            ValueError: if the range of steps is empty.
        """
        if first_step > last_step:
            raise ValueError(f"last_step must be at least first_step ({first_step}), found {last_step}.")
        source = random.Random(f"gradloc demo fault {seed}")  # a string: its hash() would differ between processes
        return cls(seed, source.randint(first_step, last_step), source.random(), source.random())

    def locate(self, eligible: Any) -> tuple[int, int]:
        """Return the row and the position of the damaged token.

        Args:
            eligible: tensor (B, T), not 0 for tokens that may be damaged; at least one is.
        """
        rows = (eligible != 0).any(-1).nonzero().flatten().tolist()
        row = rows[int(self.sequence * len(rows))]
        positions = eligible[row].nonzero().flatten().tolist()
        return row, positions[int(self.position * len(positions))]

    def write(self, path: Path, **facts: Any) -> None:
        """Write the plan as JSON, with facts about the damaged token such as its `row` and `position`."""
        record = {"seed": self.seed, "plan": asdict(self), "step": self.step, **facts}
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
