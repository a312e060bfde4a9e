# SPDX-License-Identifier: Apache-2.0
"""Say why the log-probs of the rollout engine and of the trainer differ: ``gradloc mismatch PATH``."""

import argparse
import re
import sys
from math import isnan
from pathlib import Path
from statistics import median

from rich.console import Console

from ...explain.numbers import number, percent
from ...explain.text import capitalized, first_of, plural
from ...mismatch import KINDS, Columns, MismatchError, Verdict, judge
from ...mismatch.columns import SeveralRunsError, TooFewTokensError
from ...mismatch.files import NAMES, read
from ...mismatch.kinds import NUMBERS, REPOSITORIES, SETTINGS
from ...mismatch.verdict import FLOOR, SMALL_KL
from .. import output
from ..errors import ReportError
from ..logs import LoggedRun
from ..logs.formats import check
from ..pages import terminal
from ..runs.events import is_event
from ..runs.health import HealthConfig, RunHealth
from ..runs.health import judge as judge_run
from ..runs.run import read_logs

EPILOG = """\
examples:
  gradloc mismatch run/token_exports                     prime-rl, trainer.enable_token_export
  gradloc mismatch logs/exp_001/train_data_step7.jsonl   NeMo-RL
  gradloc mismatch run/gradloc/events/ID                 an event's bundle; of under 200 tokens, the run's log
  gradloc mismatch columns.csv -o mismatch.html          rollout_log_probs, old_log_probs; a token a line
  gradloc mismatch train.log                             a log of means: how much, not why
"""

_PIPED = "standard input is no log that can be read, and log-probs of tokens are read from a file: name one."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="a file or folder with both log-probs of each token")
    parser.add_argument("--step", metavar="NAME", help="the step to judge, of several (default: the last)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a page with pictures")
    parser.add_argument("--json", action="store_true", help="print every step's verdict and evidence")


def run(args: argparse.Namespace) -> int:
    if args.output is not None:
        output.check(args.output, "json" if args.json else None, [args.path])
    check(args.path)
    if is_event(args.path) and not (args.path / "batch.safetensors").is_file():
        raise ReportError(f"{args.path} was written without a bundle, so its log-probs are not known.")
    notes: list[str] = []
    try:
        steps = read(args.path, notes)
        if args.step is not None and args.step not in steps:
            raise ReportError(f"{args.path} has no step {args.step}; it has {first_of([*steps])}.")
        verdicts = {name: judge(columns) for name, columns in steps.items()}
    except SeveralRunsError as error:
        raise ReportError(str(error)) from None
    except MismatchError as error:
        is_short, log = isinstance(error, TooFewTokensError), args.path
        if is_short and is_event(log):
            log = log.absolute().parents[2]
        means = None if is_event(log) else read_means(log)
        said = str(error) if str(error).startswith(str(args.path)) else f"{args.path}: {error}"
        if means is None or not means[1] and (is_short or _has_columns(means[0])):
            raise ReportError(_PIPED if str(args.path) == "-" else said) from None
        if args.step is not None:
            raise ReportError(f"{log} has means alone, of all steps together: leave --step out.") from None
        if args.output is not None and not args.json:
            raise ReportError(f"{log} has means alone, and a page shows tokens: leave -o out, or add --json.") from None
        if is_short:
            output.say(said, sys.stderr)
            output.say("Falling back to the mismatch metrics that the run logged:", sys.stderr)
        deliver_means(*means, args)
        return 0
    name = args.step or list(steps)[-1]
    verdict = verdicts[name]
    if args.json:
        document = {step: {"name": each.name, **vars(each)} for step, each in verdicts.items()}
        output.deliver(args.output, output.as_json(document))
    elif args.output is not None:
        output.deliver(args.output, page(steps[name], verdict))
    else:
        show(terminal.console(), name, verdict, verdicts)
    terminal.warn(notes)
    return 0


def _has_columns(run: LoggedRun) -> bool:
    """Return whether what was read as a log is a table of log-probs, so that what is wrong with these is to be said."""
    own = {*run.metrics.series, *run.metrics.called.values()}
    return not own.isdisjoint(NAMES["rollout"] + NAMES["trainer"])


def headline(verdict: Verdict) -> str:
    """Return the kind's title; ``Cannot tell`` with the reason where there is none."""
    return " and ".join(KINDS[kind].title for kind in verdict.kinds) or f"Cannot tell: {verdict.why_not}"


def facts(verdict: Verdict) -> list[tuple[str, str]]:
    """Return the numbers of every verdict, with their labels."""
    noise = "not known: hardly a token is left" if isnan(verdict.noise) else f"{number(verdict.noise, 3)} nats"
    return [
        ("tokens", f"{verdict.tokens:,} in {plural(verdict.rows, 'row')}"),
        ("mean ratio", f"{number(verdict.ratio)} ± {number(verdict.ratio_error, 2)}"),
        ("KL of a token (k3)", f"{number(verdict.kl, 3)} nats"),
        ("largest difference", f"{number(verdict.worst, 3)} nats"),
        ("residual noise, of logits", noise),
    ]


def evidence(verdict: Verdict, kind: str) -> str:
    """Say by which numbers a kind was named."""
    numbers: dict[str, float | str] = {"most_noise": FLOOR, "most_stale": SMALL_KL, **verdict.evidence[kind]}
    for name, value in verdict.evidence[kind].items():
        if label := _layout(name):
            numbers |= {"layout": label, "follows": value}
    return KINDS[kind].evidence(numbers)


