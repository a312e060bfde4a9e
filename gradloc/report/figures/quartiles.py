# SPDX-License-Identifier: Apache-2.0
"""The picture of a quartile analysis: panels (c) to (f) of Fig. 1 of arXiv 2505.12929, and more.

A violin is the histogram of one quartile's probability changes; orange where its tokens were
updated, blue where they were not. The box holds half of the tokens, the thick line 90 %, the thin
one all.
"""

import math
from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ...record.analysis import QUARTILES, Change, Moved, Update
from ...words.numbers import number, percent
from ..analyses.quartiles import SPLITS, Analysis
from .palette import LIGHT, Palette
from .style import dress

PLACES = np.arange(len(QUARTILES))
UPDATED = {"all": range(len(QUARTILES)), "lowest": (0,), "highest": (len(QUARTILES) - 1,)}
PANELS = {
    "all": "(c) after updating all tokens",
    "lowest": "(e) after updating the lowest quartile",
    "highest": "(f) after updating the highest quartile",
}
OWN = "{} without the optimizer's momentum"
WIDTH = 0.42
"""Half of a violin's width where it is widest."""


def figure_of(analysis: Analysis, palette: Palette = LIGHT) -> Figure:
    """Shares, (d) norms, tokens one by one; then the changes (c), (e) and (f).

    Where the optimizer moves the weights without any gradient, the changes once more without that.
    """
    kinds = ("changes", "own_changes") if analysis.has_momentum else ("changes",)
    figure = Figure(figsize=(13, 4.0 + 3.6 * len(kinds)), layout="constrained")
    top, *rows = figure.subplots(1 + len(kinds), 3)
    _shares(top[0], analysis, palette)
    _norms(top[1], analysis, palette)
    _tokens(top[2], analysis, palette)
    for row, kind in zip(rows, kinds, strict=True):
        moved = {name: _moved(analysis.updates.get(name), kind) for name in PANELS}
        largest = _largest(moved.values())
        for axes, name in zip(row, PANELS, strict=True):
            _violins(axes, analysis.updates.get(name), moved[name], name, palette)
            is_own = kind == "own_changes"
            head = OWN.format(PANELS[name][:3]) if is_own else PANELS[name]
            axes.set_title(f"{head}\n{_said(analysis.updates.get(name), moved[name], name, is_own)}")
            if largest > 0:
                axes.set_ylim(-1.08 * largest, 1.08 * largest)
    for axes in (top[0], top[1], *(axes for row in rows for axes in row)):
        _name_quartiles(axes, analysis)
    _explain(rows[0][1], palette)
    title = f"Gradient by the tokens' probability, step {analysis.global_step}"
    title += f" (in {SPLITS.get(analysis.split, analysis.split)})"
    dress(figure, palette, title)
    return figure


def _shares(axes: Axes, analysis: Analysis, palette: Palette) -> None:
    """Of the tokens and of the gradient, side by side."""
    axes.set_title("Share of the tokens, share of the gradient")
    for offset, name, colour, label in (
        (-0.2, "token_share", palette.line, "of the tokens"),
        (0.2, "gradient_share", palette.violet, "of the gradient, <part, whole> / |whole|²"),
    ):
        values = [_or_nan(getattr(quartile, name)) for quartile in analysis.quartiles]
        axes.bar(PLACES + offset, values, 0.38, color=colour, label=label)
        for place, value in zip(PLACES, values, strict=True):
            if math.isfinite(value):
                text = percent(value)
                at = max(value, 0.0)
                axes.text(place + offset, at, text, ha="center", va="bottom", fontsize=8, color=palette.ink)
    axes.axhline(0, color=palette.muted, linewidth=0.8)
    axes.margins(y=0.3)
    axes.legend(frameon=False, fontsize=8, loc="upper center")


def _norms(axes: Axes, analysis: Analysis, palette: Palette) -> None:
    """Panel (d): the norm of each quartile's part, and of the whole for reference."""
    axes.set_title("(d) norm of the gradient of a quartile's tokens")
    values = [quartile.norm if quartile.num_tokens else math.nan for quartile in analysis.quartiles]
    axes.plot(PLACES, values, "o-", color=palette.violet, linewidth=1.8, markersize=6)
    for place, value in zip(PLACES, values, strict=True):
        if math.isfinite(value):
            axes.annotate(
                number(value, 2), (place, value), (7, 5), textcoords="offset points", fontsize=8.5, color=palette.ink
            )
    whole = analysis.whole.norm
    if math.isfinite(whole):
        label = f"all tokens: {number(whole, 2)}"
        axes.axhline(whole, color=palette.danger, linestyle=(0, (4, 2)), linewidth=1.2, label=label)
        axes.legend(frameon=False, fontsize=8.5, loc="lower left")
    axes.set_xlim(-0.5, len(QUARTILES) - 0.5)
    top = max([value for value in (*values, whole) if math.isfinite(value)], default=1.0)
    axes.set_ylim(0, 1.2 * top if top > 0 else 1.0)


