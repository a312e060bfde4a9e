# SPDX-License-Identifier: Apache-2.0
"""Draw a quartile analysis: panels (c) to (f) of Fig. 1 of arXiv 2505.12929, and more.

A violin is the histogram of one quartile's probability changes; orange where its tokens were
updated, blue where they were not. The box holds half of the tokens, the thick line 90 %, the thin
one all.
"""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ...explain.numbers import number, percent
from ...record.analysis import QUARTILES, Change, Moved, QuartileAnalysis, Update
from .palette import LIGHT
from .style import dress

PLACES = np.arange(len(QUARTILES))
UPDATED = {"all": range(len(QUARTILES)), "lowest": (0,), "highest": (len(QUARTILES) - 1,)}
SPLITS = {"quantile": "four parts of equally many tokens", "range": "quarters of the probabilities"}
PANELS = {
    "all": "(c) after updating all tokens",
    "lowest": "(e) after updating the lowest quartile",
    "highest": "(f) after updating the highest quartile",
}
WIDTH = 0.42
"""Half of a violin's width where it is widest."""
_MOMENTUM = 0.05
"""Part of the whole step's norm from which a step without any gradient is drawn apart."""


def figure_of(analysis: QuartileAnalysis) -> Figure:
    """Draw shares, (d) norms and single tokens; then the changes (c), (e) and (f).

    The optimizer's momentum moves the weights even without a gradient. If that is a notable part of the step, a further
    row shows the changes without it.
    """
    none, whole = analysis.updates.get("none"), analysis.updates.get("all")
    has_momentum = none is not None and whole is not None and none.update_norm > _MOMENTUM * whole.update_norm
    kinds = ("changes", "own_changes") if has_momentum else ("changes",)
    figure = Figure(figsize=(13, 4.0 + 3.6 * len(kinds)), layout="constrained")
    (shares, norms, tokens), *rows = figure.subplots(1 + len(kinds), 3)
    _draw_shares(shares, analysis)
    _draw_norms(norms, analysis)
    _draw_tokens(tokens, analysis)
    for row, kind in zip(rows, kinds, strict=True):
        _draw_changes(row, analysis, kind)
    for axes in (shares, norms, *(axes for row in rows for axes in row)):
        _name_quartiles(axes, analysis)
    colours = {"updated": LIGHT.spike, "not updated": LIGHT.calm}
    handles = [Patch(facecolor=colour, alpha=0.5, label=label) for label, colour in colours.items()]
    rows[0][1].legend(handles=handles, frameon=False, fontsize=8, loc="lower left", ncols=2)
    split = SPLITS.get(analysis.split, analysis.split)
    dress(figure, f"Gradient by the tokens' probability, step {analysis.global_step} (in {split})")
    return figure


def _draw_shares(axes: Axes, analysis: QuartileAnalysis) -> None:
    """Draw each quartile's share of the tokens and of the gradient."""
    axes.set_title("Share of the tokens, share of the gradient")
    for offset, name, colour, label in (
        (-0.2, "token_share", LIGHT.line, "of the tokens"),
        (0.2, "gradient_share", LIGHT.violet, "of the gradient, <part, whole> / |whole|²"),
    ):
        shares = [getattr(quartile, name) for quartile in analysis.quartiles]
        values = [math.nan if share is None else share for share in shares]
        axes.bar(PLACES + offset, values, 0.38, color=colour, label=label)
        for place, value in zip(PLACES + offset, values, strict=True):
            if math.isfinite(value):
                top = max(value, 0.0)
                axes.text(place, top, percent(value), ha="center", va="bottom", fontsize=8, color=LIGHT.ink)
    axes.axhline(0, color=LIGHT.muted, linewidth=0.8)
    axes.margins(y=0.3)
    axes.legend(frameon=False, fontsize=8, loc="upper center")


def _draw_norms(axes: Axes, analysis: QuartileAnalysis) -> None:
    """Draw panel (d): the norm of each quartile's part, and of the whole for reference."""
    axes.set_title("(d) norm of the gradient of a quartile's tokens")
    norms = [quartile.norm if quartile.num_tokens else math.nan for quartile in analysis.quartiles]
    axes.plot(PLACES, norms, "o-", color=LIGHT.violet, linewidth=1.8, markersize=6)
    for place, norm in zip(PLACES, norms, strict=True):
        if math.isfinite(norm):
            offset = {"xytext": (7, 5), "textcoords": "offset points"}
            axes.annotate(number(norm, 2), (place, norm), fontsize=8.5, color=LIGHT.ink, **offset)
    whole = analysis.whole.norm
    if math.isfinite(whole):
        label = f"all tokens: {number(whole, 2)}"
        axes.axhline(whole, color=LIGHT.danger, linestyle=(0, (4, 2)), linewidth=1.2, label=label)
        axes.legend(frameon=False, fontsize=8.5, loc="lower left")
    axes.set_xlim(-0.5, len(QUARTILES) - 0.5)
    top = max([norm for norm in (*norms, whole) if math.isfinite(norm)], default=1.0)
    axes.set_ylim(0, 1.2 * top if top > 0 else 1.0)


