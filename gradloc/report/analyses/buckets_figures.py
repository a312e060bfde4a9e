# SPDX-License-Identifier: Apache-2.0
"""The pictures of a gradient analysis: one colour per term of the loss, ``all`` as a dashed line.

The same functions serve the PNG files and the HTML page: they take the colours to draw with.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from .buckets import ALL, LOSSES, TERMS, Analysis

NAMES = {
    "task": "task (policy)",
    "entropy": "entropy",
    "kl": "KL",
    "policy": "policy",
    "total": "total",
}


@dataclass(frozen=True)
class Colours:
    """What the figures are drawn with."""

    ink: str = "#1c2430"
    muted: str = "#5c6673"
    line: str = "#d9dee5"
    task: str = "#2f6fb0"
    entropy: str = "#d0801d"
    kl: str = "#4d9463"
    total: str = "#6b5b95"
    whole: str = "#b3302b"
    """The ``all`` line."""

    def of(self, name: str) -> str:
        return getattr(self, {"policy": "task"}.get(name, name))


PNG = Colours()


def summary(analysis: Analysis, colours: Colours = PNG) -> Figure:
    """Four panels: the task norm, all terms, the reward deviation, and how the buckets agree."""
    figure = _figure(11, 7.6)
    axes = figure.subplots(2, 2)
    _bars(axes[0][0], analysis, ["task"], "{}", colours)
    axes[0][0].set_title("Task gradient of each bucket on its own")
    _bars(axes[0][1], analysis, analysis.terms, "{}", colours, is_log=True)
    axes[0][1].set_title("All terms of the loss, log scale")
    _deviations(axes[1][0], analysis, colours)
    axes[1][0].set_title("Reward deviation of the groups")
    _agreement(axes[1][1], analysis, colours)
    _finish(figure, f"Gradient by reward variance, step {analysis.step}", colours)
    return figure


def norms(analysis: Analysis, colours: Colours = PNG) -> Figure:
    """One panel per term: the norm of each bucket's own gradient."""
    terms = analysis.terms or ["task"]
    figure = _figure(4.4 * len(terms), 4.2)
    for axes, term in zip(np.atleast_1d(figure.subplots(1, len(terms))), terms, strict=True):
        _bars(axes, analysis, [term], "{}", colours)
        axes.set_title(NAMES[term])
        axes.set_ylabel("gradient norm")
    _finish(figure, f"Gradient norm of each bucket on its own, step {analysis.step}", colours)
    return figure


def losses(analysis: Analysis, colours: Colours = PNG) -> Figure:
    """One panel per term of the loss and one for their sum: each bucket's mean."""
    names = [name for name in LOSSES if any(f"loss/{name}" in v for v in analysis.values.values())]
    names = names or ["total"]
    figure = _figure(3.8 * len(names), 4.0)
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        _bars(axes, analysis, [name], "loss/{}", colours)
        axes.set_title(NAMES[name])
        axes.set_ylabel("loss, coefficient included")
    _finish(figure, f"Loss of each bucket, step {analysis.step}", colours)
    return figure


def reward_deviation(analysis: Analysis, colours: Colours = PNG) -> Figure:
    """Every group's reward deviation by bucket, or each bucket's mean and range without a table."""
    figure = _figure(7.5, 4.4)
    _deviations(figure.subplots(), analysis, colours)
    _finish(figure, f"Reward deviation of the groups, step {analysis.step}", colours)
    return figure


def normed(analysis: Analysis, colours: Colours = PNG) -> Figure:
    """Each bucket's part of the gradient, per row and per token."""
    terms = analysis.terms or ["task"]
    figure = _figure(4.4 * len(terms), 7.0)
    grid = np.reshape(figure.subplots(2, len(terms)), (2, len(terms)))
    for row, unit in zip(grid, ("sample", "token"), strict=True):
        for axes, term in zip(row, terms, strict=True):
            _bars(axes, analysis, [term], f"per_{unit}/{{}}", colours)
            axes.set_title(f"{NAMES[term]}, per {unit}")
            axes.set_ylabel(f"norm of the part / {unit}s")
    _finish(figure, f"What a sample and a token contribute, step {analysis.step}", colours)
    return figure


def three_steps(analyses: Sequence[Analysis], labels: Sequence[str], title: str) -> Figure:
    """One row per term, one column per step, the same scale along a row; common buckets only."""
    common = [name for name in analyses[0].buckets if all(name in a.values for a in analyses)]
    kept = [_only(analysis, [*common, ALL]) for analysis in analyses]
    terms = [term for term in TERMS if any(term in a.terms for a in kept)]
    figure = _figure(3.9 * len(kept), 2.9 * len(terms) + 0.6)
    grid = np.reshape(figure.subplots(len(terms), len(kept), sharey="row"), (len(terms), len(kept)))
    for row, term in zip(grid, terms, strict=True):
        for axes, analysis, label in zip(row, kept, labels, strict=True):
            _bars(axes, analysis, [term], "{}", PNG)
            axes.set_title(f"{NAMES[term]}, {label}")
        row[0].set_ylabel("gradient norm")
    _finish(figure, title, PNG)
    return figure


# ---- inside


def _only(analysis: Analysis, buckets: list[str]) -> Analysis:
    return Analysis(analysis.step, {b: analysis.values[b] for b in buckets if b in analysis.values})


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(max(width, 6.0), height), layout="constrained")


