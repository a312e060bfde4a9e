# SPDX-License-Identifier: Apache-2.0
"""The gradient analyses' part of the HTML page: the same figures as the PNG files, as SVG."""

from pathlib import Path

from ..analyses.buckets import read_analyses
from ..errors import ReportError

MAX_STEPS = 6
"""Analysed steps that the page draws, the latest ones."""
TITLES = {
    "summary": "Summary",
    "plots": "Each bucket on its own",
    "loss_plots": "Losses",
    "reward_std": "Reward deviation",
    "normed_grads": "Per sample and per token",
}


def sections(path: Path) -> tuple[list[tuple[str, list[tuple[str, str]]]], int]:
    """The analyses to show, latest first, and how many more there are; none is no error.

    Of each step what was analysed, and title and ``<svg>`` of its figures.
    """
    try:
        analyses, _ = read_analyses(path)
    except ReportError:
        return [], 0
    from ..figures.buckets import FIGURES  # matplotlib takes a second to import, and few runs need it
    from ..figures.svg import to_svg

    made = []
    for analysis in list(analyses.values())[: -MAX_STEPS - 1 : -1]:
        figures = [
            (title, to_svg(FIGURES[name](analysis), f"b{analysis.step}-{name}", title))
            for name, title in TITLES.items()
        ]
        rows = analysis.get("all", "sample_count")
        made.append((f"Step {analysis.step}: {len(analysis.buckets)} buckets of {rows:.0f} rows", figures))
    return made, len(analyses) - len(made)
