# SPDX-License-Identifier: Apache-2.0
"""``gradloc-report health``: was the run well, step by step, and what people do where it was not.

``--lead``: how many steps before an explosion did each rule warn, and how often when nothing followed? An explosion is
what the diagnosis calls one, from ``EXPLOSION`` times normal on or not finite. A rule *warned* of it when it found
fault within the ``HORIZON`` steps before it. A rule that often finds fault is right by luck: the share of the run's
stretches of that length in which it finds fault says how often, and a binomial test whether it did better.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...record.store import plain
from ...words.advice import sampling_cut
from ...words.numbers import percent
from ...words.text import one_line, plural
from ..errors import ReportError
from ..logs import LoggedRun, Segment
from ..logs.segments import surviving
from ..pages import terminal
from ..runs.diagnosis import diagnose
from ..runs.health import CLIP, STATES, HealthConfig, RunHealth, judge, ranges
from ..runs.run import RunFolder, read_logs, read_run
from ..runs.spikes import missing_norm
from . import EXIT_CODES, add_fail_on, add_log_arguments, add_set_argument, assignments, exit_code

MARKS = {"healthy": ("·", "green"), "warning": ("!", "yellow"), "danger": ("X", "bold red")}
STRIP_WIDTH, STRIP_LINES = 60, 5  # of a longer run, a mark stands for several steps
EPILOG = f"""\
examples:
  gradloc-report health runs/demo-1
  gradloc-report health runs/demo-1 --json
  gradloc-report health logs/*.log --lead
  gradloc-report health runs/demo-1 --grad-clip 0.5 --set zero_variance=[0.9,null]

{EXIT_CODES}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", type=Path, nargs="+", metavar="RUN", help="a run's folder or log; - for standard input"
    )
    parser.add_argument("--lead", action="store_true", help="how many steps before an explosion each rule warned")
    parser.add_argument("--json", action="store_true", help="every step's state, as JSON")
    add_log_arguments(parser)
    parser.add_argument("--metrics", type=Path, metavar="PATH", help="the run's metrics, when they lie elsewhere")
    clip = "the run's actor.grad_clip; 0: gradients were not clipped (default: %(default)s)"
    parser.add_argument("--grad-clip", type=float, default=CLIP, metavar="NORM", help=clip)
    add_set_argument(parser, "a threshold of trainer.health, such as policy_kl=[0.2,null]")
    add_fail_on(parser)


def run(args: argparse.Namespace) -> int:
    values = "a number, null, or [warning,danger], such as --set policy_kl=[0.2,null]"
    config = assignments(args.set, "health.", values, HealthConfig)
    if not args.grad_clip >= 0:
        raise ReportError(f"--grad-clip must be a norm or 0 for none, found {args.grad_clip}.")
    if args.lead:
        _print_lead(args)
        return 0
    if len(args.paths) > 1:
        raise ReportError(f"health is of one run, found {len(args.paths)}: name one, or ask --lead of all.")
    folder = read_run(args.paths[0], args.metrics, args.metric, args.pattern)
    healths = [judge(run.parts, config, args.grad_clip or None) for run in folder.runs]
    if not healths or not healths[0]:
        why = missing_norm(folder.runs[0].parts[-1], folder.runs[0].name) if folder.runs else ""
        raise ReportError(
            why
            or f"{folder.path} has no metrics that can be judged: name the run's log, or its metrics with --metrics."
        )
    for run, health in zip(folder.runs, healths, strict=True):
        health.notes += filter(None, [missing_norm(run.parts[-1], run.name), sampling_cut(run.config, run.trainer)])
    if args.json:
        print(_json(folder, healths[0]))
    else:
        _print(folder, healths)
    terminal.warn(folder.notes)
    known = [health for health in healths if health]
    is_judged = any(health.num_unwell or len(health.verdicts) > health.warmup for health in known)
    is_found = any(health.num_unwell for health in known)
    return exit_code(args.fail_on, is_judged, is_found, [health.worst.state for health in known])


def _print_lead(args: argparse.Namespace) -> None:
    runs = read_logs(args.paths, args.metric, pattern=args.pattern).runs
    rules, onsets = lead(runs)
    rows = [rule.row for rule in rules if rule.num_steps]
    if args.json:
        print(json.dumps(plain({"runs": len(runs), "explosions": onsets, "rules": rows}), indent=2))
        return
    console = terminal.console()
    console.print(
        f"{plural(len(runs), 'run')}, {plural(sum(len(part.steps) for run in runs for part in run.parts), 'step')}, "
        f"{plural(len(onsets), 'explosion')}; a rule warned of one when it found fault in the "
        f"{HORIZON} steps before it."
    )
    table = Table(
        "rule", "warned of", "steps ahead", "by luck", "false alarms", "verdict", box=None, padding=(0, 2, 0, 0)
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _json(folder: RunFolder, health: RunHealth) -> str:
    document = {
        "run": folder.name,
        "metrics": folder.metrics.source,
        "state": health.state,
        "worst": {"state": health.worst.state, "step": health.worst.step},
        "steps": [{"step": v.step, "state": v.state, "reasons": v.reasons} for v in health.verdicts],
        "advice": {
            finding.worst.name: [{"do": do, "line": line} for do, line in folder.advice(finding.worst)]
            for finding in health.findings
        },
        "not_judged": list(health.silent),
        "other_runs": [run.name for run in folder.runs[1:]],
        "notes": health.notes + folder.notes,
    }
    return json.dumps(plain(document), indent=2, allow_nan=False)


def _print(folder: RunFolder, healths: list[RunHealth]) -> None:
    console, health = terminal.console(), healths[0]
    console.print(one_line(folder.name), style="bold")
    headline = health.headline
    if not folder.events:
        diagnosis = diagnose(folder.runs[0])
        headline = health.headline
        is_found = {"gradient_jump", "non_finite"} & {finding.worst.name for finding in health.findings}
        if diagnosis.kind and not is_found:  # during the rules' own warm-up
            console.print(one_line(diagnosis.headline), style="bold red")
    console.print(headline)
    console.print(_strip(health))
    _print_findings(console, health, folder)
    if health.silent:
        console.print(f"Not checked, as the run logs no metric for them: {', '.join(health.silent)}.", style="dim")
    for note in health.notes:
        console.print(note, style="yellow")
    console.print("docs/health.md explains every rule and its source.", style="dim")
    for run, health in list(zip(folder.runs, healths, strict=True))[1:]:
        diagnosis = diagnose(run)
        state = health.headline if health else "No metrics that can be judged."
        spike = f"{diagnosis.headline} " if diagnosis.kind else ""
        print(one_line(f"{run.name}: {spike}{state}"))


def _print_findings(console: Console, health: RunHealth, folder: RunFolder) -> None:
    """Each rule that found fault, and its advice; a line that several rules advise stands once."""
    printed: set[str] = set()
    for finding in health.findings:
        mark, style = MARKS[finding.worst.state]
        when = f"{finding.worst.state} at step {finding.worst_step}"
        if len(finding.steps) > 1:
            when = f"{finding.worst.state}, first at step {finding.worst_step}; found at {ranges(finding.steps)}"
        console.print(Text.assemble((f"{mark} {finding.worst.name}", style), f"  {when}"))
        console.print(Padding(finding.worst.sentence, (0, 0, 0, 2)))
        advice = folder.advice(finding.worst)
        fresh = [(do, line) for do, line in advice if (line or do) not in printed]
        for do, line in fresh:
            printed.add(line or do)
            console.print(Padding(f"- {do}", (0, 0, 0, 2)))
            if line:
                console.print(Padding(Text(line, style="cyan"), (0, 0, 0, 6)))
        if len(fresh) < len(advice):
            console.print(Padding("- and see above", (0, 0, 0, 2)))


def _strip(health: RunHealth) -> Text:
    """The states as a strip of marks; each line begins with its first step."""
    size = -(-len(health.verdicts) // (STRIP_WIDTH * STRIP_LINES))
    text = Text()
    for start in range(0, len(health.verdicts), STRIP_WIDTH * size):
        line = health.verdicts[start : start + STRIP_WIDTH * size]
        text.append(f"step {line[0].step:>6}  ", style="dim")
        for at in range(0, len(line), size):
            worst = max(line[at : at + size], key=lambda v: STATES.index(v.state))
            text.append(*MARKS[worst.state])
        text.append("\n")
    legend = ", ".join(f"{mark} {state}" for state, (mark, _) in MARKS.items())
    return text.append(legend + (f"; {size} steps to a mark" if size > 1 else ""), style="dim")


EXPLOSION = 10.0
"""Times normal."""
HORIZON = 20
"""Logged steps before an explosion in which a warning counts."""
CHANCE = 0.05
"""A rule leads where luck would do as well less often than this."""


@dataclass
class RuleLead:
    """One rule over all runs."""

    name: str
    ahead: list[int] = field(default_factory=list)
    """For each explosion that it warned of, the steps from its first warning to the explosion."""
    num_false: int = 0
    """Stretches of fault that no explosion followed."""
    num_steps: int = 0
    """Steps that it judged."""
    lucks: list[float] = field(default_factory=list)
    """For each explosion, the share of its run's steps with a fault in the ``HORIZON`` steps before them."""

    @property
    def leads(self) -> bool:
        """Whether luck would warn of as many explosions in fewer than one of 20 cases."""
        n, p = len(self.lucks), mean(self.lucks or [0.0])
        by_luck = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(len(self.ahead), n + 1))
        return bool(self.ahead) and by_luck < CHANCE

    @property
    def verdict(self) -> str:
        if not self.lucks:
            return "not seen: no run with an explosion logs it"
        if self.leads:
            return "leads"
        return "no better than luck" if self.ahead else "never warned before one"

    @property
    def row(self) -> list[str]:
        """The rule as a row of the table: name, warned of, steps ahead (median, range), luck, false alarms, verdict."""
        ahead = f"{median(self.ahead):g} ({min(self.ahead)} to {max(self.ahead)})" if self.ahead else "–"
        warned = f"{len(self.ahead)} of {len(self.lucks)}"
        false = f"{self.num_false} in {self.num_steps:,} steps"
        return [self.name, warned, ahead, percent(mean(self.lucks or [0.0]), 2), false, self.verdict]


def lead(runs: Sequence[LoggedRun]) -> tuple[list[RuleLead], list[tuple[str, int, float]]]:
    """Every rule's warnings beside what exploded; and for each explosion its run, first step, and times normal."""
    rules = {name: RuleLead(name) for name in HealthConfig.rule_names()}
    onsets = []
    for run in runs:
        large = [e for e in diagnose(run).explosions if not e.is_start and e.times >= EXPLOSION]
        for segment in run.segments:
            own = sorted((e for e in large if e.segment is segment), key=lambda e: e.first)
            onsets += [(run.name, e.first, e.times) for e in own]
            _add(rules, segment, [e.first for e in own])
    return list(rules.values()), onsets


def _add(rules: dict[str, RuleLead], segment: Segment, onsets: list[int]) -> None:
    """Adds one segment. Places count logged steps, so that a log of every tenth step has the same horizon."""
    metrics = surviving(segment)
    health = judge(metrics)
    place = {step: at for at, step in enumerate(metrics.steps)}
    first, begins = place[segment.first], [place[step] for step in onsets]
    for name, rule in rules.items():
        if name in health.silent:
            continue
        faults = [place[v.step] for v in health.verdicts if any(reason.name == name for reason in v.reasons)]
        for begin in begins:
            before = [at for at in faults if begin - HORIZON <= at < begin]
            if before:
                rule.ahead.append(begin - before[0])
        known = set(faults)
        after_fault = [not known.isdisjoint(range(at - HORIZON, at)) for at in range(first, len(metrics.steps))]
        rule.num_steps += len(after_fault)
        rule.lucks += [mean(after_fault)] * len(begins)
        rule.num_false += _num_false([at for at in faults if at >= first], begins)


def _num_false(faults: list[int], begins: list[int]) -> int:
    """Stretches of fault, at most a horizon apart, without an explosion in them or within a horizon after them."""
    stretches = np.split(faults, np.flatnonzero(np.diff(faults) > HORIZON) + 1) if faults else []
    return sum(not any(s[0] <= begin <= s[-1] + HORIZON for begin in begins) for s in stretches)
