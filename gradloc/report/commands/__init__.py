# SPDX-License-Identifier: Apache-2.0
"""Subcommands, one per module.

``add_arguments(parser)`` declares the arguments; ``run(args)`` runs the command and returns the exit code.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from typing import TypeVar

from ..errors import ReportError

Made = TypeVar("Made")
COMMANDS = {
    "report": "what happened in a run, from its events or from its log alone; the page with -o",
    "compare": "two runs side by side",
    "watch": "a run that is going on: norm, threshold, health, events as they come; --serve for the page",
    "check": "before a run: what is on, what is refused, what a search takes, by the run's own config",
    "health": "healthy, warning or danger, step by step, with reasons and what people do",
    "cure": "which single setting heals how many of a run's spikes",
    "trigger": "which steps the trigger would have flagged, with these settings or others",
    "buckets": "a run's gradient analyses: figures by reward variance, or three steps in one",
    "mismatch": "why the log-probs of the rollout engine and of the trainer differ",
    "quartiles": "which tokens' gradients dominate, by probability: figures and tables",
}


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--metric`` and ``--pattern``, which locate the norm in a log, see :func:`..runs.run.read_run`."""
    parser.add_argument("--metric", metavar="NAME", help="the metric that holds the gradient norms")
    parser.add_argument(
        "--pattern",
        metavar="REGEX",
        help=r"where a line has its norm: 'step (?P<step>\d+).*norm (?P<value>\S+)'; other groups are metrics",
    )


FAIL_ON = {"found": "anything is found", "warning": "a step is in warning or danger", "danger": "a step is in danger"}
"""Conditions under which a command exits with 1."""
EXIT_CODES = """\
exit codes:
  0  judged; with --fail-on: and nothing that it names was found
  1  found what --fail-on names
  2  could not be read, or could not be judged: nothing that a rule reads, or too few steps
"""


def add_fail_on(parser: argparse.ArgumentParser) -> None:
    """Add ``--fail-on``, which :func:`exit_code` reads."""
    said = "; ".join(f"{name}: {when}" for name, when in FAIL_ON.items())
    parser.add_argument("--fail-on", choices=FAIL_ON, metavar="WHAT", help=f"exit with 1 on WHAT; {said}")


def exit_code(fail_on: str | None, is_judged: bool, is_found: bool, states: Iterable[str]) -> int:
    """Return the exit code of a command that judges runs; ``states`` are their worst states of health."""
    states = {*states}
    if fail_on == "found" and is_found:
        return 1
    if fail_on == "danger" and "danger" in states or fail_on == "warning" and states & {"warning", "danger"}:
        return 1
    return 0 if is_judged else 2


def add_set_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--set``, which :func:`assignments` reads."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=f"{what}; may be given again")


def assignments(given: Iterable[str], prefix: str, values: str, make: Callable[..., Made]) -> Made:
    """Call ``make`` with the settings of ``--set KEY=VALUE``; a key may have its blocks up to ``prefix`` before it.

    Raises:
        ReportError: where a value cannot be read, with ``values`` as the hint, or ``make`` refuses a setting.

    >>> assignments(["trainer.health.policy_kl=[0.2,null]", "window=8"], "health.", "", dict)
    {'policy_kl': [0.2, None], 'window': 8}
    """
    settings = {}
    for entry in given:
        key, _, text = entry.partition("=")
        try:
            settings[key.rpartition(prefix)[2].strip()] = json.loads(text.lower())
        except ValueError:
            raise ReportError(f"--set {entry} cannot be read: write KEY=VALUE with {values}.") from None
    try:
        return make(**settings)
    except ValueError as error:
        raise ReportError(f"--set: {error}") from None
