# SPDX-License-Identifier: Apache-2.0
"""Draw each kind's fingerprint in one batch: python -m lab.benchmarks.mismatch.picture POOL.npz docs/mismatch.png."""

import sys

import numpy as np
from matplotlib.figure import Figure

from gradloc.mismatch import KINDS as TABLE
from gradloc.report.figures.palette import LIGHT
from gradloc.report.figures.style import dress

from .cases import KINDS, Maker

SEED, WIDTH, RANGE = 31, 4, 1.5


def main(pool: str, target: str) -> None:
    figure = Figure(figsize=(12, 7.6), layout="constrained")
    spots = figure.subplots(3, WIDTH, sharex=True, sharey=True).ravel()
    for axes, kind in zip(spots, KINDS, strict=False):
        maker = Maker(pool, SEED)
        found = (maker.healthy() if kind == "noise" else getattr(maker, kind)()).columns()  # bfloat16's
        d = np.clip(np.nan_to_num(found.difference, nan=-RANGE), -RANGE, RANGE)
        axes.scatter(found.trainer, d, s=3, color=LIGHT.calm, alpha=0.35, linewidths=0)
        axes.axhline(0, color=LIGHT.muted, linewidth=0.8)
        axes.set(title=TABLE[kind].title, xlim=(-12, 0.3), ylim=(-1.05 * RANGE, 1.05 * RANGE))
    for axes in spots[len(KINDS) :]:
        axes.set_axis_off()
    figure.supxlabel("trainer's log-prob, nats")
    figure.supylabel("trainer minus rollout, nats (cut at ±1.5)")
    dress(figure, "The fingerprints")
    figure.savefig(target, dpi=80)


if __name__ == "__main__":
    main(*sys.argv[1:])
