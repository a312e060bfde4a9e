# SPDX-License-Identifier: Apache-2.0
"""Advantage Reweighting and Lopti (arXiv 2505.12929): keep low-probability tokens from dominating an update."""

from .config import AdvantageReweightingConfig, LoptiConfig

__all__ = ["AdvantageReweightingConfig", "LoptiConfig"]
