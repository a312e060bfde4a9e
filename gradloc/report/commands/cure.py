# SPDX-License-Identifier: Apache-2.0
"""``gradloc-report cure RUN_DIR``: which single setting heals how many of a run's events."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from ...record import Cured, Event
from ...words.text import one_line, plural
from ..errors import ReportError
from ..pages import terminal
from ..runs.run import read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="RUN_DIR", help="a run's folder or its events.jsonl")


def run(args: argparse.Namespace) -> int:
    folder = read_run(args.path, None, None)
    told = [event for event in folder.events if event.cures is not None]
    if not told:
        why = "no event of it says which settings were tried: gradloc.search.max_cures is 0, or it has none"
        raise ReportError(f"{args.path}: {why}.")
    console, counted = terminal.console(), tally(told)
    if not counted:
        console.print(
            f"No setting that this trainer has would have changed {plural(len(told), 'event')}: look at the cause, "
            f"gradloc-report {args.path}"
        )
        return 0
    table = Table("heals", "does not", "not known", "setting", box=None, padding=(0, 2, 0, 0))
    for line, heals, fails in counted:
        table.add_row(f"{heals} of {len(told)}", str(fails), str(len(told) - heals - fails), one_line(line, 120))
    console.print(table)
    left_out = len(folder.events) - len(told)
    if left_out:
        console.print(f"{plural(left_out, 'other event')} of it tried none.", style="dim")
    terminal.warn(folder.notes)
    return 0


def tally(events: Sequence[Event]) -> list[tuple[str, int, int]]:
    """Of each setting, as its line, how many of these events it heals, and how many it does not; the best first."""
    by_line: dict[str, list[Cured]] = {}
    for event in events:
        for cured in event.cures or ():
            by_line.setdefault(cured.line, []).append(cured)
    counted = [
        (line, sum(c.verdict == "healed" for c in found), sum(c.verdict in ("not_healed", "no_change") for c in found))
        for line, found in by_line.items()
    ]
    return sorted(counted, key=lambda each: (-each[1], each[2], each[0]))
