# SPDX-License-Identifier: Apache-2.0
"""A state for each step, with its reasons: the rules, asked step by step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..explain.numbers import number, percent
from .config import FALLING, HealthConfig
from .measures import Measure, Reading
from .rules import MEASURES, READ, RULES, Rule

STATES = ("healthy", "warning", "danger")
"""From best to worst; the trackers get the index."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a step is not healthy."""

    rule: Rule
    state: str
    """``warning`` or ``danger``."""
    metric: str
    limit: float
    reading: Reading
    config: HealthConfig = field(repr=False)
    note: str = ""
    """A sentence behind the rule's own."""

    @property
    def name(self) -> str:
        """The rule's name, which is also its setting under ``trainer.health``."""
        return self.rule.name

    @property
    def found(self) -> float:
        """The measured number, in the unit of the limit: a value, a share, a multiple, or steps in a row."""
        return self.reading.found

    @property
    def sentence(self) -> str:
        """Say what was found, in numbers."""
        numbers = {**self.reading._asdict(), "limit": self.limit}
        count = self.found - 1 if self.rule.measured == "streak" else 0
        before = "step" if count == 1 else f"{count:,.0f} steps"
        sentence = self.rule.sentence.format(
            metric=self.metric,
            recent=self.config.recent,
            clip_window=self.config.clip_window,
            in_a_row=f" now and at the {before} before" if count else "",
            least="a single step is" if self.limit == 1 else f"{number(self.limit)} in a row are",
            a_state=self.state if self.state == STATES[-1] else f"a {self.state}",
            s="" if self.found == 1 else "s",
            percent=percent(self.found),
            percent_limit=percent(self.limit),
            **{name: number(value, 3, "unknown") for name, value in numbers.items()},
        )
        return f"{sentence} {self.note}" if self.note else sentence

    def facts(self) -> dict[str, Any]:
        """Return what an export holds."""
        return {name: getattr(self, name) for name in ("name", "state", "metric", "found", "limit", "sentence")}


@dataclass(frozen=True)
class Judgement:
    """The judgement of one step."""

    step: int
    reasons: tuple[Reason, ...]
    """Worst first, then in the order of the rules."""

    @property
    def state(self) -> str:
        return self.reasons[0].state if self.reasons else STATES[0]


class _ActiveRule:
    """A rule that is on, with its measure of the run.

    Args:
        limits: the states that the rule may find with their limits, the worst first.
    """

    def __init__(self, rule: Rule, measure: Measure, limits: list[tuple[str, float]]):
        self.rule, self.measure, self.limits = rule, measure, limits
        self.num_values = 0

    def exceeded(self, reading: Reading) -> tuple[str, float] | None:
        """Return the first state whose limit is exceeded, and the limit."""
        for state, limit in self.limits:
            is_beyond = reading.found < limit if self.rule.name in FALLING else reading.found > limit
            if is_beyond or (reading.found == limit and not self.rule.is_strict):
                return state, limit
        return None


class Judge:
    """Judges a run's steps one after the other.

    ``grad_clip`` is the norm that gradients are clipped to; None without such a limit.
    """

    def __init__(self, config: HealthConfig, grad_clip: float | None = None):
        self.config = config
        self._last_step: int | None = None
        self.read: dict[str, None] = {}
        """The metrics that rules have read, in order."""
        self._active: list[_ActiveRule] = []
        for rule in RULES:
            limits = [*zip(STATES[1:], getattr(config, rule.name) or (None, None), strict=True)]
            known = [(state, limit) for state, limit in reversed(limits) if limit is not None]
            if known and (measure := MEASURES[rule.measured](config, grad_clip)) is not None:
                self._active.append(_ActiveRule(rule, measure, known))

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
            for active in self._active:
                active.measure.resume()
        self._last_step = step
        known = ((name, _number(metrics[name])) for name in READ if name in metrics)
        numbers = {name: value for name, value in known if value is not None}
        reasons, is_judged = [], False
        for active in self._active:
            if (read := active.rule.read(numbers)) is None:
                continue
            is_judged = True
            active.num_values += 1
            metric, value = read
            self.read[metric] = None
            reading = active.measure.observe(value)
            found = None if reading is None else active.exceeded(reading)
            if reading is not None and found is not None:
                reasons.append(Reason(active.rule, found[0], metric, found[1], reading, self.config))
            active.measure.learn(value, found is not None)
        return Judgement(step, worst_first(reasons)) if is_judged else None

    @property
    def heard(self) -> tuple[str, ...]:
        """The rules that had a value."""
        return tuple(active.rule.name for active in self._active if active.num_values)

    @property
    def judging(self) -> tuple[str, ...]:
        """The rules that had as many values as they need before they say anything."""
        return tuple(active.rule.name for active in self._active if active.num_values >= active.measure.needs)

    def state(self) -> dict[str, Any]:
        """Return the content for the checkpoint, ready for JSON."""
        return {
            "last_step": self._last_step,
            "rules": {active.rule.name: active.measure.state() for active in self._active},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned; a rule that it lacks begins anew."""
        for active in self._active:
            if active.rule.name in state["rules"]:
                active.measure.load_state(state["rules"][active.rule.name])
        self._last_step = state["last_step"]


def worst_first(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """Sort reasons by their states; those of one state stay in order."""
    return tuple(sorted(reasons, key=lambda reason: -STATES.index(reason.state)))


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor of several numbers
        return None
