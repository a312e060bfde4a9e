# SPDX-License-Identifier: Apache-2.0
"""``gradloc-report trigger METRICS``: which steps of a run the trigger would have flagged, with these settings."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...record.store import plain
from ...words.numbers import number, percent
from .. import output
from ..errors import ReportError
from ..pages import terminal
from ..runs import sources
from ..runs.metrics import Metrics
from ..runs.run import read_any
from ..runs.trigger import Judged, judge, norm_of, settings_of
from ..text import one_line, plural

SHOWN = 30
"""Flagged steps listed."""
HEIGHT = 12
"""Lines of the terminal's curve."""
EPILOG = """\
examples:
  gradloc-report trigger runs/demo-1
  gradloc-report trigger train.log --set cap=6 --set floor=3
  gradloc-report trigger trainer_state.json --json trigger.json
  gradloc-report trigger a.csv b.csv -o trigger.html     several runs in one picture
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the subcommand takes."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "metrics", type=Path, nargs="+", metavar="METRICS", help=f"a run's folder, or its metrics: {sources.FORMATS}"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of actor.gradloc.trigger: window, warmup, floor or cap; may be given again",
    )
    parser.add_argument("--metric", metavar="NAME", help="the metric that holds the norms")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every step's norm and threshold; - for stdout")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the picture: .html or .svg")


def run(args: argparse.Namespace) -> int:
    """Judges the runs and shows them as asked."""
    if args.output is not None:
        output.check(args.output)
        if args.output.suffix not in (".html", ".svg"):
            raise ReportError(f"{args.output} must end in .html or .svg.")
    if args.json is not None and len(args.metrics) > 1:
        raise ReportError(f"--json is of one run, found {len(args.metrics)}: name one.")
    settings = settings_of(_pairs(args.set))
    runs: dict[str, list[Judged]] = {}
    notes: list[str] = []
    for path in args.metrics:
        metrics, more = _read(path)
        notes += more
        runs[one_line(str(path)) if path.stem in runs else one_line(path.stem)] = judge(
            metrics, norm_of(metrics, args.metric), settings
        )
    if args.json is not None:
        _write_json(args.json, next(iter(runs.values())))
    if args.output is not None:
        from ..pages import trigger as page  # matplotlib takes a second to import

        output.write(args.output, page.svg(runs) if args.output.suffix == ".svg" else page.html(runs))
        print(args.output)
    if args.json is None and args.output is None:
        console = Console(highlight=False)
        for name, judged in runs.items():
            _print(console, name, judged)
    terminal.warn(notes)
    return 0


def _pairs(given: Sequence[str]) -> dict[str, str]:
    pairs = [entry.partition("=") for entry in given]
    for entry, (key, equals, value) in zip(given, pairs, strict=True):
        if not (key and equals and value):
            raise ReportError(f"--set {entry} cannot be read: write KEY=VALUE, such as --set cap=6.")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _read(path: Path) -> tuple[Metrics, list[str]]:
    found = read_any(path)
    if not found.metrics:
        raise ReportError(f"{path} holds no metrics: add `file` to trainer.logger, or name the run's log.")
    return found.metrics, [] if path.is_dir() else found.notes


def _write_json(path: Path, judged: Sequence[Judged]) -> None:
    steps = [{"step": j.step, "norm": j.norm, "threshold": j.threshold, "spike": j.spike} for j in judged]
    text = json.dumps(plain({"steps": steps}), indent=1, allow_nan=False) + "\n"
    if str(path) == "-":
        print(text, end="")
    else:
        output.write(path, text)
        print(path)


def _print(console: Console, name: str, judged: Sequence[Judged]) -> None:
    spikes = [j for j in judged if j.spike]
    console.print(Text(name, style="bold"))
    for line in _curve(judged, max(console.width - 12, 20)):
        console.print(line)
    console.print(
        Text(f"{plural(len(spikes), 'step')} of {len(judged)} flagged ({percent(len(spikes) / len(judged))}).")
    )
    others = sorted((j for j in judged if not j.spike and j.ratio is not None), key=lambda j: j.ratio)
    if others:
        nearest, middle = others[-1], others[len(others) // 2]
        console.print(
            Text(
                f"Of the others the nearest came to {number(nearest.ratio, 2)} of its threshold (step {nearest.step}); "
                f"half stayed below {number(middle.ratio, 2)}."
            )
        )
    if spikes:
        table = Table("step", "norm", "threshold", "norm over threshold", box=None, padding=(0, 3, 0, 0))
        for j in spikes[:SHOWN]:
            table.add_row(str(j.step), number(j.norm, 3), number(j.threshold, 3), number(j.ratio, 3))
        console.print(table)
    if len(spikes) > SHOWN:
        console.print(Text(f"And {len(spikes) - SHOWN} more; --json writes them all.", style="dim"))
    console.print()


def _curve(judged: Sequence[Judged], width: int) -> list[Text]:
    """The largest norm of each column's steps on a log scale, and the lowest threshold over it."""
    size = -(-len(judged) // width)
    columns = [judged[at : at + size] for at in range(0, len(judged), size)]
    norms = [max((math.log(j.norm) for j in column if 0 < j.norm < math.inf), default=None) for column in columns]
    limits = [min((math.log(j.threshold) for j in column if j.threshold), default=None) for column in columns]
    known = [value for value in [*norms, *limits] if value is not None and math.isfinite(value)]
    if not known:
        return []
    low, high = min(known), max(known)
    lines = [Text() for _ in range(HEIGHT)]
    for column, norm, limit in zip(columns, norms, limits, strict=True):
        is_spike = any(j.spike for j in column)
        at, over = _level(norm, low, high), _level(limit, low, high)
        if norm is None and is_spike:
            at = HEIGHT - 1  # not finite
        for level, line in enumerate(reversed(lines)):
            if level == at:
                line.append("◆" if is_spike else "•", style="bold red" if is_spike else "blue")
            else:
                line.append("-" if level == over else " ", style="dim")
    for level, line in enumerate(reversed(lines)):
        if level in (0, HEIGHT // 2, HEIGHT - 1):
            line.append(f" {number(math.exp(low + (high - low) * level / (HEIGHT - 1)), 3)}", style="dim")
    first, last = judged[0].step, judged[-1].step
    legend = f"steps {first:,} to {last:,}: • norm, ◆ flagged, - threshold" + (f"; {size} steps a column" * (size > 1))
    return [*lines, Text(legend, style="dim")]


def _level(value: float | None, low: float, high: float) -> int | None:
    if value is None or not math.isfinite(value):
        return None
    return round((HEIGHT - 1) * (value - low) / (high - low)) if high > low else 0
