# SPDX-License-Identifier: Apache-2.0
"""The settings under ``algorithm.advantage_reweighting`` and ``algorithm.lopti``, validated when the run starts."""

from dataclasses import dataclass

from ..checks import is_number, require

__all__ = ["AdvantageReweightingConfig", "LoptiConfig"]


@dataclass(frozen=True)
class AdvantageReweightingConfig:
    """Advantage Reweighting (arXiv 2505.12929): ``A * (alpha * pi_old + 1 - alpha)``."""

    alpha: float = 0.0
    """How much of a token's advantage is scaled by its probability under the old policy; 0 is off, 1 is all of it."""

    def __post_init__(self):
        require(
            is_number(self.alpha) and 0 <= self.alpha <= 1,
            "algorithm.advantage_reweighting.alpha",
            "a number from 0 (off) to 1",
            self.alpha,
        )


@dataclass(frozen=True)
class LoptiConfig:
    """Low-Probability Token Isolation (arXiv 2505.12929): two updates on one rollout, split by probability."""

    enable: bool = False
    """Whether to update in two stages."""
    eta: float = 0.5
    """Tokens with a probability under ``|eta|`` are the low-probability ones. Positive: they are updated first, as
    published; negative: last. 0 leaves the split to ``quantile``, low-probability tokens first."""
    quantile: float | None = None
    """Split at this quantile of the batch's probabilities instead of at ``|eta|``."""
    step_lr_each_stage: bool = False
    """Whether the learning-rate schedule advances with each stage (as in the original code) or once per step."""

    def __post_init__(self):
        for name in ("enable", "step_lr_each_stage"):
            require(
                isinstance(getattr(self, name), bool), f"algorithm.lopti.{name}", "true or false", getattr(self, name)
            )
        require(
            is_number(self.eta) and -1 < self.eta < 1,
            "algorithm.lopti.eta",
            "a number between -1 and 1, exclusive",
            self.eta,
        )
        require(
            self.quantile is None or (is_number(self.quantile) and 0 < self.quantile < 1),
            "algorithm.lopti.quantile",
            "null or a number between 0 and 1, exclusive",
            self.quantile,
        )
        require(
            self.eta != 0 or self.quantile is not None,
            "algorithm.lopti.quantile",
            "set while algorithm.lopti.eta is 0 (nothing else says where to split)",
            self.quantile,
        )
