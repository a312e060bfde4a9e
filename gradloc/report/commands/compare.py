# SPDX-License-Identifier: Apache-2.0
"""Compare two runs side by side: ``gradloc compare RUN_A RUN_B``."""

import argparse
from pathlib import Path

from ...explain.text import one_line
from .. import output
from ..pages import page, terminal
from ..pages.document import Table
from ..pages.exports import paragraphs
from ..pages.script_data import comparison_chart
from ..runs.comparison import Comparison, compare
from ..runs.run import read_run
from . import add_log_arguments

MAX_LISTED = 30
"""The most steps and settings that the terminal lists."""
EPILOG = """\
examples:
  gradloc compare runs/a runs/b
  gradloc compare before.log after.log -o compare.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="a run's folder or log")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="another run's folder or log")
    add_log_arguments(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write an HTML page, or the format asked for")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--format", choices=("md", "json"), help="Markdown or JSON")
    form.add_argument("--json", action="store_const", const="json", dest="format", help="as --format json")


def run(args: argparse.Namespace) -> int:
    if args.output is not None:
        output.check(args.output, args.format, (args.run_a, args.run_b))
    runs = [read_run(path, None, args.metric, args.pattern) for path in (args.run_a, args.run_b)]
    comparison = compare(*runs)
    notes = [f"{one_line(str(folder.path))}: {note}" for folder in runs for note in folder.notes]
    for folder in runs:
        if len(folder.runs) > 1:
            holds = f"{one_line(str(folder.path))} holds {len(folder.runs)} runs"
            notes.append(f"{holds}: compared is the one with the worst norm, {folder.runs[0].name}.")
    if args.format == "json":
        output.deliver(args.output, output.as_json(vars(comparison) | {"notes": notes}))
    elif args.format == "md":
        output.deliver(args.output, _markdown(comparison))
    elif args.output is not None:
        chart = comparison_chart(runs, comparison)
        output.deliver(args.output, page.fill("compare.html", chart, comparison=comparison, notes=notes))
    else:
        _print(comparison)
    terminal.warn(notes)
    return 0


def _tables(comparison: Comparison) -> list[tuple[str, list[list[str]]]]:
    """Return each table's first column head and its rows."""
    spike = f"spike at {comparison.unit}"
    tables = {"": comparison.rows, spike: comparison.steps, "setting": comparison.settings}
    return [(head, rows) for head, rows in tables.items() if rows]


def _print(comparison: Comparison) -> None:
    console = terminal.console()
    console.print(comparison.parted)
    for head, rows in _tables(comparison):
        cells = ([one_line(cell, 90) for cell in row] for row in rows[:MAX_LISTED])
        console.print(terminal.table((head, *map(one_line, comparison.names)), cells, gap=3), "")
        if len(rows) > MAX_LISTED:
            console.print(f"And {len(rows) - MAX_LISTED} more; --format json has all.", style="dim")


def _markdown(comparison: Comparison) -> str:
    parts = [comparison.parted]
    for head, rows in _tables(comparison):
        parts += paragraphs(Table((head, *comparison.names), [tuple(row) for row in rows]))
    return "\n\n".join(parts) + "\n"
