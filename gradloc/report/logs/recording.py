# SPDX-License-Identifier: Apache-2.0
"""The result of every reader: rows of numbers in the order of writing, and a run's metrics by step."""

import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from ...record.files import CELLS, NAME

MEAN = "actor/grad_norm"
MAX = "actor/grad_norm_max"

Row = tuple[int, dict[str, float]]
"""A training step and what was logged for it. A step may come again: a resumed run logs it twice."""


OF_WATCH = "gradloc.Watch's metrics"
"""Title of the file that ``gradloc.Watch`` writes beside a loop."""

SKIPPED = "skipped in all"
"""Metric: how many steps a trainer has skipped so far."""

READ_IN_ORDER = "rows are numbered in the order they were read, from 1."
"""End of the note on a log that gives no step numbers, or none that it keeps to."""


@dataclass(frozen=True)
class Skip:
    """An optimizer step that the trainer says it skipped."""

    step: int | None
    """None where nothing says it."""
    is_after: bool
    """Whether it came after that step, rather than at it."""
    is_overflow: bool = False
    """Whether fp16's loss scaler skipped it."""
    before: float | None = None
    """The loss scale at which it overflowed."""
    scale: float | None = None
    """The loss scale with which it went on."""
    is_lost: bool = False
    """Whether a norm that is not finite is given as the reason."""
    is_end: bool = False
    """Whether the loss scale can fall no further."""
    is_nan_loss: bool = False
    """Whether the line says that the loss was NaN, and not that the step was skipped."""
    row: int | None = None
    """The place of the row that it came after; -1 before the first; None where that is not known."""


@dataclass
class Recording:
    """One run as one file, folder or database holds it."""

    source: str
    """The file's or folder's name."""
    format: str = ""
    """The name of the program or logger that wrote it."""
    run: str = ""
    """The run's name, where the source says one."""
    process: str = ""
    """The process, in a log that several print into; a resumed run is another process."""
    rows: list[Row] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    """The run's settings by their dotted names, where the source holds them."""
    notes: list[str] = field(default_factory=list)
    """A sentence for each thing that could not be read, or had to be guessed."""
    verdicts: list[str] = field(default_factory=list)
    """GradLoc's sentences about its events."""
    folder: Path | None = None
    """The source's folder; None for standard input."""
    receipt: str = ""
    """How much of the file was read."""
    unit: str = "step"
    """What its steps count: ``step``; ``row`` where the log gives none; ``batch``, ``sample`` or ``epoch``."""
    skips: list[Skip] = field(default_factory=list)
    """Steps that the trainer says it skipped."""
    saved: dict[int, str] = field(default_factory=dict)
    """The checkpoints that the trainer says it saved, by step."""


def gather(values: Iterable[tuple[int, str, float]]) -> list[Row]:
    """Return rows from single values in the order in which they were written.

    >>> gather([(1, "a", 0.5), (1, "b", 2.0), (2, "a", 0.25), (1, "a", 4.0)])
    [(1, {'a': 0.5, 'b': 2.0}), (2, {'a': 0.25}), (1, {'a': 4.0})]
    """
    rows: list[Row] = []
    for step, name, value in values:
        if not rows or rows[-1][0] != step or name in rows[-1][1]:
            rows.append((step, {}))
        rows[-1][1][name] = value
    return rows


