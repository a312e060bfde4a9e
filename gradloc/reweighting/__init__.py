# SPDX-License-Identifier: Apache-2.0
"""Advantage Reweighting and Lopti (arXiv 2505.12929): keep low-probability tokens from dominating an update."""

from .advantages import ADVANTAGES_BEFORE_KEY, kept_share, reweight
from .config import AdvantageReweightingConfig, LoptiConfig
from .stages import STAGE_MASK_KEY, Lopti, Stage, split

__all__ = [
    "ADVANTAGES_BEFORE_KEY",
    "STAGE_MASK_KEY",
    "AdvantageReweightingConfig",
    "Lopti",
    "LoptiConfig",
    "Stage",
    "kept_share",
    "reweight",
    "split",
]
