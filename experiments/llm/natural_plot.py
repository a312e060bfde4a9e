# SPDX-License-Identifier: Apache-2.0
"""The figure of docs/natural-spikes.md: every event's norm with and without its culprits, and the largest one's place.

python -m experiments.llm.natural_plot NATURAL.json OUT.png
"""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

from experiments.llm.natural import MODES  # noqa: E402


def draw(told: dict[str, Any], path: Path) -> None:
    """Write the figure of a record of :mod:`.natural` as a PNG."""
    observed = [event for event in told["events"] if event["mode"] == MODES[0]]
    observed.sort(key=lambda event: event["norm"])
    arms = list(dict.fromkeys(event["arm"] for event in told["events"]))
    figure, (steps, places) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, event in enumerate(observed):
        color = plt.cm.tab10(arms.index(event["arm"]))
        ends = (event["norm_after"] or event["norm"], event["norm"])
        steps.plot([number, number], ends, color=color, linewidth=1.2, alpha=0.6)
        steps.plot(number, ends[1], "o", color=color, markersize=5)
        steps.plot(number, ends[0], "o", color=color, markersize=5, markerfacecolor="white")
        steps.plot(number, event["threshold"], "_", color="black", markersize=7)
        largest = event["largest"]
        if largest and largest["p"][0] and largest["ratio"]:
            places.plot(largest["p"][0], largest["ratio"], "o", color=color, markersize=6, alpha=0.7)
    for number, arm in enumerate(arms):
        steps.plot([], [], "o", color=plt.cm.tab10(number), label=arm)
    steps.set(yscale="log", title="gradient norm, and (hollow) without what is named", xlabel="event, by its norm")
    steps.plot([], [], "_", color="black", label="threshold")
    steps.legend(frameon=False)
    places.set(xscale="log", yscale="log", title="the largest culprit", xlabel="its probability when it was sampled")
    places.set_ylabel("importance ratio at the spike")
    # Without metadata two drawings of the same record are the same bytes.
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)
