# SPDX-License-Identifier: Apache-2.0
"""Where a demo's fault goes, and what the demos on other trainers than verl, and the loops, take as key=value.

Needs no package, so that run_experiment.sh refuses a wrong value before anything is made for it.
"""

import random
from dataclasses import dataclass, fields
from typing import Any

from gradloc.checks import POSITIVE, Allowed, check_fields, integer, number, one_of, setting

_MODES = ("observe", "mask", "skip", "abort")
_ANY_NUMBER = Allowed("a number", lambda value: isinstance(value, float))


@dataclass(frozen=True)
class FaultPlan:
    """Where the fault goes, before the batch it goes into exists."""

    step: int
    """The training step, counted from 1 as verl does."""
    sequence: float
    """Which sequence, in [0, 1): row floor(sequence * B) of the batch as the estimator sees it."""
    position: float
    """Which response token, in [0, 1): token floor(position * L) of that row's L tokens."""


def draw(seed: int, first_step: int, last_step: int) -> FaultPlan:
    """The plan for a seed: the same on every machine; steps are inclusive.

    Raises:
        ValueError: if the range of steps is empty.
    """
    if first_step > last_step:
        raise ValueError(f"last_step must be at least first_step ({first_step}), found {last_step}.")
    # Text, not hash(): the same in every process and every Python.
    source = random.Random(f"gradloc demo fault {seed}")
    return FaultPlan(source.randint(first_step, last_step), source.random(), source.random())


class Settings:
    """Subclasses are dataclasses whose fields are `setting`s."""

    @classmethod
    def parse(cls, overrides: list[str]) -> Any:
        """From key=value.

        Raises:
            SystemExit: one sentence, for a key that there is not, or a wrong value.
        """
        kinds = {field.name: type(field.default) for field in fields(cls)}
        pairs = [text.partition("=")[::2] for text in overrides]
        wrong = next((key for key, _ in pairs if key not in kinds), None)
        if wrong is not None:
            raise SystemExit(f"{wrong} is nothing that this demo takes: there are {', '.join(kinds)}.")
        try:
            return cls(**{key: _read(kinds[key], value) for key, value in pairs})
        except ValueError as error:
            raise SystemExit(str(error)) from None

    def __post_init__(self) -> None:
        check_fields(self)


def _read(kind: type, text: str) -> Any:
    """The value that a text is of; the text itself where it is none, for `check_fields` to refuse."""
    try:
        return kind(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class DemoSettings(Settings):
    """What each demo has."""

    seed: int = setting(1, integer(0))
    """Draws what is damaged and where, and the data."""
    steps: int = setting(60, integer(1))
    gradloc: str = setting("observe", one_of(*_MODES, "off"))
    first_step: int = setting(40, integer(1))
    last_step: int = setting(55, integer(1))
    """The fault is at one of these steps, drawn at random like its place."""

    def __post_init__(self) -> None:
        super().__post_init__()
        draw(self.seed, self.first_step, self.last_step)


@dataclass(frozen=True)
class LoopSettings(DemoSettings):
    """Of the demo in a plain loop."""

    weight: float = setting(1000.0, _ANY_NUMBER)
    """Loss weight of the damaged token; the others have 1. May be nan."""


@dataclass(frozen=True)
class TrlSettings(DemoSettings):
    """Of the demo on TRL."""

    steps: int = setting(8, integer(1))
    gradloc: str = setting("observe", one_of(*_MODES, "heal", "off"))
    first_step: int = setting(3, integer(1))
    last_step: int = setting(6, integer(1))
    advantage: float = setting(300000.0, _ANY_NUMBER)
    """Of the damaged token; a healthy one has about 1. May be nan."""
    tau: float = setting(640.0, POSITIVE)
    """The published per-token threshold."""


@dataclass(frozen=True)
class PretrainSettings(Settings):
    """Of the loop that goes on pretraining."""

    seed: int = setting(1, integer(0))
    """Draws the documents' order, which are damaged, and how."""
    steps: int = setting(200, integer(1))
    documents: int = setting(24, integer(1))
    """Of the corpus, which is read again and again."""
    rows: int = setting(2, integer(1))
    """Documents of a step."""
    tokens: int = setting(64, integer(1))
    """Trained on of a document, at most."""
    rate: float = setting(2e-4, POSITIVE)
    peak: float = setting(2.0, number("a number greater than 1", lambda value: value > 1))
    """A norm over this many times the usual one is looked into."""
    clean: int = setting(60, integer(0))
    """Steps before the first damaged document."""
    every: int = setting(40, integer(1))
    """One in so many documents is damaged."""
    threads: int = setting(1, integer(1))
