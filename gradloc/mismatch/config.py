# SPDX-License-Identifier: Apache-2.0
"""The settings under ``actor.gradloc.mismatch``, validated when the run starts."""

from dataclasses import dataclass

from ..checks import checked, integer, setting


@checked("actor_rollout_ref.actor.gradloc.mismatch")
@dataclass(frozen=True)
class MismatchConfig:
    """Whether the log-probs of the rollout engine and of the trainer are compared while a run trains."""

    every: int = setting(0, integer(0))
    """Name why rollout and trainer log-probs differ, every this many steps; 0: never."""
