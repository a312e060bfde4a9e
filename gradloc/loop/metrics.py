# SPDX-License-Identifier: Apache-2.0
"""How each of our metrics is joined where one step of the trainer has several updates: the only place that says it."""

import math
from collections.abc import Mapping, Sequence

__all__ = ["is_ours", "joined", "size"]

_ADDED = frozenset("spikes unwritten mask skip abort masked_tokens events culprits explained probes seconds".split())
_LARGEST = frozenset("head_grad_norm norm_after failures write_failures grad_norm_max".split())
_OF_NEAREST = frozenset("threshold norm_over_threshold clip_scale culprit_share healthy_norm".split())
"""Of the update whose norm came nearest to its threshold, so that they are of one and the same."""


def is_ours(name: str) -> bool:
    """Whether this metric is joined by these rules."""
    return _plain(name) in _ADDED | _LARGEST | _OF_NEAREST


def joined(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One value of each metric for a step.

    Args:
        updates: the metrics of each update, in their order. Of a name that has no rule here the last one stays.
    """
    (nearest,) = {name for found in updates for name in found if _plain(name) == "norm_over_threshold"} or {""}
    nearest_last = sorted(updates, key=lambda found: size(found.get(nearest, 0.0)))
    known = {name: value for found in updates for name, value in found.items()}
    for name in known:
        values = [found[name] for found in updates if name in found]
        if _plain(name) in _ADDED:
            known[name] = sum(values)
        elif _plain(name) in _LARGEST:
            known[name] = max(values, key=size)
        elif _plain(name) in _OF_NEAREST:
            known[name] = [found[name] for found in nearest_last if name in found][-1]
    return known


def size(value: float) -> float:
    """What a metric is compared by: NaN is larger than any number."""
    return math.inf if value != value else value


def _plain(name: str) -> str:
    """Without whose it is: ``gradloc/critic_spikes`` and ``gradloc/spikes`` are joined alike."""
    room, _, rest = name.partition("/")
    return rest.removeprefix("critic_") if room in ("gradloc", "actor", "critic") else name
