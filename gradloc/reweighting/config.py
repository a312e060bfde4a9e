# SPDX-License-Identifier: Apache-2.0
"""The settings under ``algorithm.advantage_reweighting`` and ``algorithm.lopti``, validated when the run starts."""

from dataclasses import dataclass

from ..checks import SWITCH, checked, number, or_null, require, setting

_QUANTILE = or_null(number("a number between 0 and 1, exclusive", lambda value: 0 < value < 1))


@checked("algorithm.advantage_reweighting")
@dataclass(frozen=True)
class AdvantageReweightingConfig:
    """Advantage Reweighting (arXiv 2505.12929): ``A * (alpha * pi_old + 1 - alpha)``."""

    alpha: float = setting(0.0, number("a number from 0 (off) to 1", lambda value: 0 <= value <= 1))
    """Multiply a token's advantage by alpha * pi_old + 1 - alpha; 0 is off."""


@checked("algorithm.lopti")
@dataclass(frozen=True)
class LoptiConfig:
    """Low-Probability Token Isolation (arXiv 2505.12929): two updates on one rollout, split by probability."""

    enable: bool = setting(False, SWITCH)
    """Update in two stages."""
    eta: float = setting(0.5, number("a number between -1 and 1, exclusive", lambda value: -1 < value < 1))
    """Tokens with pi_old below its absolute value are the low-probability ones. Positive: they are updated first, as
    published; negative: last. 0 leaves the split to ``quantile``, low ones first."""
    quantile: float | None = setting(None, _QUANTILE)
    """Split at this quantile of the batch's pi_old instead."""
    step_lr_each_stage: bool = setting(False, SWITCH)
    """Advance the learning-rate schedule with each stage, as in the original code, instead of once per step."""

    def check(self) -> None:
        """Check that a setting says where to split."""
        expected = "set while algorithm.lopti.eta is 0 (nothing else says where to split)"
        require(self.eta != 0 or self.quantile is not None, "algorithm.lopti.quantile", expected, self.quantile)
