# SPDX-License-Identifier: Apache-2.0
"""``gradloc trigger METRICS``: which steps of a run the trigger would have flagged, with these settings."""

import argparse
import itertools
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ... import checks
from ...explain.numbers import number, percent
from ...explain.text import in_unit, one_line, plural
from ...trigger import AdaptiveThreshold
from .. import output
from ..errors import ReportError
from ..pages import terminal
from ..pages.script_data import THRESHOLD
from ..runs.diagnosis import Diagnosis, diagnose
from ..runs.run import read_run
from ..runs.spikes import missing_norm
from . import add_log_arguments, add_set_argument, assignments

_OVER_ONE = checks.number("a number greater than 1", lambda value: 1 < value < math.inf)
SETTINGS = {"window": checks.integer(8), "warmup": checks.integer(2), "floor": _OVER_ONE, "cap": _OVER_ONE}
"""The rule's settings and their bounds."""
MAX_LISTED = 30
"""Flagged steps that the terminal lists."""
EPILOG = """\
examples:
  gradloc trigger runs/demo-1
  gradloc trigger train.log --set cap=6 --set floor=3
  gradloc trigger trainer_state.json --json -o trigger.json
  gradloc trigger a.csv b.csv -o trigger.html     several runs in one picture
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "metrics", type=Path, nargs="+", metavar="METRICS", help="a run's folder, or its log; - for standard input"
    )
    add_set_argument(parser, "a setting of actor.gradloc.trigger: window, warmup, floor or cap")
    add_log_arguments(parser)
    parser.add_argument("--json", action="store_true", help="every step's norm and threshold as JSON")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the picture, .html or .svg, or with --json the JSON"
    )


def run(args: argparse.Namespace) -> int:
    if args.output is not None:
        if not args.json and args.output.suffix not in (".html", ".svg"):
            raise ReportError(f"{args.output} must end in .html or .svg; for JSON, add --json.")
        output.check(args.output, "json" if args.json else None, args.metrics, (".html", ".svg"))
    settings = assignments(args.set, "trigger.", "a number, such as --set cap=6", checked)
    runs, notes = _diagnoses(args, settings)
    if args.json:
        if len(runs) > 1:
            raise ReportError(f"--json is of one run, found {len(runs)}: name a log of one.")
        output.deliver(args.output, output.as_json(_json(settings, *runs.values())))
    elif args.output is not None:
        from ..pages import trigger as page  # matplotlib takes a second to import

        drawn = {}
        for name, diagnosis in runs.items():
            drawn[name] = sorted(itertools.chain(*diagnosis.judged), key=lambda step: step.step)
        units = {diagnosis.run.unit for diagnosis in runs.values()}
        unit = units.pop() if len(units) == 1 else "step"
        output.deliver(args.output, page.svg(drawn, unit) if args.output.suffix == ".svg" else page.html(drawn, unit))
    else:
        console = terminal.console()
        for name, diagnosis in runs.items():
            _print(console, name, diagnosis)
    terminal.warn(notes)
    return 0


def checked(**settings: Any) -> dict[str, float]:
    """Check the rule's settings; raise ValueError with one sentence."""
    checks.refuse_unknown("trigger", settings, SETTINGS)
    for name, value in settings.items():
        SETTINGS[name].check(name, value)
    AdaptiveThreshold(**settings)
    return settings


