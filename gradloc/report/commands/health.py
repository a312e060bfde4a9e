# SPDX-License-Identifier: Apache-2.0
"""``gradloc-report health``: was the run well, step by step, and what people do where not."""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...record.store import plain
from ...words.numbers import percent
from ...words.text import one_line, plural
from ..analyses.lead import HORIZON, RuleLead, lead
from ..errors import ReportError
from ..pages import terminal
from ..runs.diagnosis import diagnose
from ..runs.health import CLIP, STATES, HealthConfig, RunHealth, judge, ranges
from ..runs.run import RunFolder, read_logs, read_run

MARKS = {"healthy": ("·", "green"), "warning": ("!", "yellow"), "danger": ("X", "bold red")}
STRIP = 60
"""Marks on a line of the strip."""
LINES = 5
"""Lines of the strip; a longer run has several steps to a mark."""
PREFIX = "trainer.health."
HEADS = ("rule", "warned of", "steps ahead", "by luck", "false alarms", "verdict")
EPILOG = """\
examples:
  gradloc-report health runs/demo-1
  gradloc-report health runs/demo-1 --json
  gradloc-report health logs/*.log --lead
  gradloc-report health runs/demo-1 --grad-clip 0.5 --set zero_variance=[0.9,null]
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the subcommand takes."""
    parser.add_argument(
        "paths", type=Path, nargs="+", metavar="RUN", help="a run's folder or log; - for standard input"
    )
    parser.add_argument("--lead", action="store_true", help="how many steps before an explosion each rule warned")
    parser.add_argument("--json", action="store_true", help="every step's state, as JSON")
    parser.add_argument("--metric", metavar="NAME", help="the metric that holds the gradient norms")
    parser.add_argument("--metrics", type=Path, metavar="PATH", help="the run's metrics, when they lie elsewhere")
    parser.add_argument(
        "--grad-clip",
        type=float,
        default=CLIP,
        metavar="NORM",
        help="the run's actor.grad_clip; 0: gradients were not clipped (default: %(default)s)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a threshold of trainer.health, such as policy_kl=[0.2,null]; may be given again",
    )


def run(args: argparse.Namespace) -> int:
    """Judges the run and shows it as asked."""
    config = _config(args.set)
    if not args.grad_clip >= 0:
        raise ReportError(f"--grad-clip must be a norm or 0 for none, found {args.grad_clip}.")
    if args.lead:
        return _lead(args)
    if len(args.paths) > 1:
        raise ReportError(f"health is of one run, found {len(args.paths)}: name one, or ask --lead of all.")
    found = read_run(args.paths[0], args.metrics, args.metric)
    parts = [segment.metrics for run in found.log.runs[:1] for segment in run.segments]
    health = judge(parts, config, args.grad_clip or None)
    if not health:
        raise ReportError(
            f"{found.path} has no metrics that can be judged: add `file` to trainer.logger, or "
            "name them with --metrics."
        )
    if args.json:
        print(_json(found, health))
    else:
        _print(found, health, config)
        _print_others(found, config, args.grad_clip or None)
    terminal.warn(found.notes)
    return 0


