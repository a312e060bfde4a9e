# SPDX-License-Identifier: Apache-2.0
"""``gradloc-report mismatch PATH``: why the log-probs of the rollout engine and of the trainer differ."""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...mismatch import KINDS, Columns, MismatchError, Verdict, judge
from ...mismatch.files import read
from ...record.store import plain
from ...words.numbers import number, percent
from ...words.text import plural
from .. import output
from ..errors import ReportError
from ..pages import terminal

EPILOG = """\
examples:
  gradloc-report mismatch run/token_exports                     prime-rl, trainer.enable_token_export
  gradloc-report mismatch logs/exp_001/train_data_step7.jsonl   NeMo-RL
  gradloc-report mismatch run/events/ID                         an event's bundle
  gradloc-report mismatch columns.csv -o mismatch.html          rollout_log_probs, old_log_probs; a token a line
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="a file or folder with both log-probs of each token")
    parser.add_argument("--step", metavar="NAME", help="of several steps this one; default: the last")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a page with pictures")
    parser.add_argument("--json", action="store_true", help="print every step's verdict and evidence")


def run(args: argparse.Namespace) -> int:
    if args.output is not None:
        output.check(args.output)
    try:
        steps = read(args.path)
        if args.step is not None and args.step not in steps:
            raise ReportError(f"{args.path} has no step {args.step}: there are {', '.join(steps)}.")
        verdicts = {name: judge(columns) for name, columns in steps.items()}
    except MismatchError as error:
        raise ReportError(str(error)) from None
    name = args.step or list(steps)[-1]
    verdict = verdicts[name]
    if args.json:
        told = {step: {"name": each.name, **vars(each)} for step, each in verdicts.items()}
        print(json.dumps(plain(told), indent=1, allow_nan=False))
    elif args.output is not None:
        output.deliver(args.output, page(steps[name], verdict))
    else:
        show(terminal.console(), name, verdict, verdicts)
    return 0


def headline(verdict: Verdict) -> str:
    """The kind's title, or that it cannot be told."""
    return " and ".join(KINDS[kind].title for kind in verdict.kinds) or f"Cannot tell: {verdict.why_not}"


def facts(verdict: Verdict) -> list[tuple[str, str]]:
    """The numbers that every verdict has."""
    return [
        ("tokens", f"{verdict.tokens:,} in {plural(verdict.rows, 'row')}"),
        ("mean ratio", f"{number(verdict.ratio)} ± {number(verdict.ratio_error, 2)}"),
        ("KL of a token (k3)", f"{number(verdict.kl, 3)} nats"),
        ("largest difference", f"{number(verdict.worst, 3)} nats"),
        ("spread of difference over 1 - p, where nothing else is seen", f"{number(verdict.noise, 3)} nats"),
    ]


def evidence(verdict: Verdict, kind: str) -> list[tuple[str, str]]:
    """What a kind was named by."""
    return [
        (name.replace("_", " "), percent(value, 2) if name == "token_share" else number(value, 3))
        for name, value in verdict.evidence[kind].items()
    ]


def show(console: Console, name: str, verdict: Verdict, verdicts: dict[str, Verdict]) -> None:
    """Prints one step's verdict, and the names of the others'."""
    console.print(f"{name}: {headline(verdict)}", style="bold")
    table = Table(box=None, padding=(0, 3, 0, 0), show_header=False)
    for fact in facts(verdict):
        table.add_row(*fact)
    console.print(table)
    for kind in verdict.kinds:
        row = KINDS[kind]
        console.print(f"\n{row.sentence}\nSeen by: {', '.join(' '.join(each) for each in evidence(verdict, kind))}.")
        console.print(f"What helps: {row.helps}.\nPublic threads: {row.threads}.")
    others = {step: each.name for step, each in verdicts.items() if step != name}
    if others:
        console.print("\nOther steps: " + ", ".join(f"{step} {kind}" for step, kind in others.items()), style="dim")


def page(columns: Columns, verdict: Verdict) -> str:
    """The page: the kind in its title, three pictures, the numbers, what people did about it."""
    from ..figures.mismatch import figure_of  # matplotlib takes a second to import
    from ..figures.style import to_svg
    from ..pages.page import fill

    title = headline(verdict)
    lede = " ".join(KINDS[kind].sentence for kind in verdict.kinds) or "No kind's fingerprint fits well enough."
    return fill(
        "mismatch.html",
        title=title,
        lede=lede,
        figure=to_svg(figure_of(columns, title), "mismatch", title),
        facts=facts(verdict),
        kinds=[(KINDS[kind], evidence(verdict, kind)) for kind in verdict.kinds],
    )
