# SPDX-License-Identifier: Apache-2.0
"""The settings of the rollout filter, read from the trainer's config and checked at start."""

from dataclasses import dataclass
from typing import Any

from ..checks import SWITCH, checked, number, one_of, read_from_trainer, require, setting

_FILTER, _ACTOR = "actor_rollout_ref.rollout.rollout_filter", "actor_rollout_ref.actor"
_SHARE = number("a number above 0 and at most 1", lambda value: 0 < value <= 1)


@checked(_FILTER)
@dataclass(frozen=True)
class FilterSettings:
    """The groups to train on."""

    strategy: str = setting("top_p", one_of("top_p", "top_k"), f"{_FILTER}_strategy")
    """``top_p``: the best groups that together reach a share of the total score. ``top_k``: a share of the groups,
    int(value * groups), at least one."""
    value: float = setting(1.0, _SHARE, f"{_FILTER}_value")
    """The share of the total score (``top_p``) or of the groups (``top_k``). With 1 and ``rollout_filter_include_zero``
    the filter is off."""
    metric: str = setting("reward_variance", one_of("reward_variance", "reward", "length"), f"{_FILTER}_metric")
    """A group's score: the standard deviation of its rewards, their mean (``reward``), or its mean response
    ``length``."""
    type: str = setting("largest", one_of("largest", "smallest"), f"{_FILTER}_type")
    """Which scores come first."""
    include_zero: bool = setting(True, SWITCH, f"{_FILTER}_include_zero")
    """Whether groups whose rewards are all equal may be kept."""
    top_p_prob_mode: str = setting("linear", one_of("linear", "softmax"), f"{_FILTER}_top_p_prob_mode")
    """The numbers that ``top_p`` adds up: the scores, or their softmax."""
    loss_scaling: str = setting("none", one_of("none", "linear", "sqrt"), f"{_ACTOR}.filter_loss_scaling")
    """Advantages of a filtered batch times the share of rows kept (``linear``) or its root (``sqrt``)."""

    @property
    def keeps_all(self) -> bool:
        """Whether the filter is off: every batch is kept whole."""
        return self.value == 1 and self.include_zero


def read_filter(config: Any) -> FilterSettings:
    """Read and check the keys, whether or not the filter is on, see :func:`~..checks.read_from_trainer`."""
    settings = read_from_trainer(FilterSettings, config)
    is_async = (config.get("reward_model") or {}).get("launch_reward_fn_async", False)
    require(
        settings.keeps_all or not is_async,
        "reward_model.launch_reward_fn_async",
        f"false while {_FILTER}_* drops groups, since the filter needs the rewards at once",
        is_async,
    )
    return settings
