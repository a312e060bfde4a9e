# SPDX-License-Identifier: Apache-2.0
"""What each cause means and what people do about it, data in assets/advice.json; and what lets a search go on."""

import functools
import json
from dataclasses import dataclass, replace
from importlib import resources

from ...words.settings import setting_of

MORE_STEPS = ["Let the search cost more updates.", "actor_rollout_ref.actor.gradloc.search.max_steps=8"]
MORE_PROBES = ["Give the search more probes.", "actor_rollout_ref.actor.bisect_budget_steps=512"]
"""What lets a search go on: the published bisection alone counts probes."""


@dataclass(frozen=True)
class Advice:
    """One cause."""

    title: str
    means: str
    advice: list[list[str]]
    """Pairs: what to do, and the Hydra override that does it."""


@functools.cache
def load() -> dict[str, Advice]:
    """Every cause's advice, by the cause's label."""
    text = resources.files("gradloc.report").joinpath("assets/advice.json").read_text(encoding="utf-8")
    return {label: Advice(**entry) for label, entry in json.loads(text).items()}


def more_search(strategy: str) -> list[str]:
    """What lets a search with this strategy go on, and the override that does it."""
    return MORE_PROBES if strategy == "bisect" else MORE_STEPS


def of(label: str, strategy: str = "", trainer: str | None = None) -> Advice:
    """The advice for a cause; for an unknown label, what is said when nothing stands out.

    Args:
        label: the cause's.
        strategy: the search's, which says what limits it.
        trainer: the run's, in whose settings the advice is said; None for verl.
    """
    found = load().get(label) or load()["unknown"]
    pairs = [more_search(strategy) if pair == MORE_STEPS else pair for pair in found.advice]
    said = [[what, setting] for what, line in pairs if (setting := setting_of(trainer, line)) is not None]
    return found if said == found.advice else replace(found, advice=said)
