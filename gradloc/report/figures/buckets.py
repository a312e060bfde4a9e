# SPDX-License-Identifier: Apache-2.0
"""Figures of a gradient analysis by bucket: a colour per term of the loss, ``all`` dashed."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ...explain.numbers import number
from ..runs.buckets import ALL, LOSSES, TERMS, StepBuckets
from .palette import LIGHT
from .style import dress

NAMES = {"task": "task (policy)", "entropy": "entropy", "kl": "KL", "policy": "policy", "total": "total"}
COLOURS = {
    "task": LIGHT.calm,
    "policy": LIGHT.calm,
    "entropy": LIGHT.spike,
    "kl": LIGHT.good,
    "total": LIGHT.violet,
}


def summary(analysis: StepBuckets) -> Figure:
    """Draw four panels: the task norm, all terms, the reward deviation, and how the buckets agree."""
    figure = _figure(11, 7.6)
    (task, terms), (deviations, agreement) = figure.subplots(2, 2)
    _bars(task, analysis, ["task"])
    task.set_title("Task gradient of each bucket on its own")
    _bars(terms, analysis, analysis.terms, is_log=True)
    terms.set_title("All terms of the loss, log scale")
    _deviations(deviations, analysis)
    deviations.set_title("Reward deviation of the groups")
    _agreement(agreement, analysis)
    dress(figure, f"Gradient by reward variance, step {analysis.step}")
    return figure


def norms(analysis: StepBuckets) -> Figure:
    """Draw one panel per term: the norm of each bucket's own gradient."""
    terms = analysis.terms or ["task"]
    figure = _figure(4.4 * len(terms), 4.2)
    _row(figure.subplots(1, len(terms), squeeze=False)[0], analysis, terms, "{}", "gradient norm")
    dress(figure, f"Gradient norm of each bucket on its own, step {analysis.step}")
    return figure


def losses(analysis: StepBuckets) -> Figure:
    """Draw one panel per term of the loss and one for their sum: each bucket's mean."""
    names = [name for name in LOSSES if any(f"loss/{name}" in v for v in analysis.values.values())] or ["total"]
    figure = _figure(3.8 * len(names), 4.0)
    _row(figure.subplots(1, len(names), squeeze=False)[0], analysis, names, "loss/{}", "loss, coefficient included")
    dress(figure, f"Loss of each bucket, step {analysis.step}")
    return figure


def reward_deviation(analysis: StepBuckets) -> Figure:
    """Draw every group's reward deviation by bucket, or each bucket's mean and range without a table."""
    figure = _figure(7.5, 4.4)
    _deviations(figure.subplots(), analysis)
    dress(figure, f"Reward deviation of the groups, step {analysis.step}")
    return figure


def normed(analysis: StepBuckets) -> Figure:
    """Draw each bucket's part of the gradient, per row and per token."""
    terms = analysis.terms or ["task"]
    figure = _figure(4.4 * len(terms), 7.0)
    grid = figure.subplots(2, len(terms), squeeze=False)
    for row, unit in zip(grid, ("sample", "token"), strict=True):
        _row(row, analysis, terms, f"per_{unit}/{{}}", f"norm of the part / {unit}s", f", per {unit}")
    dress(figure, f"What a sample and a token contribute, step {analysis.step}")
    return figure


def three_steps(analyses: Sequence[StepBuckets], title: str) -> Figure:
    """Draw one row per term, one column per step, the same scale along a row; common buckets only."""
    common = [name for name in analyses[0].buckets if all(name in analysis.values for analysis in analyses)]
    kept = []
    for analysis in analyses:
        values = {name: analysis.values[name] for name in (*common, ALL) if name in analysis.values}
        kept.append(StepBuckets(analysis.step, values))
    terms = [term for term in TERMS if any(term in analysis.terms for analysis in kept)]
    figure = _figure(3.9 * len(kept), 2.9 * len(terms) + 0.6)
    grid = figure.subplots(len(terms), len(kept), sharey="row", squeeze=False)
    for row, term in zip(grid, terms, strict=True):
        for axes, analysis in zip(row, kept, strict=True):
            _bars(axes, analysis, [term])
            axes.set_title(f"{NAMES[term]}, step {analysis.step}")
        row[0].set_ylabel("gradient norm")
    dress(figure, title)
    return figure


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(max(width, 6.0), height), layout="constrained")


def _row(row: Sequence[Axes], analysis: StepBuckets, names: list[str], pattern: str, unit: str, of: str = "") -> None:
    for axes, name in zip(row, names, strict=True):
        _bars(axes, analysis, [name], pattern)
        axes.set_title(NAMES[name] + of)
        axes.set_ylabel(unit)


