# SPDX-License-Identifier: Apache-2.0
"""Norms and their thresholds over the steps of one or more runs, drawn by matplotlib."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from ...words.numbers import number
from ..runs.trigger import Judged
from .palette import Palette
from .style import dress


def draw(runs: Mapping[str, Sequence[Judged]], palette: Palette, title: str) -> Figure:
    """A panel for each run: the norm, the threshold over it, and what was flagged.

    Args:
        runs: by the name that the panel is to have.
        palette: its colours.
        title: above all panels.
    """
    figure = Figure(figsize=(10, 1 + 2.3 * len(runs)), layout="constrained")
    FigureCanvasSVG(figure)
    for place, (name, judged) in enumerate(runs.items()):
        axes = figure.add_subplot(len(runs), 1, place + 1)
        known = [(j.step, j.norm) for j in judged if 0 < j.norm < math.inf]
        axes.plot(*zip(*known, strict=True), color=palette.calm, linewidth=1.1, label="gradient norm")
        limits = [(j.step, j.threshold) for j in judged if j.threshold is not None and math.isfinite(j.threshold)]
        if limits:
            dashes = (0, (4, 2))
            steps, values = zip(*limits, strict=True)
            axes.step(steps, values, where="mid", color=palette.muted, linestyle=dashes, linewidth=1, label="threshold")
        spikes = [j for j in judged if j.spike]
        finite = [(j.step, j.norm) for j in spikes if math.isfinite(j.norm)]
        if finite:
            axes.scatter(*zip(*finite, strict=True), marker="D", s=26, color=palette.spike, zorder=3, label="flagged")
        for j in spikes:
            if not math.isfinite(j.norm):
                axes.axvline(j.step, color=palette.spike, linewidth=1, linestyle=":")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 2)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{name}: {len(spikes)} of {len(judged)} steps flagged", loc="left")
        if place == len(runs) - 1:
            axes.set_xlabel("training step")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower right", ncols=3, frameon=False, fontsize=9, labelcolor=palette.ink
    )
    dress(figure, palette, title)
    return figure
