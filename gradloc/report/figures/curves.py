# SPDX-License-Identifier: Apache-2.0
"""The pictures: the run's curve, where the spike is, which layers carry it; drawn by matplotlib.

No pyplot: figures are made one by one and keep no global state.
"""

import math
import re
from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from ...evidence.numbers import number, percent
from ...evidence.record import Event
from ..runs.health import Span
from ..runs.metrics import MAX, MEAN, Metrics
from .style import THEME
from .svg import to_svg

POINTS = 1200
"""Points drawn per curve; of more, the lowest and highest of each bin are kept."""
LINKED = 300
"""Events that the curve links; the largest ones."""
BAND = 12
"""Height of the strip of states, in pixels."""
STATE_MARKS = {"healthy": (THEME.good, 0.2), "warning": (THEME.warn, 0.6), "danger": (THEME.danger, 1.0)}
"""Colour, and height as a share of the strip's: no meaning rests on colour alone."""
PX = 1 / 72
"""An SVG pixel of matplotlib's in inches."""


def curve(metrics: Metrics, events: list[Event], width: int, name: str, spans: Sequence[Span] = ()) -> str:
    """Gradient norm over the run on a log scale: mean, max, threshold, events (each a link).

    Above it a strip of the run's states, the worse the higher.

    Args:
        metrics: may be empty; then the events alone are drawn.
        events: all events of the run.
        width: in pixels; the height follows.
        name: unique on the page.
        spans: of states; none where the run was not judged.
    """
    figure, axes = _figure(width, max(200, int(width * 0.30)))
    notes = _states(axes, spans, BAND / (width * 0.30))
    mean, top = _points(metrics, MEAN), _points(metrics, MAX)
    if top and top[1] != mean[1]:
        axes.plot(*_thin(*top), color=THEME.spike, linewidth=0.9, label="max of the step's mini-batches")
    if mean:
        axes.plot(*_thin(*mean), color=THEME.calm, linewidth=1.3, label="mean of the step")
    _threshold(axes, metrics, events)
    _marks(axes, events, " (select to open)" if width > 500 else "")
    axes.set_yscale("log")
    axes.set_xlabel("training step")
    axes.set_ylabel("gradient norm")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8 if width > 500 else 4, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 2)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.03, y=0.12)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside upper left", ncols=5 if width > 500 else 2,
            frameon=False, fontsize=11, labelcolor=THEME.muted, handlelength=1.6, borderaxespad=0.2,
        )  # fmt: skip
    title = f"Gradient norm over the run with {len(events)} events marked"
    return to_svg(figure, name, title, notes)


def heat_map(event: Event, name: str) -> tuple[str, bool] | None:
    """Share of the spike per rank and micro-batch.

    Returns:
        The picture, and whether every cell was measured; where the strategy measures culprits only,
        theirs are drawn and the rest is blank. None when nothing is known.
    """
    grid, is_whole = share_grid(event)
    if grid is None:
        return None
    num_micro, num_ranks = grid.shape
    width = int(min(max(num_ranks * 64, 60), 400)) + 60
    height = int(min(max(num_micro * 25, 40), 420)) + 50
    figure, axes = _figure(width, height, margins=(44, 6, 8, 40))
    scale = max(float(np.nanmax(np.abs(np.where(np.isfinite(grid), grid, 0)))), 1e-12)
    for row in range(num_micro):
        for column in range(num_ranks):
            value = grid[row, column]
            if not math.isfinite(value):
                continue
            colour = THEME.spike_fill if value > 0 else THEME.calm_fill
            strength = round(math.sqrt(abs(value) / scale) * 0.85, 2)
            if strength > 0.02:
                box = (column - 0.5, row - 0.5)
                axes.add_patch(_rectangle(box, colour, strength))
            if grid.size <= 96 and abs(value) >= 5e-4:
                axes.text(
                    column,
                    row,
                    percent(value),
                    ha="center",
                    va="center",
                    color=THEME.ink,
                    fontsize=10,
                )
    axes.set_xlim(-0.5, num_ranks - 0.5)
    axes.set_ylim(num_micro - 0.5, -0.5)
    axes.set_xlabel("rank")
    axes.set_ylabel("micro-batch")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    axes.grid(False)
    for side in axes.spines.values():
        side.set_visible(True)
        side.set_color(THEME.line)
    return to_svg(figure, name, "Share of the spike per rank and micro-batch"), is_whole


