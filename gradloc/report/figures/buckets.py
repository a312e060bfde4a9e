# SPDX-License-Identifier: Apache-2.0
"""The pictures of a gradient analysis: one colour per term of the loss, ``all`` as a dashed line.

The same functions serve the LIGHT files and the HTML page: they take the palette to draw with.
"""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ...words.numbers import number
from ..analyses.buckets import ALL, LOSSES, TERMS, Analysis
from .palette import LIGHT, Palette
from .style import dress

NAMES = {"task": "task (policy)", "entropy": "entropy", "kl": "KL", "policy": "policy", "total": "total"}
COLOURS = {"task": "calm", "policy": "calm", "entropy": "spike", "kl": "good", "total": "violet"}
"""Which of the palette's palette each term of the loss has; ``all`` has ``danger``'s."""


def summary(analysis: Analysis, palette: Palette = LIGHT) -> Figure:
    """Four panels: the task norm, all terms, the reward deviation, and how the buckets agree."""
    figure = _figure(11, 7.6)
    axes = figure.subplots(2, 2)
    _bars(axes[0][0], analysis, ["task"], "{}", palette)
    axes[0][0].set_title("Task gradient of each bucket on its own")
    _bars(axes[0][1], analysis, analysis.terms, "{}", palette, is_log=True)
    axes[0][1].set_title("All terms of the loss, log scale")
    _deviations(axes[1][0], analysis, palette)
    axes[1][0].set_title("Reward deviation of the groups")
    _agreement(axes[1][1], analysis, palette)
    dress(figure, palette, f"Gradient by reward variance, step {analysis.step}")
    return figure


def norms(analysis: Analysis, palette: Palette = LIGHT) -> Figure:
    """One panel per term: the norm of each bucket's own gradient."""
    terms = analysis.terms or ["task"]
    figure = _figure(4.4 * len(terms), 4.2)
    _row(figure, analysis, terms, "{}", "gradient norm", palette)
    dress(figure, palette, f"Gradient norm of each bucket on its own, step {analysis.step}")
    return figure


def losses(analysis: Analysis, palette: Palette = LIGHT) -> Figure:
    """One panel per term of the loss and one for their sum: each bucket's mean."""
    names = [name for name in LOSSES if any(f"loss/{name}" in v for v in analysis.values.values())]
    names = names or ["total"]
    figure = _figure(3.8 * len(names), 4.0)
    _row(figure, analysis, names, "loss/{}", "loss, coefficient included", palette)
    dress(figure, palette, f"Loss of each bucket, step {analysis.step}")
    return figure


def reward_deviation(analysis: Analysis, palette: Palette = LIGHT) -> Figure:
    """Every group's reward deviation by bucket, or each bucket's mean and range without a table."""
    figure = _figure(7.5, 4.4)
    _deviations(figure.subplots(), analysis, palette)
    dress(figure, palette, f"Reward deviation of the groups, step {analysis.step}")
    return figure


def normed(analysis: Analysis, palette: Palette = LIGHT) -> Figure:
    """Each bucket's part of the gradient, per row and per token."""
    terms = analysis.terms or ["task"]
    figure = _figure(4.4 * len(terms), 7.0)
    grid = np.reshape(figure.subplots(2, len(terms)), (2, len(terms)))
    for row, unit in zip(grid, ("sample", "token"), strict=True):
        for axes, term in zip(row, terms, strict=True):
            _bars(axes, analysis, [term], f"per_{unit}/{{}}", palette)
            axes.set_title(f"{NAMES[term]}, per {unit}")
            axes.set_ylabel(f"norm of the part / {unit}s")
    dress(figure, palette, f"What a sample and a token contribute, step {analysis.step}")
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
            _bars(axes, analysis, [term], "{}", LIGHT)
            axes.set_title(f"{NAMES[term]}, {label}")
        row[0].set_ylabel("gradient norm")
    dress(figure, LIGHT, title)
    return figure


# ---- inside


def _only(analysis: Analysis, buckets: list[str]) -> Analysis:
    return Analysis(analysis.step, {b: analysis.values[b] for b in buckets if b in analysis.values})


def _row(figure: Figure, analysis: Analysis, names, pattern: str, unit: str, palette: Palette) -> None:
    """A panel for each name."""
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        _bars(axes, analysis, [name], pattern, palette)
        axes.set_title(NAMES[name])
        axes.set_ylabel(unit)


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(max(width, 6.0), height), layout="constrained")


