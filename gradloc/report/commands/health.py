# SPDX-License-Identifier: Apache-2.0
"""Judge a run's health step by step, with advice: ``gradloc health``."""

import argparse
import math
import shlex
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ...explain.advice import sampling_cut
from ...explain.text import in_unit, one_line
from .. import output
from ..errors import ReportError
from ..logs.names import listed
from ..pages import terminal
from ..runs.health import STATES, TOO_SHORT, HealthConfig, RunHealth, judge, ranges
from ..runs.run import RunFolder, read_run
from ..runs.spikes import missing_norm
from . import EXIT_CODES, add_fail_on, add_log_arguments, add_set_argument, assignments, exit_code

MARKS = {"healthy": ("·", "green"), "warning": ("!", "yellow"), "danger": ("X", "bold red")}
"""Each state's mark and style."""
UNRECOVERED = ("~", "yellow")
"""Mark of steps that no rule finds fault with, after a fault from which the run did not come back."""
STRIP_WIDTH, STRIP_LINES = 60, 5  # in a longer run, a mark is several steps
EPILOG = f"""\
examples:
  gradloc health runs/demo-1
  gradloc health runs/demo-1 --json
  gradloc health runs/demo-1 --grad-clip 0.5 --set zero_variance=[0.9,null]

{EXIT_CODES}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="RUN", help="a run's folder or log; - for standard input")
    parser.add_argument("--json", action="store_true", help="every step's state, as JSON")
    add_log_arguments(parser)
    parser.add_argument(
        "--metrics", type=Path, metavar="PATH", help="the run's metrics, where they are not in its folder"
    )
    clip = "the norm that gradients were clipped to; 0: none (default: 1 for verl's own logs, else unknown)"
    parser.add_argument("--grad-clip", type=float, metavar="NORM", help=clip)
    add_set_argument(parser, "a threshold of trainer.health, such as policy_kl=[0.2,null]")
    add_fail_on(parser)


def run(args: argparse.Namespace) -> int:
    values = "a number, null, or [warning,danger], such as --set policy_kl=[0.2,null]"
    config = assignments(args.set, "health.", values, HealthConfig)
    if args.grad_clip is not None and not args.grad_clip >= 0:
        raise ReportError(f"--grad-clip must be a norm or 0 for none, found {args.grad_clip}.")
    folder = read_run(args.path, args.metrics, args.metric, args.pattern)
    healths = [judge(run.parts, config, args.grad_clip) for run in folder.runs]
    if not healths or not healths[0]:
        first = folder.diagnoses[0] if folder.runs else None
        if first is not None and first.kind and not args.json:  # such as a log of overflows alone
            said = f"{first.headline} This log has no metric that a rule of health reads."
            terminal.console().print(f"{one_line(folder.name)}: {one_line(said)}")
            return exit_code(args.fail_on, True, True, [STATES[-1]] * first.is_unrecovered)
        why = missing_norm(folder.runs[0].parts[-1], folder.runs[0].name) if folder.runs else ""
        nothing = f"{folder.path} has no metrics that can be judged: name the run's log, or its metrics with --metrics."
        raise ReportError(why or nothing)
    for run, health, diagnosis in zip(folder.runs, healths, folder.diagnoses, strict=True):
        if health and not folder.events:
            health.heed(diagnosis)
        health.notes += filter(None, [missing_norm(run.parts[-1], run.name), sampling_cut(run.config, run.trainer)])
    if args.json:
        output.deliver(None, _json(folder, healths[0]))
    else:
        _print_report(folder, healths)
    terminal.warn(folder.notes)
    with_metrics = [health for health in healths if health]
    is_judged = any(health.num_unwell or len(health.verdicts) > health.warmup for health in with_metrics)
    is_unrecovered = any(diagnosis.is_unrecovered for diagnosis in folder.diagnoses)
    is_found = any(health.num_unwell for health in with_metrics) or is_unrecovered
    states = [health.worst.state for health in with_metrics] + [STATES[-1]] * is_unrecovered
    return exit_code(args.fail_on, is_judged or is_unrecovered, is_found, states)


def _json(folder: RunFolder, health: RunHealth) -> str:
    document = {
        "run": folder.name,
        "metrics": folder.metrics.source,
        "state": health.state,
        "unit": health.unit,
        "worst": {"state": health.worst.state, "step": health.worst.step},
        "steps": [
            {"step": verdict.step, "state": verdict.state, "reasons": [reason.facts() for reason in verdict.reasons]}
            for verdict in health.verdicts
        ],
        "advice": {
            finding.worst.name: [
                {"do": do, "line": line} for do, line in folder.advice(finding.worst, finding.worst_step)
            ]
            for finding in health.findings
        },
        "not_judged": list(health.silent),
        "other_runs": [run.name for run in folder.runs[1:]],
        "notes": health.notes + folder.notes,
    }
    return output.as_json(document)


def _print_report(folder: RunFolder, healths: list[RunHealth]) -> None:
    """Print the first run's health in full, and a line on each other run of the folder."""
    console, health = terminal.console(), healths[0]
    name = folder.runs[0].name if len(folder.runs) > 1 else folder.name
    console.print(one_line(name if name.startswith(folder.name) else f"{folder.name}: {name}"), style="bold")
    is_led, headline = False, health.headline
    if not folder.events:
        diagnosis = folder.diagnoses[0]
        if health.is_too_short and diagnosis.headline.startswith(TOO_SHORT):  # it may name a norm far above the others
            headline = f"{headline} {diagnosis.headline.partition('. ')[2]}".rstrip()
        elif health.is_finite_alone and not diagnosis.kind:
            headline = diagnosis.headline  # on what no rule judges
        has_finding = {"gradient_jump", "non_finite"} & {finding.worst.name for finding in health.findings}
        is_led = diagnosis.is_unrecovered or diagnosis.kind == "unfinite"
        is_led |= bool(diagnosis.kind) and not has_finding  # such as in the rules' warm-up
        if is_led:
            console.print(one_line(f"{diagnosis.headline} Kind: {diagnosis.label}."), style="bold red")
    if health.num_unwell or not is_led:
        console.print(headline)
    if is_led and diagnosis.advice:
        console.print(one_line(diagnosis.advice))
        if diagnosis.command:
            console.print(f"    {one_line(diagnosis.command)}", style="cyan", soft_wrap=True)
    if not health.is_too_short:
        console.print(_strip(health, console.width))
    _print_findings(console, health, folder)
    unwell = {verdict.step for verdict in health.verdicts if verdict.reasons}
    if spikes := unwell & {row.step for row in folder.events.rows}:
        where = f"gradloc {shlex.quote(str(folder.path))}"
        console.print(f"Which tokens did it at step {ranges(sorted(spikes))}, and why: {where}", soft_wrap=True)
    if health.silent:
        console.print(
            f"Not checked, because the run does not log their metrics: {listed(health.silent, 8)}.", style="dim"
        )
    for note in health.notes:
        console.print(note, style="yellow")
    for diagnosis, health in list(zip(folder.diagnoses, healths, strict=True))[1:]:
        state = health.headline if health else "No metrics that can be judged."
        spike = f"{diagnosis.headline} " if diagnosis.kind else ""
        print(one_line(f"{diagnosis.run.name}: {spike}{state}"))


