# SPDX-License-Identifier: Apache-2.0
"""GradLoc on TRL: ``from gradloc.trl import GRPOTrainer`` in the place of ``from trl import GRPOTrainer``."""

from .adapters.trl.trainer import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, attach
from .config import GradLocConfig

__all__ = ["GRPOConfig", "GRPOTrainer", "GradLocConfig", "RLOOConfig", "RLOOTrainer", "attach"]
