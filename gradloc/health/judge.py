# SPDX-License-Identifier: Apache-2.0
"""A state for each step, with its reasons: the rules, asked step by step."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..explain.advice import actions_of
from ..explain.numbers import number, percent
from .config import FALLING, HealthConfig
from .measures import Reading, Window
from .rules import ADVICE, MEASURES, RULES, Rule

STATES = ("healthy", "warning", "danger")
"""From best to worst; the trackers get the index."""


@dataclass(frozen=True)
class Reason:
    """Why a step is not healthy."""

    name: str
    """The rule's name, which is also its setting under ``trainer.health``."""
    state: str
    """``warning`` or ``danger``."""
    metric: str
    found: float
    """The measured number, in the unit of the limit: a value, a share, a multiple, or steps in a row."""
    limit: float
    sentence: str

    def advice(self, trainer: str | None = None, settings: Mapping[str, Any] | None = None) -> list[tuple[str, str]]:
        """Return what people do about it on this trainer, else on any verl: pairs of a sentence and config lines.

        ``settings`` are the run's own, by verl's names: what they have already is left out.
        """
        return actions_of(ADVICE[self.name], trainer, settings)


@dataclass(frozen=True)
class Judgement:
    """The judgement of one step."""

    step: int
    reasons: tuple[Reason, ...]
    """Worst first, then in the order of the rules."""

    @property
    def state(self) -> str:
        return self.reasons[0].state if self.reasons else STATES[0]


class Judge:
    """Judges a run's steps one after the other.

    ``grad_clip`` is the norm that gradients are clipped to; None without such a limit.
    """

    def __init__(self, config: HealthConfig, grad_clip: float | None = None):
        self.config = config
        self._last_step: int | None = None
        self.heard: Counter[str] = Counter()
        """How many values came for each rule."""
        self.read: dict[str, None] = {}
        """The metrics that rules have read, in order."""
        self._asked: list[tuple[Rule, Window]] = []
        for rule in RULES:
            is_on = getattr(config, rule.name) is not None
            if is_on and (measure := MEASURES[rule.measured](config, grad_clip)) is not None:
                self._asked.append((rule, measure))

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Judgement | None:
        """Judge a step.

        Args:
            step: the trainer's. One that is not after the last was repeated by a resumed run: what is said of
                consecutive steps begins anew, what was learned about the run stays.
            metrics: as verl logs them; those that are missing, no numbers, NaN or infinite are left to the rule for
                non-finite ones.

        Returns:
            None for a step that has none of the metrics that the rules read.
        """
        if self._last_step is not None and step <= self._last_step:
            for _, measure in self._asked:
                measure.resume()
        self._last_step = step
        numbers = {name: known for name, value in metrics.items() if (known := _number(value)) is not None}
        reads = [(rule, measure, rule.reads(numbers)) for rule, measure in self._asked]
        known = [(rule, measure, *read) for rule, measure, read in reads if read is not None]
        self.heard.update(rule.name for rule, *_ in known)
        self.read.update(dict.fromkeys(metric for *_, metric, _ in known))
        reasons = [reason for each in known if (reason := self._ask(*each)) is not None]
        worst_first = sorted(reasons, key=lambda reason: -STATES.index(reason.state))
        return Judgement(step, tuple(worst_first)) if known else None

    @property
    def judging(self) -> tuple[str, ...]:
        """The rules that had as many values as they need before they say anything."""
        return tuple(rule.name for rule, measure in self._asked if self.heard[rule.name] >= measure.needs)

    def state(self) -> dict[str, Any]:
        """JSON-ready content, for the checkpoint."""
        return {"last_step": self._last_step, "rules": {rule.name: measure.state() for rule, measure in self._asked}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` gave; a rule that it does not know begins anew."""
        for rule, measure in self._asked:
            if rule.name in state["rules"]:
                measure.load_state(state["rules"][rule.name])
        self._last_step = state["last_step"]

    def _ask(self, rule: Rule, measure: Window, metric: str, value: float) -> Reason | None:
        reading = measure.observe(value)
        reason = None if reading is None else self._compare(rule, metric, reading)
        measure.learn(value, reason is not None)
        return reason

    def _compare(self, rule: Rule, metric: str, reading: Reading) -> Reason | None:
        for state, limit in zip(STATES[:0:-1], getattr(self.config, rule.name)[::-1], strict=True):
            if limit is None:
                continue
            excess = limit - reading.found if rule.name in FALLING else reading.found - limit
            if excess > 0 or (excess == 0 and not rule.is_strict):
                numbers = {"found": reading.found, "limit": limit, "value": reading.value, "typical": reading.typical}
                sentence = rule.sentence.format(
                    metric=metric,
                    recent=self.config.recent,
                    clip_window=self.config.clip_window,
                    percent=percent(reading.found),
                    percent_limit=percent(limit),
                    **{name: number(value, 3, "unknown") for name, value in numbers.items()},
                )
                return Reason(rule.name, state, metric, reading.found, limit, sentence)
        return None


def _number(value: Any) -> float | None:
    if type(value) is float:
        return value
    try:
        return None if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor of several numbers
        return None
