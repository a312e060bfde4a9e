# SPDX-License-Identifier: Apache-2.0
"""What each cause means and what people do about it; all of it is data, in assets/advice.json."""

import functools
import json
from dataclasses import dataclass
from importlib import resources


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


def of(label: str) -> Advice:
    """The advice for a cause; for an unknown label, what is said when nothing stands out."""
    return load().get(label) or load()["unknown"]
