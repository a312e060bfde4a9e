# SPDX-License-Identifier: Apache-2.0
"""``gradloc cure RUN_DIR``: how many of a run's events each single setting heals, or the usual advice."""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ...explain.text import one_line, plural
from ...record import Event
from .. import output
from ..errors import ReportError
from ..pages import terminal
from ..runs.run import RunFolder, read_run

EPILOG = """\
examples:
  gradloc cure examples/demo
  gradloc cure runs/demo-1 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="RUN_DIR", help="a run's folder or its events.jsonl")
    parser.add_argument("--json", action="store_true", help="print each setting with its counts as JSON")


def run(args: argparse.Namespace) -> int:
    folder = read_run(args.path, None, None)
    if not folder.events:
        raise ReportError(
            f"{args.path} has no event. cure counts which settings heal a run's events: name the folder of a run in "
            "which GradLoc recorded some."
        )
    measured = [event for event in folder.events if event.cures]
    if args.json:
        keys = ("setting", "heals", "does_not")
        rows = [dict(zip(keys, row, strict=True)) for row in tally(measured)]
        advised = [{"do": do, "setting": line, "events": count} for (do, line), count in advice(folder).items()]
        counts = {"events": len(folder.events), "measured": len(measured)}
        output.deliver(None, output.as_json(counts | {"cures": rows, "advice": advised}))
        return 0
    console, counted = terminal.console(), tally(measured)
    if not counted:
        why = "gradloc.search.max_cures was 0, or an older version of GradLoc wrote the events"
        if folder.trainer == "loop":
            why = "gradloc.Watch does not know how a loop makes its loss"
        elif any(event.cures is not None for event in folder.events):
            why = "running the step again cannot test the settings that fit its cause"
        _print_advice(folder, why)
        return 0
    num = len(measured)
    rows = (
        (f"{heals} of {num}", str(fails), str(num - heals - fails), one_line(line, 120))
        for line, heals, fails in counted
    )
    console.print(terminal.table(("heals", "does not", "not known", "setting"), rows))
    if left_out := len(folder.events) - num:
        console.print(f"{plural(left_out, 'other event')} of it tried none.", style="dim")
    terminal.warn(folder.notes)
    return 0


def advice(folder: RunFolder) -> Counter[tuple[str, str]]:
    """Count the advice for a run's events, by its sentence and line."""
    found: Counter[tuple[str, str]] = Counter()
    for event in folder.events:
        if (do := folder.next_step(event)) is not None:
            found.update((do.do, line) for line in do.lines.values())
    return found


def _print_advice(folder: RunFolder, why: str) -> None:
    console, events = terminal.console(), plural(len(folder.events), "event")
    console.print(f"No setting was tested for {events} of this run: {why}. What people do about causes like this:")
    for (do, line), count in advice(folder).most_common():
        console.print(f"- {plural(count, 'event')}: {one_line(do, 120)}")
        console.print(f"    {one_line(line, 300)}", style="cyan", soft_wrap=True)
    terminal.warn(folder.notes)


def tally(events: Sequence[Event]) -> list[tuple[str, int, int]]:
    """Count per setting the events that it heals and those that it does not; the best first."""
    verdicts: dict[str, Counter[str]] = {}
    for event in events:
        for cured in event.cures or ():
            verdicts.setdefault(cured.line, Counter())[cured.verdict] += 1
    counted = [(line, of["healed"], of["not_healed"] + of["no_change"]) for line, of in verdicts.items()]
    return sorted(counted, key=lambda each: (-each[1], each[2], each[0]))
