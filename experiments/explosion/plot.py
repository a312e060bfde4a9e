# SPDX-License-Identifier: Apache-2.0
"""Norms, rewards and distances over the steps, one line for each run."""

import io

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from experiments.explosion.readings import Reading, distance  # noqa: E402


def draw(readings: list[Reading], twins: dict[str, Reading]) -> bytes:
    """The figure as a PNG: gradient norm (log), training reward, distance from the healthy twin.

    Args:
        readings: one for each run.
        twins: the healthy run to compare with, by the run's name.
    """
    figure, (norms, rewards, distances) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for index, reading in enumerate(readings):
        style = {"color": plt.cm.tab10(index % 10), "label": reading.name, "linewidth": 1.3}
        if reading is twins.get(reading.name):
            style.update(color="black", linewidth=2.2, zorder=9)
        steps = sorted(reading.steps)
        norms.plot(steps, [reading.norms[step] for step in steps], **style)
        scores = [reading.steps[step]["critic/score/mean"] for step in steps]
        rewards.plot(steps, scores, **style)
        twin = twins.get(reading.name)
        if twin is not None:
            pairs = zip(reading.weights, twin.weights, strict=False)
            distances.plot([distance(one, other) for one, other in pairs], **style)
    norms.set(yscale="log", title="largest gradient norm, before clipping", xlabel="step")
    rewards.set(title="mean reward of the step's rollouts", xlabel="step")
    distances.set(title="weights' distance from the healthy twin's", xlabel="steps taken")
    for axes in (norms, rewards, distances):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(*norms.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    out = io.BytesIO()
    # Without metadata two drawings of the same runs are the same bytes.
    figure.savefig(out, format="png", dpi=90, metadata={"Software": None})
    plt.close(figure)
    return out.getvalue()
