# SPDX-License-Identifier: Apache-2.0
"""Compare the arms of kk-demo in a table over seeds and a plot.

Writes `summary.png` into the suite's folder.
"""

import re
import statistics
from pathlib import Path

from lab.experiments import summaries
from lab.experiments.kk.wording import DATA_SOURCE
from lab.output import figure

LAST_STEPS = 5
"""Number of final steps that the training reward is averaged over."""
SCORE = "critic/score/mean"
READINGS = {
    f"training reward, last {LAST_STEPS} steps": "train",
    "reward, unseen puzzles": "reward",
    "right": "acc",
    "wrong answer": "wrong_answer",
    "format error": "format_error",
}
LEGEND = """\
mean and, after ±, sample standard deviation over seeds. reward: from -3 (format error) to
3 (right), at temperature 1; the last four columns are the final weights' on puzzles that were never
trained on. Differences within the spread say nothing about the methods."""


Arms = dict[str, list[tuple[list[float], dict[str, float]]]]
"""Arm -> the results of `read` for its runs."""


def read(folder: Path) -> tuple[list[float], dict[str, float]]:
    """Return the mean reward of each step's rollouts, and the table's values by the values of `READINGS`.

    Raises:
        ExperimentError: if the run's metrics cannot be read.
    """
    steps = list(summaries.read_steps(folder, SCORE).values())
    rewards = [step[SCORE] for step in steps]
    found = {"train": statistics.fmean(rewards[-LAST_STEPS:])}
    for name, value in steps[-1].items():
        mean = re.fullmatch(rf"val-\w+/{DATA_SOURCE}\w*/(\w+)/mean@\d+", name)
        if mean:
            found[mean[1]] = value
    return rewards, found


def make(runs: list[summaries.Run], folder: Path) -> list[summaries.Table]:
    """Return the table of these runs; draw their plot into the folder."""
    arms: Arms = {}
    for run, cell in runs:
        arms.setdefault(cell["arm"], []).append(read(run))
    draw(arms, folder / "summary.png")
    table = [["arm", "seeds", *READINGS]]
    for arm, group in arms.items():
        values = ([found.get(key) for _, found in group] for key in READINGS.values())
        table.append([arm, str(len(group)), *map(spread, values)])
    return [table]


def spread(values: list[float | None]) -> str:
    """Format mean and sample standard deviation; a dash if a value is missing, only the mean of one value.

    >>> spread([1.0, 2.0])
    '1.50 ± 0.71'
    """
    if None in values:
        return "-"
    mean = f"{statistics.fmean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def draw(arms: Arms, path: Path) -> None:
    """Plot each arm's training reward over steps: mean, minimum and maximum over seeds."""
    with figure(path, 8, 1) as (_, axes):
        for index, (arm, group) in enumerate(arms.items()):
            columns = list(zip(*(rewards for rewards, _ in group), strict=False))  # as many as in the shortest run
            steps, color = range(1, len(columns) + 1), f"C{index}"
            axes.plot(steps, [statistics.fmean(c) for c in columns], color=color, label=arm)
            low, high = [min(c) for c in columns], [max(c) for c in columns]
            axes.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
        axes.set(xlabel="step", ylabel="mean reward of the step's rollouts")
        axes.locator_params(axis="x", integer=True)
        axes.set_title("kk-demo: mean over seeds; the band runs from the least to the most")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
