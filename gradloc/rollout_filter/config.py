# SPDX-License-Identifier: Apache-2.0
"""The settings of the rollout filter, read from the trainer's config and checked at start."""

from dataclasses import dataclass
from typing import Any

from ..checks import is_number, require
from . import rank

__all__ = ["FilterSettings", "read_filter"]

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


@dataclass(frozen=True)
class FilterSettings:
    """Which groups are trained on."""

    strategy: str = "top_p"
    value: float = 1.0
    metric: str = "reward_variance"
    type: str = "largest"
    include_zero: bool = True
    top_p_prob_mode: str = "linear"
    loss_scaling: str = "none"

    def __post_init__(self):
        for name, choices in (
            ("strategy", rank.STRATEGIES),
            ("metric", rank.METRICS),
            ("type", rank.TYPES),
            ("top_p_prob_mode", rank.PROB_MODES),
        ):
            value = getattr(self, name)
            require(value in choices, f"{_ROLLOUT}.rollout_filter_{name}", f"one of {choices}", value)
        value, key = self.value, f"{_ROLLOUT}.rollout_filter_value"
        require(is_number(value) and 0 < value <= 1, key, "a number above 0 and at most 1", value)
        key = f"{_ROLLOUT}.rollout_filter_include_zero"
        require(isinstance(self.include_zero, bool), key, "true or false", self.include_zero)
        key = f"{_ACTOR}.filter_loss_scaling"
        require(self.loss_scaling in rank.SCALINGS, key, f"one of {rank.SCALINGS}", self.loss_scaling)

    @property
    def keeps_all(self) -> bool:
        """Whether the filter is off: the whole of every batch is kept."""
        return self.value == 1 and self.include_zero


def read_filter(config: Any) -> FilterSettings:
    """Read and check the keys, whether or not the filter is on.

    Args:
        config: the trainer's whole config; keys that an older config lacks take their defaults.

    Raises:
        ValueError: one sentence that names the key, what it must be and what was found.
    """
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    names = ("strategy", "value", "metric", "type", "include_zero", "top_p_prob_mode")
    given = {name: rollout.get(f"rollout_filter_{name}", getattr(FilterSettings, name)) for name in names}
    settings = FilterSettings(loss_scaling=actor.get("filter_loss_scaling", "none"), **given)
    is_async = (config.get("reward_model") or {}).get("launch_reward_fn_async", False)  # verl 0.7.1 has neither
    require(
        settings.keeps_all or not is_async,
        "reward_model.launch_reward_fn_async",
        f"false while {_ROLLOUT}.rollout_filter_* drops groups, since the filter needs the rewards at once",
        is_async,
    )
    return settings
