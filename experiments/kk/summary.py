# SPDX-License-Identifier: Apache-2.0
"""Compares the arms of kk-demo: a table over seeds and a plot. It reports; it does not judge.

    python -m experiments.kk.summary SUITE_DIR

It writes `summary.md` and `summary.png` beside the runs' folders.
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from experiments import suite
from experiments.errors import ExperimentError
from experiments.kk.wording import DATA_SOURCE
from experiments.suite import Table, print_summary

LAST_STEPS = 5
"""How many steps at the end of a run the training reward is averaged over."""
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


@dataclass(frozen=True)
class Run:
    """What one run's metrics say."""

    arm: str
    seed: int | None
    rewards: tuple[float, ...]
    """The mean reward of each step's rollouts."""
    final: dict[str, float]
    """The last validation's means: `reward`, `acc`, `wrong_answer`, `format_error`."""

    def reading(self, key: str) -> float:
        """One of the table's values."""
        if key == "train":
            return statistics.fmean(self.rewards[-LAST_STEPS:])
        return self.final.get(key, math.nan)


def read(folders: list[Path]) -> tuple[Table, list[str]]:
    """The table of the first folder's suite, drawn as well; and its runs that did not end well.

    Raises:
        ExperimentError: if there is no suite, or a run that ended well cannot be read.
    """
    (folder, *_), runs, failed = folders, [], []
    for cell in suite.read(folder)["cells"]:
        if cell["exit_code"] == 0:
            runs.append(read_run(folder / cell["folder"], cell["arm"], cell["seed"]))
        else:
            failed.append(cell["folder"])
    if runs:
        draw(runs, folder / "summary.png")
    return table(runs), failed


def read_run(folder: Path, arm: str, seed: int | None) -> Run:
    """Reads one run's metrics.

    Raises:
        ExperimentError: if they are missing or cut off.
    """
    path = folder / "metrics.jsonl"
    try:
        lines = [json.loads(line)["data"] for line in path.read_text(encoding="utf-8").splitlines()]
        rewards = tuple(line[SCORE] for line in lines if SCORE in line)
        final = {}
        for name, value in lines[-1].items():
            # val-core/kk_logic2/acc/mean@4
            parts = name.split("/")
            if parts[0].startswith("val-") and parts[1].startswith(DATA_SOURCE):
                if parts[3].startswith("mean@"):
                    final[parts[2]] = value
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ExperimentError(f"{path} cannot be read: {error}.") from None
    if not rewards:
        raise ExperimentError(f"{path} has no step: the run was cut off.")
    return Run(arm, seed, rewards, final)


def by_arm(runs: list[Run]) -> dict[str, list[Run]]:
    """The runs of each arm, arms in the order in which they ran."""
    groups = defaultdict(list)
    for run in runs:
        groups[run.arm].append(run)
    return dict(groups)


def table(runs: list[Run]) -> Table:
    """The cells, a line of names first."""
    lines = [["arm", "seeds", *READINGS]]
    for arm, group in by_arm(runs).items():
        values = [[run.reading(key) for run in group] for key in READINGS.values()]
        lines.append([arm, str(len(group)), *map(spread, values)])
    return lines


def spread(values: list[float]) -> str:
    """Mean and sample standard deviation; the mean alone of one value, a dash if one is missing.

    >>> spread([1.0, 2.0])
    '1.50 ± 0.71'
    """
    if any(map(math.isnan, values)):
        return "-"
    mean = f"{statistics.fmean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def draw(runs: list[Run], path: Path) -> None:
    """Draws the training reward over steps: each arm's mean over seeds, from least to most."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for index, (arm, group) in enumerate(by_arm(runs).items()):
        num_steps = min(len(run.rewards) for run in group)
        steps = range(1, num_steps + 1)
        columns = list(zip(*(run.rewards[:num_steps] for run in group), strict=True))
        color = f"C{index}"
        axes.plot(steps, [statistics.fmean(c) for c in columns], color=color, label=arm)
        if len(group) > 1:
            low, high = [min(c) for c in columns], [max(c) for c in columns]
            axes.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
    axes.set(xlabel="step", ylabel="mean reward of the step's rollouts")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("kk-demo: mean over seeds; the band runs from the least to the most")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    # Without metadata two drawings of the same runs are the same bytes.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main(argv=None) -> int:
    return print_summary(__doc__, LEGEND, read, argv)


if __name__ == "__main__":
    sys.exit(main())
