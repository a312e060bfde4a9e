# SPDX-License-Identifier: Apache-2.0
"""Advantage Reweighting and Lopti (arXiv 2505.12929): keep low-probability tokens from dominating an update."""

from .advantages import kept_share, reweight
from .config import AdvantageReweightingConfig, LoptiConfig
from .stages import STAGE_MASK_KEY, Lopti, Stage, split

__all__ = [
    "STAGE_MASK_KEY",
    "AdvantageReweightingConfig",
    "Lopti",
    "LoptiConfig",
    "Stage",
    "kept_share",
    "reweight",
    "split",
]