def every_number(verdict: Verdict, kind: str) -> list[tuple[str, str]]:
    """Return all that was measured of a kind, as labels and values."""
    rows = []
    for name, value in verdict.evidence[kind].items():
        label = NUMBERS.get(name) or f"correlation with {_layout(name)}"
        rows.append((label, percent(value, 2) if label.startswith("share") else number(value, 3)))
    return rows


def _layout(name: str) -> str:
    """Return in words what the rows' differences were compared with; empty for another number's name."""
    if name in ("length", "prompt_length"):
        return f"the {'row' if name == 'length' else 'prompt'}'s length"
    found = re.fullmatch(r"(place|padding)_in_(?:packs|batches)_of_(\d+)", name)
    return f"its {found[1]} in {'packs' if found[1] == 'place' else 'batches'} of {found[2]}" if found else ""


def show(console: Console, name: str, verdict: Verdict, verdicts: dict[str, Verdict]) -> None:
    """Print one step's verdict, and the names of the others'."""
    console.print(f"{name}: {headline(verdict)}", style="bold")
    console.print(terminal.table((), facts(verdict), gap=3))
    for kind in verdict.kinds:
        row = KINDS[kind]
        console.print(f"\n{row.sentence}\nEvidence: {evidence(verdict, kind)} (--json has all numbers.)")
        console.print(f"What helps: {row.helps}.\nPublic threads: {row.threads}.")
    others = {step: each.name for step, each in verdicts.items() if step != name}
    if others:
        console.print("\nOther steps: " + ", ".join(f"{step} {kind}" for step, kind in others.items()), style="dim")


def links(threads: str) -> list[tuple[str, str]]:
    """Return each public thread with its address, empty where that is not known.

    >>> links("TRL #6789, none found")
    [('TRL #6789', 'https://github.com/huggingface/trl/issues/6789'), ('none found', '')]
    """
    found = []
    for thread in threads.split(", "):
        name, _, issue = thread.partition(" #")
        repository = REPOSITORIES.get(name.lower())
        found.append((thread, f"https://github.com/{repository}/issues/{issue}" if repository and issue else ""))
    return found


def page(columns: Columns, verdict: Verdict) -> str:
    """Render the page: the kind, its numbers, what helps, three pictures."""
    from ..figures.mismatch import figures_of  # matplotlib takes a second to import
    from ..figures.style import to_svg
    from ..pages.page import fill

    lede = " ".join(KINDS[kind].sentence for kind in verdict.kinds) or "No kind's fingerprint fits well enough."
    pictures = figures_of(columns)
    return fill(
        "mismatch.html",
        title=capitalized(headline(verdict)),
        lede=lede,
        figures=[
            (number(verdict.worst, 3), "largest difference", "nats, of one token"),
            (number(verdict.kl, 3), "KL of a token", "nats, k3 estimate"),
            (number(verdict.ratio, 4), "mean ratio", f"± {number(verdict.ratio_error, 2)}; 1 where all is well"),
        ],
        pictures=[(name, to_svg(drawn, f"mismatch-{at}", name)) for at, (name, drawn) in enumerate(pictures)],
        facts=facts(verdict),
        kinds=[
            (KINDS[kind], links(KINDS[kind].threads), evidence(verdict, kind), every_number(verdict, kind))
            for kind in verdict.kinds
        ],
    )


# ---- a log, which has means alone


def read_means(path: Path) -> tuple[LoggedRun, RunHealth] | None:
    """Read a log's run and judge its mismatch metrics; None where it is no log."""
    try:
        run = read_logs([path]).runs[0]
    except ReportError:
        return None
    rules = {rule: None for rule in HealthConfig.rule_names() if not rule.startswith("mismatch_")}
    return run, judge_run(run.parts, HealthConfig(**rules))


def deliver_means(run: LoggedRun, health: RunHealth, args: argparse.Namespace) -> None:
    """Print how much the two differ by a log, which cannot say why; raise ReportError where it lacks their metrics."""
    if not health:
        named = {"verl": ["verl"], "trl": ["trl", "ms-swift"]}.get(run.trainer, [*SETTINGS])
        settings = ", or ".join(SETTINGS[name] for name in named)
        raise ReportError(
            f"{run.name} is a log without a metric of how rollout and trainer differ (such as rollout_corr/kl). To log "
            f"one, set {settings}; or name a file with both log-probs of each token (rollout_log_probs, old_log_probs)."
        )
    if args.json:
        document = {"run": run.name, "state": health.worst.state, "unit": health.unit, "metrics": health.metrics}
        output.deliver(args.output, output.as_json(document | {"findings": health.findings}))
        return
    console = terminal.console()
    verdict = "Rollout engine and trainer agree: each logged mismatch metric is within its limit."
    if health.findings:
        first = health.findings[0]
        verdict = f"{health.unit.capitalize()} {first.worst_step}: {first.worst.sentence}"
    console.print(f"{run.name}: {verdict}", style="bold")
    rows = []
    name_of_metric = {logged: name for name, logged in run.metrics.called.items()}
    for logged in health.metrics:
        points = run.metrics.known(name_of_metric.get(logged, logged))
        step, largest = max(points, key=lambda point: abs(point[1]))
        middle = median(value for _, value in points)
        rows.append((logged, number(points[0][1], 3), number(middle, 3), f"{number(largest, 3)}, {health.unit} {step}"))
    console.print(terminal.table(("metric", "first", "median", f"largest, at {health.unit}"), rows, gap=3))
    console.print(
        f"Judged from {plural(len(health.verdicts), 'row')}. The log has means over steps, which show how far "
        "rollout and trainer differ, not why: to see why, name a file with both log-probs of each token (gradloc "
        "mismatch --help)."
    )
