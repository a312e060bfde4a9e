# SPDX-License-Identifier: Apache-2.0
"""GradLoc on TRL: ``from gradloc.trl import GRPOTrainer`` in the place of ``from trl import GRPOTrainer``."""

from .adapters.trl.trainer import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
    attach,
)
from .config import GradLocConfig

__all__ = ["DPOConfig", "DPOTrainer", "GRPOConfig", "GRPOTrainer", "GradLocConfig", "RLOOConfig", "RLOOTrainer"]
__all__ += ["SFTConfig", "SFTTrainer", "attach"]