def _bars(axes: Axes, analysis: Analysis, names, pattern: str, palette: Palette, is_log: bool = False) -> None:
    """Bars side by side, one per bucket and name, and a dashed line where ``all`` is."""
    buckets = analysis.buckets
    at = np.arange(len(buckets))
    width = 0.72 / len(names)
    for index, name in enumerate(names):
        values = [analysis.get(bucket, pattern.format(name)) for bucket in buckets]
        offset = (index - (len(names) - 1) / 2) * width
        colour = getattr(palette, COLOURS[name])
        label = NAMES[name] if len(names) > 1 else None
        axes.bar(at + offset, values, width * 0.92, color=colour, label=label)
        whole = analysis.get(ALL, pattern.format(name))
        if math.isfinite(whole):
            line = colour if len(names) > 1 else palette.danger
            label = None if len(names) > 1 else f"all: {number(whole, 3)}"
            axes.axhline(whole, color=line, linestyle=(0, (4, 2)), linewidth=1.2, label=label)
    if is_log and any(analysis.get(bucket, pattern.format(name)) > 0 for bucket in buckets for name in names):
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4))
        axes.yaxis.set_major_locator(MaxNLocator(6))
    _ticks(axes, analysis)
    logged = [analysis.get(b, pattern.format(n)) for b in (*buckets, ALL) for n in names]
    if not any(map(math.isfinite, logged)):
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", color=palette.muted)
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
        label += f"\n±{number(deviation, 3)}" if math.isfinite(deviation) else ""
        labels.append(label)
    axes.set_xticks(np.arange(len(labels)), labels)
    axes.set_xlabel("bucket, rows, mean reward deviation")


def _deviations(axes: Axes, analysis: Analysis, palette: Palette) -> None:
    by_bucket = {bucket: [] for bucket in analysis.buckets}
    for bucket, value in analysis.table:
        if bucket in by_bucket and math.isfinite(value):
            by_bucket[bucket].append(value)
    for at, (bucket, values) in enumerate(by_bucket.items()):
        mean = analysis.get(bucket, "reward_std_mean")
        axes.plot([at - 0.3, at + 0.3], [mean, mean], color=palette.danger, linewidth=2)
        if values:
            # side by side in a fixed pattern, so that equal groups can be counted
            spread = (np.arange(len(values)) % 9 - (min(len(values), 9) - 1) / 2) * 0.06
            axes.plot(at + spread, values, "o", color=palette.calm, markersize=4.5, alpha=0.75)
        else:
            low, high = (analysis.get(bucket, f"reward_std_{end}") for end in ("min", "max"))
            axes.vlines(at, low, high, color=palette.calm, linewidth=3)
    axes.plot([], [], color=palette.danger, linewidth=2, label="mean")
    what = "o" if analysis.table else "-"
    label = "a group" if analysis.table else "lowest to highest"
    axes.plot([], [], what, color=palette.calm, label=label)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.set_ylabel("standard deviation of rewards")
    axes.margins(y=0.15)
    axes.set_xlim(-0.6, len(by_bucket) - 0.4)
    _ticks(axes, analysis)
    if all(analysis.get(bucket, "reward_std_max") == 0 for bucket in by_bucket):
        axes.set_ylim(-0.05, 1)
        text = "every group's rewards are all equal"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=palette.muted)


def _agreement(axes: Axes, analysis: Analysis, palette: Palette) -> None:
    """The cosines between the buckets' task gradients: numbers on squares, fuller away from 0."""
    buckets = analysis.buckets
    axes.set_title("Do the buckets pull the same way? (cosine)")
    for row, left in enumerate(buckets):
        for column, right in enumerate(buckets):
            value = 1.0 if row == column else analysis.cosines.get((left, right), math.nan)
            if math.isfinite(value):
                colour = palette.calm if value > 0 else palette.danger
                square = Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, linewidth=0)
                square.set(facecolor=colour, alpha=0.06 + 0.5 * abs(value))
                axes.add_patch(square)
            text = f"{value:.2f}" if math.isfinite(value) else "-"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=palette.ink)
    names = [bucket.removeprefix("bucket_") for bucket in buckets]
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(-0.55, len(names) - 0.45)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlabel("bucket")
    axes.set_ylabel("bucket")


FIGURES = {
    "summary": summary,
    "plots": norms,
    "loss_plots": losses,
    "reward_std": reward_deviation,
    "normed_grads": normed,
}
"""What the guide's files are called -> what draws them."""