def _draw_tokens(axes: Axes, analysis: QuartileAnalysis) -> None:
    """Draw each sampled token's gradient norm against 1 - pi."""
    correlation = number(analysis.rank_correlation.log_prob_norm, 2)
    axes.set_title(f"{len(analysis.tokens)} single tokens: rank correlation {correlation}")
    sampled = [token for token in analysis.tokens if math.isfinite(token.log_prob_norm)]
    for quartile, colour in enumerate((LIGHT.danger, LIGHT.spike, LIGHT.good, LIGHT.calm), start=1):
        mine = [(1.0 - token.probability, token.log_prob_norm) for token in sampled if token.quartile == quartile]
        if mine:
            dots = {"markersize": 4, "alpha": 0.65, "markeredgewidth": 0}
            axes.plot(*zip(*mine, strict=True), "o", color=colour, label=f"q{quartile}", **dots)
    norms = [token.log_prob_norm for token in sampled if token.log_prob_norm > 0]
    if norms and max(norms) > 30 * min(norms):
        axes.set_yscale("log")
    if norms:
        axes.legend(frameon=False, fontsize=8, loc="lower right", handletextpad=0.1)
    else:
        axes.text(0.5, 0.5, "no token was sampled", transform=axes.transAxes, ha="center", color=LIGHT.muted)
    axes.set_xlabel("1 - π")
    axes.set_ylabel("norm of the gradient of log π")
    axes.set_xlim(-0.03, 1.03)


def _draw_changes(row: list[Axes], analysis: QuartileAnalysis, kind: str) -> None:
    """Draw the changes of each quartile's probabilities: a panel per update, on one scale."""
    updates = {name: analysis.updates.get(name) for name in PANELS}
    moved = {name: None if update is None else getattr(update, kind) for name, update in updates.items()}
    changes = [change for panel in moved.values() if panel for change in panel.quartiles if change is not None]
    ends = [abs(change.percentiles[end]) for change in changes for end in (0, -1)]
    largest = max((end for end in ends if math.isfinite(end)), default=0.0)
    for axes, name in zip(row, PANELS, strict=True):
        _draw_violins(axes, updates[name], moved[name], name)
        is_own = kind == "own_changes"
        head = f"{PANELS[name][:3]} without the optimizer's momentum" if is_own else PANELS[name]
        axes.set_title(f"{head}\n{_numbers(updates[name], moved[name], name, is_own)}")
        if largest > 0:
            axes.set_ylim(-1.08 * largest, 1.08 * largest)


def _numbers(update: Update | None, moved: Moved | None, name: str, is_own: bool) -> str:
    if update is None or moved is None:
        return ""
    if name == "all" or moved.agreement is None:
        return "" if is_own else f"step of norm {number(update.update_norm, 2)}"
    return f"against (c): r = {number(moved.agreement.correlation, 2)}, size x {number(moved.agreement.ratio, 2)}"


def _draw_violins(axes: Axes, update: Update | None, moved: Moved | None, name: str) -> None:
    axes.axhline(0, color=LIGHT.muted, linewidth=0.8)
    axes.set_xlim(-0.5, len(QUARTILES) - 0.5)
    axes.set_ylabel("change of probability")
    if moved is None:
        why = "no gradient, no update" if update is None else "the norm is not finite: no step"
        axes.text(0.5, 0.6, why, transform=axes.transAxes, ha="center", color=LIGHT.muted)
        return
    for place, change in enumerate(moved.quartiles):
        if change is not None:
            colour = LIGHT.spike if place in UPDATED[name] else LIGHT.calm
            _draw_violin(axes, place, change, moved.edges, colour)


def _draw_violin(axes: Axes, place: int, change: Change, edges: list[float], colour: str) -> None:
    low, p5, p25, p50, p75, p95, high = change.percentiles
    counts = np.array(change.counts, dtype=float)
    if counts.sum() > 0 and high > low:
        centres = (np.array(edges[1:]) + np.array(edges[:-1])) / 2
        kernel = np.exp(-(np.linspace(-2, 2, 7) ** 2) / 2)  # a normal curve over seven bins smooths the histogram
        density = np.convolve(counts, kernel / kernel.sum())[3:-3]
        # as far as the tokens go, and no farther
        inside = (centres >= low) & (centres <= high)
        at = np.concatenate([[low], centres[inside], [high]])
        wide = WIDTH * np.concatenate([[0.0], density[inside], [0.0]]) / density.max()
        axes.fill_betweenx(at, place - wide, place + wide, color=colour, alpha=0.35, linewidth=0)
        axes.plot(place - wide, at, place + wide, at, color=colour, linewidth=0.8)
    axes.vlines(place, low, high, color=LIGHT.muted, linewidth=0.9)
    axes.hlines([low, high], place - 0.09, place + 0.09, color=LIGHT.muted, linewidth=0.9)
    axes.vlines(place, p5, p95, color=LIGHT.ink, linewidth=2.0)
    box = {"facecolor": "white", "edgecolor": LIGHT.ink, "linewidth": 0.9, "zorder": 3}
    axes.fill_between([place - 0.07, place + 0.07], p25, p75, **box)
    axes.hlines(p50, place - 0.07, place + 0.07, color=LIGHT.ink, linewidth=1.2, zorder=4)


def _name_quartiles(axes: Axes, analysis: QuartileAnalysis) -> None:
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
