# SPDX-License-Identifier: Apache-2.0
"""Is the run well? States and reasons from the metrics that it logs.

Plain rules over numbers, with nothing but the standard library: the trainer's ``monitor`` asks them at each step, and
``gradloc health`` asks the very same code later, from a run's metrics alone.
"""

from .config import HealthConfig
from .judge import STATES, Judge, Judgement, Reason

__all__ = ["STATES", "HealthConfig", "Judge", "Judgement", "Reason"]
