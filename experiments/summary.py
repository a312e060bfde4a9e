# SPDX-License-Identifier: Apache-2.0
"""What ends an experiment with arms: its table, on the terminal and as `summary.md`. Standard library only."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from experiments.errors import ExperimentError

Table = list[list[str]]
"""Its lines, the names of the columns first."""


def print_summary(
    doc: str, legend: str, read: Callable[[list[Path]], tuple[Table, list[str]]], argv: list[str] | None
) -> int:
    """Runs a summary's command line, `python -m MODULE SUITE_DIR [SUITE_DIR ...]`; returns the exit code.

    Args:
        doc: the module's docstring; its first line describes the command.
        legend: what is printed below the table.
        read: makes of the suites' folders the table, and the names of the runs that did not end well.
        argv: the arguments; None for the process's.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("suite_dirs", type=Path, nargs="+", metavar="SUITE_DIR")
    folders = parser.parse_args(argv).suite_dirs
    try:
        table, failed = read(folders)
        if len(table) < 2:
            raise ExperimentError(f"no run in {folders[0]} ended well: there is nothing to compare.")
    except ExperimentError as error:
        print(f"summary: {error}", file=sys.stderr)
        return error.exit_code
    print(f"\n{as_text(table)}\n\n{legend}")
    if failed:
        print(f"without {', '.join(failed)}, which did not end well")
    (folders[0] / "summary.md").write_text(f"{as_markdown(table)}\n", encoding="utf-8")
    return 0


def as_text(table: Table) -> str:
    """For a terminal."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in table)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def as_markdown(table: Table) -> str:
    """For a page."""
    head, *body = table
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *body])
