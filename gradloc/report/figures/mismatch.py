# SPDX-License-Identifier: Apache-2.0
"""Figures of two columns of log-probs: one against the other, the difference by position and by log-prob."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...mismatch import Columns
from .palette import LIGHT
from .style import dress

DOTS, BINS = 1000, 24


def figures_of(columns: Columns) -> list[tuple[str, Figure]]:
    """Draw three figures, with titles. Dots are a sample of the tokens, lines the 5, 50 and 95 % quantiles of all."""
    known = np.flatnonzero(np.isfinite(columns.difference))
    some = known[:: max(1, len(known) // DOTS)]
    trainer, rollout, difference = columns.trainer, columns.rollout, columns.difference
    minus = "Trainer minus rollout, by"
    titles = ("One column against the other", f"{minus} position in the row", f"{minus} log-prob")
    made = [(title, Figure(figsize=(4.4, 3.4), layout="constrained")) for title in titles]
    both, by_position, by_log_prob = (figure.subplots() for _, figure in made)
    both.scatter(rollout[some], trainer[some], s=4, color=LIGHT.calm, alpha=0.5, linewidths=0)
    low = float(np.quantile(np.concatenate([trainer[some], rollout[some]]), 0.01))
    both.plot([low, 0], [low, 0], color=LIGHT.muted, linewidth=0.8)
    both.set(xlabel="rollout, nats", ylabel="trainer, nats", xlim=(low, 0.1), ylim=(low, 0.1))
    _bands(by_position, columns.place[known].astype(float), difference[known])
    by_position.set(xlabel="position", ylabel="nats")
    _bands(by_log_prob, (trainer + rollout)[known] / 2, difference[known])
    by_log_prob.set(xlabel="log-prob, nats", ylabel="nats")
    for _, figure in made:
        dress(figure, "")
    return made


def _bands(axes: Axes, x: np.ndarray, y: np.ndarray) -> None:
    """Draw quantiles of ``y`` over bins of equally many tokens."""
    order = np.argsort(x, kind="stable")
    parts = [part for part in np.array_split(order, BINS) if len(part)]
    middles = [float(np.median(x[part])) for part in parts]
    lows, medians, highs = np.array([np.quantile(y[part], (0.05, 0.5, 0.95)) for part in parts]).T
    axes.fill_between(middles, lows, highs, color=LIGHT.calm, alpha=0.25, linewidth=0)
    axes.plot(middles, medians, color=LIGHT.spike, linewidth=1.2)
    axes.axhline(0, color=LIGHT.muted, linewidth=0.8)
