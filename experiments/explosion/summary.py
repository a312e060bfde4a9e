# SPDX-License-Identifier: Apache-2.0
"""Compares the runs of the explosion: a table and a plot.

    python -m experiments.explosion.summary SUITE_DIR

It writes `summary.md` and `summary.png` beside the runs' folders.
"""

import sys
from pathlib import Path

from experiments import suite
from experiments.explosion import plot, readings, table
from experiments.suite import Table, print_summary

TWIN = "healthy"
"""The arm that the others are compared with, seed by seed."""


def collect(folder: Path):
    """The readings of the runs that ended well, the twin of each, and the runs that did not.

    Raises:
        ExperimentError: if the folder is not a suite, or a run that ended well cannot be read.
    """
    cells = suite.read(folder)["cells"]
    well = [cell for cell in cells if cell["exit_code"] == 0]
    runs = {cell["folder"]: readings.read(folder / cell["folder"], cell["folder"]) for cell in well}
    by_seed = {cell["seed"]: runs[cell["folder"]] for cell in well if cell["arm"] == TWIN}
    twins = {cell["folder"]: by_seed[cell["seed"]] for cell in well if cell["seed"] in by_seed}
    return list(runs.values()), twins, [c["folder"] for c in cells if c["exit_code"] != 0]


def read(folders: list[Path]) -> tuple[Table, list[str]]:
    """The table of the first folder's suite, drawn as well; and its runs that did not end well."""
    runs, twins, failed = collect(folders[0])
    if runs:
        (folders[0] / "summary.png").write_bytes(plot.draw(runs, twins))
    return [table.HEADER, *table.rows(runs, twins)], failed


def main(argv=None) -> int:
    return print_summary(__doc__, table.LEGEND, read, argv)


if __name__ == "__main__":
    sys.exit(main())