def _tokens(axes: Axes, analysis: Analysis, palette: Palette) -> None:
    """Every sampled token: its own gradient norm against 1 - pi."""
    found = analysis.rank_correlation.log_prob_norm
    axes.set_title(f"{len(analysis.tokens)} single tokens: rank correlation {number(found, 2)}")
    shades = (palette.danger, palette.spike, palette.good, palette.calm)
    drawn = []
    for index, shade in enumerate(shades):
        mine = [
            token for token in analysis.tokens if token.quartile == index + 1 and math.isfinite(token.log_prob_norm)
        ]
        distances = [1.0 - token.probability for token in mine]
        norms = [token.log_prob_norm for token in mine]
        drawn += [norm for norm in norms if norm > 0]
        if mine:
            axes.plot(
                distances, norms, "o", color=shade, markersize=4, alpha=0.65, markeredgewidth=0, label=f"q{index + 1}"
            )
    if not drawn:
        axes.text(0.5, 0.5, "no token was sampled", transform=axes.transAxes, ha="center", color=palette.muted)
    elif max(drawn) > 30 * min(drawn):
        axes.set_yscale("log")
    if drawn:
        axes.legend(frameon=False, fontsize=8, loc="lower right", handletextpad=0.1)
    axes.set_xlabel("1 - π")
    axes.set_ylabel("norm of the gradient of log π")
    axes.set_xlim(-0.03, 1.03)


def _moved(update: Update | None, kind: str) -> Moved | None:
    return None if update is None else getattr(update, kind)


def _violins(axes: Axes, update: Update | None, moved: Moved | None, name: str, palette) -> None:
    """How the probabilities of each quartile's tokens changed."""
    axes.axhline(0, color=palette.muted, linewidth=0.8)
    axes.set_xlim(-0.5, len(QUARTILES) - 0.5)
    axes.set_ylabel("change of probability")
    if moved is None:
        why = "no gradient, no update" if update is None else "the norm is not finite: no step"
        axes.text(0.5, 0.6, why, transform=axes.transAxes, ha="center", color=palette.muted)
        return
    for place, change in enumerate(moved.quartiles):
        if change is not None:
            colour = palette.spike if place in UPDATED[name] else palette.calm
            _violin(axes, place, change, moved.edges, colour, palette)


def _said(update: Update | None, moved: Moved | None, name: str, is_own: bool) -> str:
    """The numbers under a panel's title."""
    if update is None or moved is None:
        return ""
    if name == "all" or moved.agreement is None:
        return "" if is_own else f"step of norm {number(update.update_norm, 2)}"
    found = moved.agreement
    return f"against (c): r = {number(found.correlation, 2)}, size x {number(found.ratio, 2)}"


def _violin(axes: Axes, place: int, change: Change, edges: list[float], colour: str, palette: Palette) -> None:
    low, most, quarter, middle, third, nearly, high = change.percentiles
    counts = np.array(change.counts, dtype=float)
    if counts.sum() > 0 and high > low:
        centres = (np.array(edges[1:]) + np.array(edges[:-1])) / 2
        kernel = np.exp(-(np.linspace(-2, 2, 7) ** 2) / 2)
        density = np.convolve(counts, kernel / kernel.sum())[3:-3]
        # as far as the tokens go, and no farther
        inside = (centres >= low) & (centres <= high)
        at = np.concatenate([[low], centres[inside], [high]])
        wide = WIDTH * np.concatenate([[0.0], density[inside], [0.0]]) / density.max()
        axes.fill_betweenx(at, place - wide, place + wide, color=colour, alpha=0.35, linewidth=0)
        axes.plot(place - wide, at, place + wide, at, color=colour, linewidth=0.8)
    axes.vlines(place, low, high, color=palette.muted, linewidth=0.9)
    axes.hlines([low, high], place - 0.09, place + 0.09, color=palette.muted, linewidth=0.9)
    axes.vlines(place, most, nearly, color=palette.ink, linewidth=2.0)
    axes.fill_between(
        [place - 0.07, place + 0.07], quarter, third, facecolor="white", edgecolor=palette.ink, linewidth=0.9, zorder=3
    )
    axes.hlines(middle, place - 0.07, place + 0.07, color=palette.ink, linewidth=1.2, zorder=4)


def _largest(panels: Iterable[Moved | None]) -> float:
    """The largest change of any token in any panel."""
    changes = [c for moved in panels if moved for c in moved.quartiles if c is not None]
    ends = [abs(c.percentiles[end]) for c in changes for end in (0, -1)]
    return max((end for end in ends if math.isfinite(end)), default=0.0)


def _name_quartiles(axes: Axes, analysis: Analysis) -> None:
    """Which probabilities, how many tokens."""
    labels = []
    for index, quartile in enumerate(analysis.quartiles):
        if analysis.split == "range":
            span = f"{index / len(QUARTILES):.2f} to {(index + 1) / len(QUARTILES):.2f}"
        elif quartile.probability is None:
            span = "empty"
        else:
            span = f"{quartile.probability.min:.2g} to {quartile.probability.max:.2g}"
        labels.append(f"{span}\nn={quartile.num_tokens:,}")
    axes.set_xticks(PLACES, labels)
    axes.set_xlabel("probability before the update, number of tokens")


def _explain(axes: Axes, palette: Palette) -> None:
    """What the two colours of the violins mean."""
    handles = [
        Patch(facecolor=palette.spike, alpha=0.5, label="updated"),
        Patch(facecolor=palette.calm, alpha=0.5, label="not updated"),
    ]
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="lower left", ncols=2)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
