# SPDX-License-Identifier: Apache-2.0
"""How the axes of a matplotlib figure look."""

from matplotlib.figure import Figure

from .palette import LIGHT


def dress(figure: Figure, title: str) -> None:
    """Gives a finished figure its title and its axes the one look: quiet, with lines to read heights by."""
    figure.suptitle(title, color=LIGHT.ink, fontsize=13)
    for axes in figure.axes:
        axes.title.set(fontsize=10.5, color=LIGHT.ink)
        axes.tick_params(labelsize=8.5, colors=LIGHT.muted)
        axes.yaxis.get_offset_text().set_fontsize(8)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set(fontsize=9, color=LIGHT.muted)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(LIGHT.line)
        if not axes.yaxis_inverted():  # a matrix, whose rows run down, has no heights
            axes.grid(axis="y", color=LIGHT.line, linewidth=0.6)
            axes.set_axisbelow(True)
        legend = axes.get_legend()
        for text in legend.get_texts() if legend else ():
            text.set_color(LIGHT.muted)