def _bars(axes: Axes, analysis: StepBuckets, names: list[str], pattern: str = "{}", is_log: bool = False) -> None:
    """Draw bars side by side, one per bucket and name, and ``all`` as a dashed line."""
    at = np.arange(len(analysis.buckets))
    is_alone = len(names) == 1
    width = 0.72 / len(names)
    known = []
    for index, name in enumerate(names):
        values = [analysis.get(bucket, pattern.format(name)) for bucket in analysis.buckets]
        whole = analysis.get(ALL, pattern.format(name))
        known += [value for value in (*values, whole) if math.isfinite(value)]
        offset = (index - (len(names) - 1) / 2) * width
        axes.bar(at + offset, values, width * 0.92, color=COLOURS[name], label=None if is_alone else NAMES[name])
        if math.isfinite(whole):
            colour = LIGHT.danger if is_alone else COLOURS[name]
            label = f"all: {number(whole, 3)}" if is_alone else None
            axes.axhline(whole, color=colour, linestyle=(0, (4, 2)), linewidth=1.2, label=label)
    if is_log and any(analysis.get(bucket, pattern.format(name)) > 0 for bucket in analysis.buckets for name in names):
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4))
        axes.yaxis.set_major_locator(MaxNLocator(6))
    _name_buckets(axes, analysis)
    if not known:
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", color=LIGHT.muted)
    elif axes.get_legend_handles_labels()[0]:
        # where no bar is: above positive ones, below negative ones
        axes.margins(y=0.22)
        axes.autoscale_view()
        low, high = axes.get_ylim()
        place = "lower right" if low < 0 and -low > high else "upper right"
        axes.legend(frameon=False, fontsize=8, loc=place, ncols=min(len(names), 3))


def _name_buckets(axes: Axes, analysis: StepBuckets) -> None:
    """Label the axis with each bucket's number, rows and mean deviation."""
    labels = []
    for bucket in analysis.buckets:
        rows, deviation = analysis.get(bucket, "sample_count"), analysis.get(bucket, "reward_std_mean")
        label = bucket.removeprefix("bucket_")
        if math.isfinite(rows):
            label += f"\nn={rows:.0f}"
        if math.isfinite(deviation):
            label += f"\n±{number(deviation, 3)}"
        labels.append(label)
    axes.set_xticks(np.arange(len(labels)), labels)
    axes.set_xlabel("bucket, rows, mean reward deviation")


def _deviations(axes: Axes, analysis: StepBuckets) -> None:
    for at, bucket in enumerate(analysis.buckets):
        mean = analysis.get(bucket, "reward_std_mean")
        axes.plot([at - 0.3, at + 0.3], [mean, mean], color=LIGHT.danger, linewidth=2)
        values = [value for name, value in analysis.table if name == bucket and math.isfinite(value)]
        if values:
            # side by side in a fixed pattern, so that equal groups can be counted
            spread = (np.arange(len(values)) % 9 - (min(len(values), 9) - 1) / 2) * 0.06
            axes.plot(at + spread, values, "o", color=LIGHT.calm, markersize=4.5, alpha=0.75)
        else:
            low, high = (analysis.get(bucket, f"reward_std_{end}") for end in ("min", "max"))
            axes.vlines(at, low, high, color=LIGHT.calm, linewidth=3)
    axes.plot([], [], color=LIGHT.danger, linewidth=2, label="mean")
    mark, label = ("o", "a group") if analysis.table else ("-", "lowest to highest")
    axes.plot([], [], mark, color=LIGHT.calm, label=label)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.set_ylabel("standard deviation of rewards")
    axes.margins(y=0.15)
    axes.set_xlim(-0.6, len(analysis.buckets) - 0.4)
    _name_buckets(axes, analysis)
    if all(analysis.get(bucket, "reward_std_max") == 0 for bucket in analysis.buckets):
        axes.set_ylim(-0.05, 1)
        text = "every group's rewards are all equal"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=LIGHT.muted)


def _agreement(axes: Axes, analysis: StepBuckets) -> None:
    """Draw the cosines between the buckets' task gradients as numbers on squares, darker away from 0."""
    buckets = analysis.buckets
    axes.set_title("Do the buckets pull the same way? (cosine)")
    for row, left in enumerate(buckets):
        for column, right in enumerate(buckets):
            value = 1.0 if row == column else analysis.cosines.get((left, right), math.nan)
            if math.isfinite(value):
                square = Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, linewidth=0)
                square.set(facecolor=LIGHT.calm if value > 0 else LIGHT.danger, alpha=0.06 + 0.5 * abs(value))
                axes.add_patch(square)
            text = f"{value:.2f}" if math.isfinite(value) else "-"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=LIGHT.ink)
    names = [bucket.removeprefix("bucket_") for bucket in buckets]
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(-0.55, len(names) - 0.45)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlabel("bucket")
    axes.set_ylabel("bucket")


FIGURES = {
    "summary": ("Summary", summary),
    "plots": ("Each bucket on its own", norms),
    "loss_plots": ("Losses", losses),
    "reward_std": ("Reward deviation", reward_deviation),
    "normed_grads": ("Per sample and per token", normed),
}
"""Name in the guide's files -> title on the page, and the function that draws it."""
