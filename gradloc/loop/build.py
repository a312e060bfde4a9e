# SPDX-License-Identifier: Apache-2.0
"""The localizer with search and gathering behind it, as the settings say: what each adapter hangs on its actor."""

from dataclasses import replace
from functools import partial
from typing import Any

from ..core.ranks import Ranks
from ..search.find import localize
from .gather import raw_event
from .layers import head_square
from .localizer import ActorPowers, Localizer

__all__ = ["build_localizer", "of_critic"]


def of_critic(settings: Any) -> Any:
    """The actor's settings as they hold for the critic: its own action, and nothing that only a replay uses."""
    return replace(
        settings,
        action=replace(settings.action, mode=settings.critic),
        evidence=replace(settings.evidence, bundle="off", checkpoint="off"),
    )


def build_localizer(settings: Any, powers: ActorPowers, ranks: Ranks) -> Localizer:
    """The localizer of one actor.

    Args:
        settings: those that hold, see :func:`~..config.resolve`.
        powers: the actor's.
        ranks: the data-parallel ranks; all of them build their localizers together.
    """
    ranks.connect()
    search = partial(
        localize,
        strategy=settings.search.strategy,
        budget=settings.budget,
        max_culprits=settings.search.max_culprits,
        max_steps=settings.search.max_steps,
        reruns=settings.evidence.rerun,
    )
    gather = partial(raw_event, budget=settings.budget, keeps_all=settings.evidence.bundle == "full")
    return Localizer(powers, ranks, settings.action, search, gather, head_square, settings.search.layer_window)
