# SPDX-License-Identifier: Apache-2.0
"""The trigger's picture as a file of its own: an SVG, or a page that follows the reader's theme."""

import io
from collections.abc import Mapping, Sequence

from ..figures.palette import LIGHT, THEME
from ..figures.svg import to_svg
from ..figures.trigger import draw
from ..runs.trigger import Judged
from .page import fill

TITLE = "What the trigger would have flagged"


def svg(runs: Mapping[str, Sequence[Judged]]) -> str:
    """A picture that needs nothing around it."""
    import matplotlib

    sink = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gradloc"}):
        draw(runs, LIGHT, TITLE).savefig(sink, format="svg", facecolor=LIGHT.card, metadata={"Date": None})
    return sink.getvalue()


def html(runs: Mapping[str, Sequence[Judged]]) -> str:
    """The report's page around the picture, with the flagged steps below it."""
    spikes = [(name, judged) for name, steps in runs.items() for judged in steps if judged.spike]
    payload = {"labels": {}, "events": {}, "rows": [], "charts": {}}
    return fill(
        "trigger.html", figure=to_svg(draw(runs, THEME, TITLE), "trigger", TITLE), spikes=spikes, payload=payload
    )
