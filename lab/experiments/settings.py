# SPDX-License-Identifier: Apache-2.0
"""The key=value settings of the demos on other trainers than verl, and of the loops.

Needs no package, so that run_experiment.sh refuses a wrong value before it installs anything.
"""

from dataclasses import dataclass, fields
from typing import Any

from gradloc.checks import POSITIVE, Allowed, check_fields, integer, number, one_of, setting
from lab.experiments.fault_plan import FaultPlan

_MODES = ("observe", "mask", "skip", "abort")
_ANY_NUMBER = Allowed("a number", lambda value: isinstance(value, float))


class Settings:
    """Base of the settings; subclasses are dataclasses whose fields are `setting`s."""

    @classmethod
    def parse(cls, overrides: list[str]) -> Any:
        """Return the settings that key=value texts give.

        Raises:
            SystemExit: for an unknown key or a wrong value, with one sentence.
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
    """Convert a text to its kind; return the text itself if that fails, for `check_fields` to refuse."""
    try:
        return kind(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class DemoSettings(Settings):
    """Settings of every demo."""

    seed: int = setting(1, integer(0))
    """Draws the data, and the damaged token."""
    steps: int = setting(60, integer(1))
    gradloc: str = setting("observe", one_of(*_MODES, "off"))
    first_step: int = setting(40, integer(1))
    last_step: int = setting(55, integer(1))
    """The fault is at one of the steps first_step to last_step, drawn at random."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plan()

    def plan(self) -> FaultPlan:
        return FaultPlan.draw(self.seed, self.first_step, self.last_step)


@dataclass(frozen=True)
class LoopSettings(DemoSettings):
    """Settings of the demo in a plain loop."""

    weight: float = setting(1000.0, _ANY_NUMBER)
    """Loss weight of the damaged token; the others have 1. May be nan."""


@dataclass(frozen=True)
class TrlSettings(DemoSettings):
    """Settings of the demo on TRL."""

    steps: int = setting(8, integer(1))
    gradloc: str = setting("observe", one_of(*_MODES, "heal", "off"))
    first_step: int = setting(3, integer(1))
    last_step: int = setting(6, integer(1))
    advantage: float = setting(300000.0, _ANY_NUMBER)
    """Advantage of the damaged token; a healthy one has about 1. May be nan."""
    tau: float = setting(640.0, POSITIVE)
    """The published per-token threshold."""


@dataclass(frozen=True)
class PretrainSettings(Settings):
    """Settings of the loop that continues pretraining."""

    seed: int = setting(1, integer(0))
    """Draws the documents' order, and which are damaged, and how."""
    steps: int = setting(200, integer(1))
    documents: int = setting(24, integer(1))
    """Size of the corpus, which is read again and again."""
    rows: int = setting(2, integer(1))
    """Documents in a step."""
    tokens: int = setting(64, integer(1))
    """Tokens of a document that are trained on, at most."""
    rate: float = setting(2e-4, POSITIVE)
    peak: float = setting(2.0, number("a number greater than 1", lambda value: value > 1))
    """A norm over this multiple of the usual one is searched."""
    clean: int = setting(60, integer(0))
    """Steps before the first damaged document."""
    every: int = setting(40, integer(1))
    """One document in this number is damaged."""
    threads: int = setting(1, integer(1))