def _lead(args: argparse.Namespace) -> int:
    found = lead(read_logs(args.paths, args.metric).log.runs)
    rows = [[rule.name, *_cells(rule), rule.said] for rule in found.rules if rule.num_steps]
    if args.json:
        print(json.dumps(plain({"runs": found.num_runs, "explosions": found.onsets, "rules": rows}), indent=2))
        return 0
    console = Console(highlight=False)
    console.print(
        Text(
            f"{plural(found.num_runs, 'run')}, {plural(found.num_steps, 'step')}, "
            f"{plural(len(found.onsets), 'explosion')}; a rule warned of one when it found fault in the "
            f"{HORIZON} steps before it."
        )
    )
    table = Table(*HEADS, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
    return 0


def _cells(rule: RuleLead) -> list[str]:
    warned = f"{len(rule.ahead)} of {rule.num_seen}"
    return [warned, rule.steps_ahead, percent(rule.luck, 2), f"{rule.num_false} in {rule.num_steps:,} steps"]


def _config(given: list[str]) -> HealthConfig:
    settings = {}
    for entry in given:
        name, equals, text = entry.partition("=")
        try:
            settings[name.removeprefix(PREFIX)] = json.loads(text.lower())
        except ValueError:
            equals = ""
        if not equals:
            raise ReportError(
                f"--set {entry} cannot be read: write KEY=VALUE with a number, null, or "
                "[warning,danger], such as --set policy_kl=[0.2,null]."
            )
    try:
        return HealthConfig(**settings)
    except ValueError as error:
        raise ReportError(f"--set: {error}") from None


def _json(found: RunFolder, health: RunHealth) -> str:
    document = {
        "run": found.name,
        "metrics": found.metrics.source,
        "state": health.state,
        "worst": {"state": health.worst.state, "step": health.worst.step},
        "steps": [{"step": v.step, "state": v.state, "reasons": v.reasons} for v in health.verdicts],
        "advice": {
            finding.worst.name: [{"do": do, "line": line} for do, line in finding.worst.advice()]
            for finding in health.findings
        },
        "not_judged": list(health.silent),
        "other_runs": [run.name for run in found.log.runs[1:]],
        "notes": health.notes + found.notes,
    }
    return json.dumps(plain(document), indent=2, allow_nan=False)


def _print(found: RunFolder, health: RunHealth, config: HealthConfig) -> None:
    console = Console(highlight=False)
    console.print(Text(one_line(found.name), style="bold"))
    if found.log and not found.events:
        diagnosis = diagnose(found.log.runs[0])
        is_told = {"gradient_jump", "non_finite"} & {finding.worst.name for finding in health.findings}
        if diagnosis.worst and not is_told:  # in the rules' own warm-up
            console.print(Text(one_line(diagnosis.headline), style="bold red"))
        console.print(Text(diagnosis.beside(health)))
    else:
        console.print(Text(health.headline))
    console.print(_strip(health))
    told: set[str] = set()
    for finding in health.findings:
        mark, style = MARKS[finding.worst.state]
        head = Text.assemble(
            (f"{mark} {finding.worst.name}", style),
            f"  {finding.worst.state} at step {finding.worst_step}"
            if len(finding.steps) == 1
            else f"  {finding.worst.state}, first at step {finding.worst_step}; found at {ranges(finding.steps)}",
        )
        console.print(head)
        console.print(Padding(Text(finding.worst.sentence), (0, 0, 0, 2)))
        fresh = [(do, line) for do, line in finding.worst.advice() if line not in told]
        for do, line in fresh:
            told.add(line)
            console.print(Padding(Text(f"- {do}"), (0, 0, 0, 2)))
            console.print(Padding(Text(line, style="cyan"), (0, 0, 0, 6)))
        if len(fresh) < len(finding.worst.advice()):
            console.print(Padding(Text("- and see above"), (0, 0, 0, 2)))
    if health.silent:
        silent = ", ".join(health.silent)
        console.print(Text(f"Not judged, for want of their metrics: {silent}.", style="dim"))
    for note in health.notes:
        console.print(Text(note, style="yellow"))
    console.print(Text("docs/health.md explains every rule and its source.", style="dim"))


def _print_others(found: RunFolder, config: HealthConfig, grad_clip: float | None) -> None:
    """A line for each other run of the same logs."""
    for run in found.log.runs[1:]:
        health = judge([segment.metrics for segment in run.segments], config, grad_clip)
        diagnosis = diagnose(run)
        said = diagnosis.beside(health) if health else "No metrics that can be judged."
        spike = f"{diagnosis.headline} " if diagnosis.worst else ""
        print(one_line(f"{run.name}: {spike}{said}"))


def _strip(health: RunHealth) -> Text:
    """A mark per step, or per some steps of a long run, with the step at which each line begins."""
    size = -(-len(health.verdicts) // (STRIP * LINES))
    text = Text()
    for start in range(0, len(health.verdicts), STRIP * size):
        line = health.verdicts[start : start + STRIP * size]
        text.append(f"step {line[0].step:>6}  ", style="dim")
        for at in range(0, len(line), size):
            worst = max(line[at : at + size], key=lambda v: STATES.index(v.state))
            text.append(*MARKS[worst.state])
        text.append("\n")
    legend = ", ".join(f"{mark} {state}" for state, (mark, _) in MARKS.items())
    text.append(f"{legend}" + (f"; {size} steps to a mark" if size > 1 else ""), style="dim")
    return text