def _diagnoses(args: argparse.Namespace, settings: Mapping[str, float]) -> tuple[dict[str, Diagnosis], list[str]]:
    """Diagnose each run under the settings, which its name repeats; return the diagnoses by name, and notes."""
    given = "".join(f", {key}={value:g}" for key, value in settings.items())
    runs: dict[str, Diagnosis] = {}
    notes: list[str] = []
    for path in args.metrics:
        folder = read_run(path, metric=args.metric, pattern=args.pattern)
        if not folder.metrics:
            raise ReportError(f"{path} holds no metrics: name the run's log, or the file that its tracker exports.")
        notes += folder.notes
        for run in folder.runs:
            if missing := missing_norm(run.metrics, run.name):
                raise ReportError(missing)
            name = run.name
            if len(folder.runs) == 1 and str(path) != "-":
                name = str(path) if path.stem in runs else path.stem
            names = (one_line(f"{each}{given}") for each in (name, f"{path}: {run.name}"))
            runs[_unused_name(*names, runs)] = diagnose(run, settings)
    for name, diagnosis in runs.items():
        notes += [f"{name}: {limit}" if len(runs) > 1 else limit for limit in diagnosis.limits]
    return runs, notes


def _unused_name(name: str, longer: str, used: Collection[str]) -> str:
    """Return the first of ``name``, ``longer``, ``longer (2)``, ``longer (3)``, ... that is not used."""
    numbered = (f"{longer} ({count})" for count in itertools.count(2))
    return next(each for each in itertools.chain([name, longer], numbered) if each not in used)


def _json(settings: Mapping[str, float], diagnosis: Diagnosis) -> dict[str, Any]:
    """Return what JSON has of the run, with each step; ``segment`` is there where the log holds several."""
    rows = []
    for segment, judged in enumerate(diagnosis.judged):
        for step in judged:
            row = {"step": step.step, "norm": step.norm, "threshold": step.threshold, "spike": step.spike}
            rows.append(row | ({"segment": segment} if len(diagnosis.judged) > 1 else {}))
    return {"settings": settings, "unit": diagnosis.run.unit, "steps": rows}


def _print(console: Console, name: str, diagnosis: Diagnosis) -> None:
    unit = diagnosis.run.unit

    def say(sentence: str, style: str = "") -> None:
        console.print(in_unit(sentence, unit), style=style)

    judged = list(itertools.chain(*diagnosis.judged))
    spikes = [step for step in judged if step.spike]
    console.print(name, style="bold")
    for line in terminal.curve(diagnosis.judged, max(console.width - 12, 20), diagnosis.run.metrics):
        console.print(line)
    early = [step for step in judged if step.is_early]
    also = f"; size alone marks {plural(len(early), 'other step')} in the rule's warm-up" if early else ""
    share = percent(len(spikes) / len(judged))
    say(f"The rule flagged {len(spikes)} of {plural(len(judged), 'step')} ({share}){also}.")
    own = dict(diagnosis.run.metrics.known(THRESHOLD))
    for step in spikes:
        at = own.get(step.step)
        if None not in (at, step.threshold) and not math.isclose(at, step.threshold, rel_tol=0.01):
            say(
                f"By the default rule, which adapts, the threshold at step {step.step} is "
                f"{number(step.threshold, 3)}; the run itself used {number(at, 3)}."
            )
            break
    for step in early:
        say(
            f"Step {step.step}: the norm of {number(step.norm, 3)} is {number(step.times, 3)} times the median of the "
            "steps around it. The step is in the warm-up, when the rule flags only norms that are not finite.",
            style="red",
        )
    others = [step for step in judged if not step.spike and step.ratio is not None]
    others.sort(key=lambda step: step.ratio)
    if others:
        nearest, middle = others[-1], others[len(others) // 2]
        say(
            f"Of the steps not flagged, step {nearest.step} came closest to its threshold, at "
            f"{percent(nearest.ratio, 2)} of it; the median step is at {percent(middle.ratio, 2)}."
        )
    if spikes:
        rows = []
        for step in spikes[:MAX_LISTED]:
            rows.append([str(step.step), *(number(value, 3) for value in (step.norm, step.threshold, step.ratio))])
        console.print(terminal.table((unit, "norm", "threshold", "norm over threshold"), rows, gap=3))
    if len(spikes) > MAX_LISTED:
        console.print(f"And {len(spikes) - MAX_LISTED} more; --json writes them all.", style="dim")
    console.print()
