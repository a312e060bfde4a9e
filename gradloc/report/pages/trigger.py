# SPDX-License-Identifier: Apache-2.0
"""Draws the trigger's decisions as an SVG file, or as a page that follows the reader's theme."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from ...explain.numbers import number
from ...explain.text import in_unit
from ..figures.palette import LIGHT
from ..figures.style import draw, dress, to_svg
from ..runs.spikes import Judged
from .page import fill
from .script_data import axis_of

TITLE = "What the trigger would have flagged"
Runs = Mapping[str, Sequence[Judged]]
"""Steps of each run, by the title of its panel."""


def svg(runs: Runs, unit: str = "step") -> str:
    """Draw a self-contained picture; ``unit`` is what the steps count."""
    return draw(_figure(runs, unit), facecolor=LIGHT.card)


def html(runs: Runs, unit: str = "step") -> str:
    """Render a page with the picture and the flagged steps; ``unit`` is what they count."""
    spikes = [(name, judged) for name, steps in runs.items() for judged in steps if judged.spike]
    return fill("trigger.html", figure=to_svg(_figure(runs, unit), "trigger", TITLE), spikes=spikes, unit=unit)


def _figure(runs: Runs, unit: str) -> Figure:
    """Draw a panel per run: norm, threshold, flagged steps."""
    figure = Figure(figsize=(10, 1 + 2.3 * len(runs)), layout="constrained")
    panels = [figure.add_subplot(len(runs), 1, place) for place in range(1, len(runs) + 1)]
    for axes, (name, judged) in zip(panels, runs.items(), strict=True):
        _draw_run(axes, judged)
        axes.set_title(
            in_unit(f"{name}: {sum(j.spike for j in judged)} of {len(judged)} steps flagged", unit), loc="left"
        )
    panels[-1].set_xlabel(axis_of(unit))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=3, frameon=False, fontsize=9, labelcolor=LIGHT.ink)
    dress(figure, TITLE)
    return figure


def _draw_run(axes: Axes, judged: Sequence[Judged]) -> None:
    norms = [(j.step, j.norm) for j in judged if 0 < j.norm < math.inf]
    axes.plot(*zip(*norms, strict=True), color=LIGHT.calm, linewidth=1.1, label="gradient norm")
    limits = [(j.step, j.threshold) for j in judged if j.threshold is not None and math.isfinite(j.threshold)]
    if limits:
        dashed = {"color": LIGHT.muted, "linestyle": (0, (4, 2)), "linewidth": 1}
        axes.step(*zip(*limits, strict=True), where="mid", label="threshold", **dashed)
    spikes = [j for j in judged if j.spike]
    finite = [(j.step, j.norm) for j in spikes if math.isfinite(j.norm)]
    if finite:
        axes.scatter(*zip(*finite, strict=True), marker="D", s=26, color=LIGHT.spike, zorder=3, label="flagged")
    for j in spikes:
        if not math.isfinite(j.norm):
            axes.axvline(j.step, color=LIGHT.spike, linewidth=1, linestyle=":")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 2)))
    axes.yaxis.set_minor_formatter(NullFormatter())
