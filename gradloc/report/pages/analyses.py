# SPDX-License-Identifier: Apache-2.0
"""The gradient analyses' part of the HTML page: the same figures as the PNG files, as SVG."""

from dataclasses import dataclass
from pathlib import Path

from ..analyses.buckets import read_analyses
from ..errors import ReportError
from ..figures.palette import THEME

MAX_STEPS = 6
"""Analysed steps that the page draws, the latest ones."""
TITLES = {
    "summary": "Summary",
    "plots": "Each bucket on its own",
    "loss_plots": "Losses",
    "reward_std": "Reward deviation",
    "normed_grads": "Per sample and per token",
}


@dataclass(frozen=True)
class Section:
    """One analysed step."""

    step: int
    summary: str
    figures: list[tuple[str, str]]
    """Title and ``<svg>`` of each."""


def sections(path: Path) -> tuple[list[Section], int]:
    """The analyses to show, latest first, and how many more there are; none is no error."""
    try:
        analyses, _ = read_analyses(path)
    except ReportError:
        return [], 0
    from ..figures.buckets import FIGURES  # matplotlib takes a second to import, and few runs need it
    from ..figures.svg import to_svg

    shown = list(analyses.values())[: -MAX_STEPS - 1 : -1]
    made = []
    for analysis in shown:
        figures = [
            (title, to_svg(FIGURES[name](analysis, THEME), f"b{analysis.step}-{name}", title))
            for name, title in TITLES.items()
        ]
        rows = analysis.get("all", "sample_count")
        text = f"Step {analysis.step}: {len(analysis.buckets)} buckets of {rows:.0f} rows"
        made.append(Section(analysis.step, text, figures))
    return made, len(analyses) - len(shown)
