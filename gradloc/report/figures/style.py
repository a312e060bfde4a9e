# SPDX-License-Identifier: Apache-2.0
"""How the axes of a matplotlib figure look."""

from matplotlib.figure import Figure

from .palette import Palette


def dress(figure: Figure, palette: Palette, title: str) -> None:
    """Give a finished figure its title and its axes the one look: quiet, with lines to read heights by."""
    figure.suptitle(title, color=palette.ink, fontsize=13)
    for axes in figure.axes:
        axes.title.set_fontsize(10.5)
        axes.title.set_color(palette.ink)
        axes.tick_params(labelsize=8.5, colors=palette.muted)
        axes.yaxis.get_offset_text().set_fontsize(8)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set_color(palette.muted)
            label.set_fontsize(9)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(palette.line)
        if not axes.yaxis_inverted():  # a matrix, whose rows run down, has no heights
            axes.grid(axis="y", color=palette.line, linewidth=0.6)
            axes.set_axisbelow(True)
        legend = axes.get_legend()
        for text in legend.get_texts() if legend else ():
            text.set_color(palette.muted)
