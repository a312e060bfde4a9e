# SPDX-License-Identifier: Apache-2.0
"""Norms and thresholds as a curve of characters, on a log scale."""

import math
from collections.abc import Sequence

from rich.text import Text

from ...words.numbers import number
from ..runs.trigger import Judged

HEIGHT = 12
"""Lines of the curve."""


def curve(segments: Sequence[Sequence[Judged]], width: int) -> list[Text]:
    """The largest norm of each column's steps, and the lowest threshold over it; segments share the axis of steps.

    Args:
        segments: the steps of each; what a later one logged again is drawn as discarded.
        width: columns.
    """
    latest = {step.step: id(step) for steps in segments for step in steps}
    judged = sorted((step for steps in segments for step in steps), key=lambda step: step.step)
    size = -(-len(judged) // width)
    columns = [judged[at : at + size] for at in range(0, len(judged), size or 1)]
    tops = [max((j for j in column if 0 < j.norm < math.inf), key=lambda j: j.norm, default=None) for column in columns]
    norms = [None if top is None else math.log(top.norm) for top in tops]
    limits = [min((math.log(j.threshold) for j in column if j.threshold), default=None) for column in columns]
    known = [value for value in [*norms, *limits] if value is not None and math.isfinite(value)]
    if not known:
        return []
    low, high = min(known), max(known)
    lines = [Text() for _ in range(HEIGHT)]
    has_lost = False
    for column, top, norm, limit in zip(columns, tops, norms, limits, strict=True):
        is_spike = any(j.is_told for j in column)
        is_lost = top is not None and latest[top.step] != id(top)
        has_lost = has_lost or is_lost
        at, over = _level(norm, low, high), _level(limit, low, high)
        if norm is None and is_spike:
            at = HEIGHT - 1  # not finite
        mark = ("◇" if is_lost else "◆") if is_spike else "∘" if is_lost else "•"
        for level, line in enumerate(reversed(lines)):
            if level == at:
                line.append(mark, style="bold red" if is_spike else "blue")
            else:
                line.append("-" if level == over else " ", style="dim")
    for level, line in enumerate(reversed(lines)):
        if level in (0, HEIGHT // 2, HEIGHT - 1):
            line.append(f" {number(math.exp(low + (high - low) * level / (HEIGHT - 1)), 3)}", style="dim")
    legend = f"steps {judged[0].step:,} to {judged[-1].step:,}: • norm, ◆ flagged, - threshold"
    legend += ", ◇ ∘ overwritten" * has_lost + f"; {size} steps a column" * (size > 1)
    return [*lines, Text(legend, style="dim")]


def _level(value: float | None, low: float, high: float) -> int | None:
    if value is None or not math.isfinite(value):
        return None
    return round((HEIGHT - 1) * (value - low) / (high - low)) if high > low else 0