def _print_findings(console: Console, health: RunHealth, folder: RunFolder) -> None:
    """Print each rule that found fault with its advice; a line that several rules advise appears once."""
    printed: set[str] = set()
    for finding in health.findings:
        mark, style = MARKS[finding.worst.state]
        when = f"{finding.worst.state} at step {finding.worst_step}"
        if len(finding.steps) > 1:
            when = f"at steps {ranges(finding.steps)}"
            is_danger = finding.worst.state == STATES[-1]
            when = f"{when}; danger first at step {finding.worst_step}" if is_danger else f"warning {when}"
        when = in_unit(when, health.unit)
        console.print(Text.assemble((f"{mark} {finding.worst.name}", style), f"  {when}"))
        console.print(_indented(finding.worst.sentence, 2))
        advice = folder.advice(finding.worst, finding.worst_step)
        fresh = [(do, line) for do, line in advice if (line or do) not in printed]
        for do, line in fresh:
            printed.add(line or do)
            console.print(_indented(f"- {do}", 2))
            if line:
                console.print(_indented(Text(line, style="cyan"), 6))
        if len(fresh) < len(advice):
            also = "and what is listed above" if fresh else "the same as above"
            console.print(_indented(f"- {also}", 2))


def _indented(text: str | Text, blanks: int) -> Padding:
    return Padding(text, (0, 0, 0, blanks), expand=False)  # else blanks fill each line to its end


def _strip(health: RunHealth, columns: int) -> Text:
    """Draw the states as a strip of marks; each line begins with its first step."""
    heads = [f"{health.unit} {verdict.step:>6}  " for verdict in health.verdicts]
    width = max(min(STRIP_WIDTH, columns - max(map(len, heads))), 1)
    steps_per_mark = math.ceil(len(health.verdicts) / (width * STRIP_LINES))
    steps_per_line = width * steps_per_mark
    text = Text()
    for start in range(0, len(health.verdicts), steps_per_line):
        line = health.verdicts[start : start + steps_per_line]
        text.append(heads[start], style="dim")
        for first in range(0, len(line), steps_per_mark):
            worst = max(line[first : first + steps_per_mark], key=lambda verdict: STATES.index(verdict.state))
            is_after = worst.state == STATES[0] and health.begin is not None and worst.step >= health.begin
            text.append(*(UNRECOVERED if is_after else MARKS[worst.state]))
        text.append("\n")
    legend = ", ".join(f"{mark} {state}" for state, (mark, _) in MARKS.items())
    if UNRECOVERED[0] in text.plain:
        legend += f", {UNRECOVERED[0]} healthy by the rules, after a fault from which the run did not recover"
    if steps_per_mark > 1:
        legend += in_unit(f"; {steps_per_mark} steps to a mark", health.unit)
    return text.append(legend, style="dim")
