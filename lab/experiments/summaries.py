# SPDX-License-Identifier: Apache-2.0
"""Compare the runs of suites by the tables of an experiment's module.

    python -m lab.experiments.summaries lab.experiments.kk.summary SUITE_DIR [SUITE_DIR ...]

Prints the tables and writes them to `summary.md` in the first folder. The module has a `LEGEND`, and a function `make`,
which turns the runs that ended well into tables and writes its other files into the first folder.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

from lab.experiments import suite
from lab.experiments.errors import ExperimentError
from lab.output import table

Table = list[list[str]]
"""Rows of cells; the first row holds the column names."""
Run = tuple[Path, suite.Cell]
"""A run's folder, and its entry in `suite.json`."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lab.experiments.summaries", description=__doc__.splitlines()[0])
    parser.add_argument("module")
    parser.add_argument("suite_dirs", type=Path, nargs="+", metavar="SUITE_DIR")
    args = parser.parse_args(argv)
    module, folders = importlib.import_module(args.module), args.suite_dirs
    try:
        runs = [(folder / cell["folder"], cell) for folder in folders for cell in suite.read(folder)["cells"]]
        well = [run for run in runs if run[1]["exit_code"] == 0]
        if not well:
            raise ExperimentError(f"no run in {folders[0]} ended well: there is nothing to compare.")
        tables = module.make(well, folders[0])
    except ExperimentError as error:
        print(f"summary: {error}", file=sys.stderr)
        return error.exit_code
    print("", *map(as_text, tables), module.LEGEND, sep="\n\n")
    if len(well) < len(runs):
        failed = [cell["folder"] for _, cell in runs if cell["exit_code"] != 0]
        print(f"without {', '.join(failed)}, which did not end well")
    (folders[0] / "summary.md").write_text("\n\n".join(map(table, tables)) + "\n", encoding="utf-8")
    return 0


def read_steps(folder: Path, name: str) -> dict[int, dict]:
    """Return the metrics of each step that logged the metric `name`, by step.

    Raises:
        ExperimentError: if the file is missing or truncated, or no step has the metric.
    """
    path = folder / "metrics.jsonl"
    steps: dict[int, dict] = {}
    try:
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            steps.setdefault(line["step"], {}).update(line["data"])
    except (OSError, ValueError, KeyError) as error:
        raise ExperimentError(f"{path} cannot be read: {error}.") from None
    found = {step: data for step, data in steps.items() if name in data}
    if not found:
        raise ExperimentError(f"{path} has no step: the run was cut off.")
    return found


def table_of(rows: list[dict[str, str]]) -> Table:
    """Return a table of rows that map a column's name to its cell; an empty one of none."""
    return [list(rows[0] if rows else ()), *(list(row.values()) for row in rows)]


def as_text(table: Table) -> str:
    """Format a table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in table)
    return "\n".join("  ".join(line).rstrip() for line in padded)


if __name__ == "__main__":
    sys.exit(main())