def share_grid(event: Event) -> tuple[np.ndarray | None, bool]:
    """Shares as an array (micro-batches, ranks), NaN where not measured; and whether all were."""
    if event.shares is not None and event.shares.micro_batches:
        rows = event.shares.micro_batches
        grid = np.full((len(rows), max(map(len, rows))), np.nan)
        for index, row in enumerate(rows):
            grid[index, : len(row)] = [np.nan if value is None else value for value in row]
        return grid, True
    places = [(c.micro_batch, c.rank, c.share) for c in event.culprits]
    places = [place for place in places if None not in place]
    if not places:
        return None, False
    num_micro = max(event.step.num_micro_batches or 0, *(m + 1 for m, _, _ in places))
    num_ranks = max(event.step.world_size or 0, *(r + 1 for _, r, _ in places))
    grid = np.full((num_micro, num_ranks), np.nan)
    for micro_batch, rank, share in places:
        grid[micro_batch, rank] = np.nansum([grid[micro_batch, rank], share])
    return grid, False


def layer_bars(event: Event, name: str) -> str | None:
    """Norm of the gradient per layer: the whole spike as bars, the largest culprits as marks."""
    layers = sorted(event.layers, key=natural)
    if not layers:
        return None
    norms = [_finite(event.layers[layer]) for layer in layers]
    if not any(norms):
        return None
    step = 19 if len(layers) <= 40 else 9
    margin = 12 + 7 * max(map(len, layers))
    figure, axes = _figure(380, 70 + step * len(layers), margins=(min(margin, 170), 28, 14, 40))
    rows = range(len(layers))
    axes.barh(rows, norms, color=THEME.soft, height=0.72, label="the whole step")
    largest = sorted(event.culprits, key=lambda c: -(_finite(c.grad_norm)))[:1]
    for culprit in largest:
        marks = [(row, culprit.layers.get(layer)) for row, layer in enumerate(layers)]
        marks = [(row, value) for row, value in marks if value is not None and math.isfinite(value)]
        if marks:
            axes.plot(
                [value for _, value in marks], [row for row, _ in marks], "D", color=THEME.spike,
                markersize=4.5 if step > 10 else 3, label="largest culprit", clip_on=False,
            )  # fmt: skip
    every = 1 if step > 10 else 4
    axes.set_yticks(list(rows)[::every], layers[::every])
    axes.set_ylim(len(layers) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("gradient norm")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.grid(False, axis="y")
    figure.legend(
        loc="upper left",
        ncols=2,
        frameon=False,
        fontsize=11,
        labelcolor=THEME.muted,
        handlelength=1.2,
    )
    return to_svg(figure, name, "Gradient norm per layer, the whole step and the largest culprit")


def overlay(runs: list[tuple[str, Metrics]], width: int, name: str) -> str | None:
    """The gradient norms of several runs in one picture; None when no run has metrics."""
    figure, axes = _figure(width, max(220, int(width * 0.33)))
    is_empty = True
    for (label, metrics), colour, style in zip(runs, (THEME.calm, THEME.spike), ("-", "--"), strict=False):
        found = _points(metrics, MAX) or _points(metrics, MEAN)
        if found:
            axes.plot(*_thin(*found), color=colour, linestyle=style, linewidth=1.3, label=label)
            is_empty = False
    if is_empty:
        return None
    axes.set_yscale("log")
    axes.set_xlabel("training step")
    axes.set_ylabel("gradient norm (max)")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8 if width > 500 else 4, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 2)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=11, labelcolor=THEME.muted)
    return to_svg(figure, name, "Gradient norm of the compared runs")


def natural(layer: str) -> tuple:
    """Sorts layers as the model has them: embedding, layer 0, 1, ..., 10, final norm, head."""
    order = {"embedding": 0, "layer": 1, "norm": 2, "head": 3}
    kind = layer.split(" ")[0]
    digits = re.search(r"\d+", layer)
    return order.get(kind, 4), int(digits[0]) if digits else 0, layer


