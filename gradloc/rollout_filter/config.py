# SPDX-License-Identifier: Apache-2.0
"""The settings of the rollout filter, read from the trainer's config and checked at start."""

from dataclasses import dataclass
from typing import Any

from ..checks import SWITCH, check_fields, number, one_of, read_among, require, setting
from . import rank

_FILTER, _ACTOR = "actor_rollout_ref.rollout.rollout_filter", "actor_rollout_ref.actor"
_SHARE = number("a number above 0 and at most 1", lambda value: 0 < value <= 1)


@dataclass(frozen=True)
class FilterSettings:
    """Which groups are trained on."""

    strategy: str = setting("top_p", one_of(*rank.STRATEGIES), f"{_FILTER}_strategy")
    value: float = setting(
        1.0, number("a number above 0 and at most 1", lambda value: 0 < value <= 1), f"{_FILTER}_value"
    )
    metric: str = setting("reward_variance", one_of(*rank.METRICS), f"{_FILTER}_metric")
    type: str = setting("largest", one_of(*rank.TYPES), f"{_FILTER}_type")
    include_zero: bool = setting(True, SWITCH, f"{_FILTER}_include_zero")
    top_p_prob_mode: str = setting("linear", one_of(*rank.PROB_MODES), f"{_FILTER}_top_p_prob_mode")
    loss_scaling: str = setting("none", one_of(*rank.SCALINGS), f"{_ACTOR}.filter_loss_scaling")

    def __post_init__(self):
        check_fields(self)

    @property
    def keeps_all(self) -> bool:
        """Whether the filter is off: the whole of every batch is kept."""
        return self.value == 1 and self.include_zero


def read_filter(config: Any) -> FilterSettings:
    """Read and check the keys, whether or not the filter is on; those that an older config lacks take their defaults.

    Raises:
        ValueError: one sentence that names the key, what it must be and what was found.
    """
    settings = read_among(FilterSettings, config)
    is_async = (config.get("reward_model") or {}).get("launch_reward_fn_async", False)  # verl 0.7.1 has neither
    require(
        settings.keeps_all or not is_async,
        "reward_model.launch_reward_fn_async",
        f"false while {_FILTER}_* drops groups, since the filter needs the rewards at once",
        is_async,
    )
    return settings