def _bars(axes: Axes, analysis: Analysis, names, pattern: str, colours: Colours, is_log: bool = False) -> None:
    """Bars side by side, one per bucket and name, and a dashed line where ``all`` is."""
    buckets = analysis.buckets
    at = np.arange(len(buckets))
    width = 0.72 / len(names)
    for number, name in enumerate(names):
        values = [analysis.get(bucket, pattern.format(name)) for bucket in buckets]
        offset = (number - (len(names) - 1) / 2) * width
        colour = colours.of(name)
        label = NAMES[name] if len(names) > 1 else None
        axes.bar(at + offset, values, width * 0.92, color=colour, label=label)
        whole = analysis.get(ALL, pattern.format(name))
        if math.isfinite(whole):
            line = colour if len(names) > 1 else colours.whole
            label = None if len(names) > 1 else f"all: {_short(whole)}"
            axes.axhline(whole, color=line, linestyle=(0, (4, 2)), linewidth=1.2, label=label)
    if is_log and any(analysis.get(bucket, pattern.format(name)) > 0 for bucket in buckets for name in names):
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4))
        axes.yaxis.set_major_locator(MaxNLocator(6))
    _ticks(axes, analysis)
    logged = [analysis.get(b, pattern.format(n)) for b in (*buckets, ALL) for n in names]
    if not any(map(math.isfinite, logged)):
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center")
    elif axes.get_legend_handles_labels()[0]:
        _legend(axes, min(len(names), 3))


def _legend(axes: Axes, columns: int) -> None:
    """Put the legend where no bar is: above positive ones, below negative ones."""
    axes.margins(y=0.22)
    axes.autoscale_view()
    low, high = axes.get_ylim()
    is_below = low < 0 and -low > high
    place = "lower right" if is_below else "upper right"
    axes.legend(frameon=False, fontsize=8, loc=place, ncols=columns)


def _ticks(axes: Axes, analysis: Analysis) -> None:
    """Name each bucket by its number, and say how many rows it has and how they differ."""
    labels = []
    for bucket in analysis.buckets:
        rows = analysis.get(bucket, "sample_count")
        deviation = analysis.get(bucket, "reward_std_mean")
        label = bucket.removeprefix("bucket_")
        label += f"\nn={rows:.0f}" if math.isfinite(rows) else ""
        label += f"\n±{_short(deviation)}" if math.isfinite(deviation) else ""
        labels.append(label)
    axes.set_xticks(np.arange(len(labels)), labels)
    axes.set_xlabel("bucket, rows, mean reward deviation")


def _deviations(axes: Axes, analysis: Analysis, colours: Colours) -> None:
    by_bucket = {bucket: [] for bucket in analysis.buckets}
    for bucket, value in analysis.table:
        if bucket in by_bucket and math.isfinite(value):
            by_bucket[bucket].append(value)
    for at, (bucket, values) in enumerate(by_bucket.items()):
        mean = analysis.get(bucket, "reward_std_mean")
        axes.plot([at - 0.3, at + 0.3], [mean, mean], color=colours.whole, linewidth=2)
        if values:
            # side by side in a fixed pattern, so that equal groups can be counted
            spread = (np.arange(len(values)) % 9 - (min(len(values), 9) - 1) / 2) * 0.06
            axes.plot(at + spread, values, "o", color=colours.task, markersize=4.5, alpha=0.75)
        else:
            low, high = (analysis.get(bucket, f"reward_std_{end}") for end in ("min", "max"))
            axes.vlines(at, low, high, color=colours.task, linewidth=3)
    axes.plot([], [], color=colours.whole, linewidth=2, label="mean")
    what = "o" if analysis.table else "-"
    label = "a group" if analysis.table else "lowest to highest"
    axes.plot([], [], what, color=colours.task, label=label)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.set_ylabel("standard deviation of rewards")
    axes.margins(y=0.15)
    axes.set_xlim(-0.6, len(by_bucket) - 0.4)
    _ticks(axes, analysis)
    if all(analysis.get(bucket, "reward_std_max") == 0 for bucket in by_bucket):
        axes.set_ylim(-0.05, 1)
        text = "every group's rewards are all equal"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=colours.muted)


def _agreement(axes: Axes, analysis: Analysis, colours: Colours) -> None:
    """The cosines between the buckets' task gradients: numbers on squares, fuller away from 0."""
    buckets = analysis.buckets
    axes.set_title("Do the buckets pull the same way? (cosine)")
    for row, left in enumerate(buckets):
        for column, right in enumerate(buckets):
            value = 1.0 if row == column else analysis.cosines.get((left, right), math.nan)
            if math.isfinite(value):
                colour = colours.task if value > 0 else colours.whole
                square = Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, linewidth=0)
                square.set(facecolor=colour, alpha=0.06 + 0.5 * abs(value))
                axes.add_patch(square)
            text = f"{value:.2f}" if math.isfinite(value) else "-"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colours.ink)
    names = [bucket.removeprefix("bucket_") for bucket in buckets]
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(-0.55, len(names) - 0.45)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlabel("bucket")
    axes.set_ylabel("bucket")


def _finish(figure: Figure, title: str, colours: Colours) -> None:
    figure.suptitle(title, color=colours.ink, fontsize=13)
    for axes in figure.axes:
        axes.title.set_fontsize(10.5)
        axes.title.set_color(colours.ink)
        axes.tick_params(labelsize=8.5, colors=colours.muted)
        axes.yaxis.get_offset_text().set_fontsize(8)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set_color(colours.muted)
            label.set_fontsize(9)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(colours.line)
        if axes.get_ylabel() != "bucket":
            axes.grid(axis="y", color=colours.line, linewidth=0.6)
            axes.set_axisbelow(True)
        legend = axes.get_legend()
        for text in legend.get_texts() if legend else ():
            text.set_color(colours.muted)


def _short(value: float) -> str:
    """At most three significant digits; powers of ten only where they are needed."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")


FIGURES = {
    "summary": summary,
    "plots": norms,
    "loss_plots": losses,
    "reward_std": reward_deviation,
    "normed_grads": normed,
}
"""What the guide's files are called -> what draws them."""