def _figure(width: int, height: int, margins: tuple[int, int, int, int] | None = None):
    """A figure with quiet axes; sizes in pixels.

    Without margins (left, top, right, bottom) matplotlib finds them, which takes most of a
    drawing's time: pictures that every event has give their own.
    """
    figure = Figure(figsize=(width * PX, height * PX), layout=None if margins else "constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    if margins:
        left, top, right, bottom = margins
        figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)
    axes.set_facecolor("none")
    axes.tick_params(colors=THEME.muted, labelsize=11, length=0, pad=5, which="both")
    axes.xaxis.label.set(color=THEME.muted, fontsize=11)
    axes.yaxis.label.set(color=THEME.muted, fontsize=11)
    axes.grid(True, color=THEME.line, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure, axes


def _rectangle(corner: tuple[float, float], colour: str, strength: float):
    from matplotlib.patches import Rectangle

    return Rectangle(corner, 1, 1, facecolor=colour, edgecolor="none", alpha=strength)


def _points(metrics: Metrics, name: str) -> tuple[list[int], list[float]] | None:
    pairs = zip(metrics.steps, metrics.get(name), strict=True)
    kept = [(s, v) for s, v in pairs if v is not None and math.isfinite(v) and v > 0]
    return ([s for s, _ in kept], [v for _, v in kept]) if kept else None


def _thin(steps: list[int], found: list[float]) -> tuple[list[int], list[float]]:
    """At most POINTS points; a spike is never thinned away."""
    if len(steps) <= POINTS:
        return steps, found
    size = math.ceil(2 * len(steps) / POINTS)
    keep: list[int] = []
    for start in range(0, len(steps), size):
        bin_ = range(start, min(start + size, len(steps)))
        keep += sorted({min(bin_, key=found.__getitem__), max(bin_, key=found.__getitem__)})
    return [steps[i] for i in keep], [found[i] for i in keep]


def _threshold(axes, metrics: Metrics, events: list[Event]) -> None:
    known = sorted(
        (e.step.global_step, e.trigger.threshold)
        for e in events
        if e.trigger.threshold is not None and math.isfinite(e.trigger.threshold)
    )
    if not known:
        return
    style = {"color": THEME.muted, "linewidth": 1, "linestyle": (0, (4, 3)), "label": "threshold"}
    if len(known) == 1:
        axes.axhline(known[0][1], **style)
        return
    steps, levels = [s for s, _ in known], [t for _, t in known]
    first = min([*steps, *metrics.steps[:1]])
    last = max([*steps, *metrics.steps[-1:]])
    axes.step([first, *steps, last], [levels[0], *levels, levels[-1]], where="post", **style)


def _marks(axes, events: list[Event], hint: str) -> None:
    """Each event as a diamond that links to it; those without a finite norm stand at the top."""
    placed = [e for e in events if e.trigger.grad_norm is not None]
    placed.sort(key=lambda e: -_finite(e.trigger.grad_norm))
    finite = [e for e in placed if _finite(e.trigger.grad_norm) > 0][:LINKED]
    endless = [e for e in placed if not math.isfinite(e.trigger.grad_norm)][:LINKED]
    if finite:
        found = axes.scatter(
            [e.step.global_step for e in finite], [e.trigger.grad_norm for e in finite],
            marker="D", s=34, color=THEME.spike, zorder=4, label=f"event{hint}", clip_on=False,
        )  # fmt: skip
        found.set_urls([f"#event-{e.event_id}" for e in finite])
    if endless:
        found = axes.scatter(
            [e.step.global_step for e in endless], [1.0] * len(endless),
            transform=axes.get_xaxis_transform(), marker="v", s=40, color=THEME.spike, zorder=4,
            label="not finite", clip_on=False,
        )  # fmt: skip
        found.set_urls([f"#event-{e.event_id}" for e in endless])


def _states(axes, spans: Sequence[Span], height: float) -> dict[str, str]:
    """Draw each span as a bar above the axes; returns what each stands for, by its gid."""
    notes = {}
    for index, span in enumerate(spans):
        colour, share = STATE_MARKS[span.state]
        left, right = span.first - 0.5, span.last + 0.5
        (bar,) = axes.bar(
            [(left + right) / 2], [height * share], [right - left], [1 + height / 4], color=colour,
            transform=axes.get_xaxis_transform(), clip_on=False, linewidth=0,
        )  # fmt: skip
        if span.reasons:
            bar.set_gid(f"state-{index}")
            notes[f"state-{index}"] = span.note
    return notes


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0