def flat(settings: Any, prefix: str = "", made: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return nested settings by their dotted names, added to ``made``.

    >>> flat({"actor": {"optim": {"lr": 1e-06}}, "n": [1]})
    {'actor.optim.lr': 1e-06, 'n': [1]}
    """
    made = {} if made is None else made
    if isinstance(settings, dict) and len(prefix) <= NAME:
        for key, value in settings.items():
            flat(value, f"{prefix}.{key}" if prefix else str(key), made)
    elif 0 < len(prefix) <= NAME:
        made[prefix] = settings
    return made


@dataclass
class Metrics:
    """Metrics over steps, ascending."""

    source: str = ""
    """The file's or folder's name."""
    steps: list[int] = field(default_factory=list)
    series: dict[str, Sequence[float | None]] = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)
    """verl's name -> the log's own, for metrics that go by both."""
    verdicts: list[str] = field(default_factory=list)
    """GradLoc's sentences about its events."""
    unit: str = "step"
    """What the steps count, see :class:`Recording`."""

    def __bool__(self) -> bool:
        return bool(self.steps)

    def get(self, name: str) -> Sequence[float | None]:
        """Return the values of one metric, one per step; all None when there is no such metric."""
        return self.series.get(name) or [None] * len(self.steps)

    def logged(self, name: str) -> list[tuple[int, float]]:
        """Return the steps that have one metric, and its values."""
        pairs = zip(self.steps, self.series.get(name, ()), strict=False)
        return [(step, value) for step, value in pairs if value is not None]

    def known(self, name: str) -> list[tuple[int, float]]:
        """Return the steps and values at which one metric is finite, in order."""
        return [(step, value) for step, value in self.logged(name) if math.isfinite(value)]

    def has(self, name: str) -> bool:
        """Return whether any step has this metric."""
        return any(value is not None for value in self.series.get(name, ()))

    def first(self, names: Iterable[str]) -> str:
        """Return the first of these metrics that is not logged as seldom as a summary; empty where none is logged."""
        counts = {name: len(self.logged(name)) for name in names if self.has(name)}
        most = max(counts.values(), default=0)
        return next((name for name, count in counts.items() if 4 * count >= most and (count > 1 or most < 3)), "")

    def own(self, name: str) -> str:
        """Return the log's own name of a metric."""
        return self.called.get(name, name)

    def finite(self, name: str) -> list[float]:
        """Return the finite values of one metric, in order."""
        return [value for value in self.series.get(name, ()) if value is not None and math.isfinite(value)]

    def place(self, step: int) -> str:
        """Return in brackets what a log without steps says of the next row's place; empty where it says nothing."""
        at = bisect_left(self.steps, step)
        epoch = next((values[at : at + 1] for name, values in self.series.items() if name.lower() == "epoch"), [None])
        if self.unit in ("step", "epoch") or [*epoch] in ([], [None]):
            return ""
        own = self.series.get("step") if self.unit == "row" else None
        return f" ({f'step {own[at]:g} of ' if own and own[at] is not None else ''}epoch {epoch[0]:g})"

    @property
    def norm(self) -> str | None:
        """The metric that holds the gradient norms: the step's largest where that was logged; None without norms."""
        return self.first((MAX, MEAN)) or None

    @property
    def own_norm(self) -> str:
        """The norm's name in the log itself."""
        return self.own(self.norm or "norm")

    @property
    def norms(self) -> list[float]:
        return self.finite(self.norm or "")

    @property
    def own_names(self) -> list[str]:
        """The metrics as the log itself calls them."""
        return [name for name in self.series if name not in self.called]


_AT_ONCE = 1000
"""Rows that are turned into columns at once."""


def build(rows: dict[int, dict[str, float]], source: str) -> Metrics:
    """Turns ``{step: {name: value}}`` into columns, and empties ``rows``: a long log has no room for both.

    Where most cells would be empty, the metrics of the fewest steps are left out.
    """
    steps = sorted(rows)
    counts = Counter(chain.from_iterable(rows.values()))
    most = max(CELLS, 4 * counts.total()) // len(steps)
    names = sorted(name for name, _ in counts.most_common(most) if len(name) <= NAME)
    series: dict[str, array[float] | list[float | None]] = {name: array("d") for name in names}
    for start in range(0, len(steps), _AT_ONCE):
        part = [rows.pop(step) for step in steps[start : start + _AT_ONCE]]
        for name, column in series.items():
            values = [row.get(name) for row in part]
            if None in values and isinstance(column, array):
                series[name] = column = list(column)
            column.extend(values)
    # steps anew: numbers that lie among those of the rows would keep that memory from being used again
    return Metrics(source, [*array("q", steps)], {**series})
