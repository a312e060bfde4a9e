# SPDX-License-Identifier: Apache-2.0
"""The subcommands, one module each.

``add_arguments(parser)`` says what a subcommand takes; ``run(args)`` does it and returns the exit code.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from typing import TypeVar

from ..errors import ReportError

Made = TypeVar("Made")
COMMANDS = {
    "show": "what happened in a run, from its events or from its log alone; the page with -o",
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
    """What says where the norm is in a log that does not; ``metric`` and ``pattern`` of :func:`..runs.run.read_run`."""
    parser.add_argument("--metric", metavar="NAME", help="the metric that holds the gradient norms")
    parser.add_argument(
        "--pattern",
        metavar="REGEX",
        help=r"where a line has its norm: 'step (?P<step>\d+).*norm (?P<value>\S+)'; other groups are metrics",
    )


def add_set_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """``--set``, which :func:`assignments` reads."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=f"{what}; may be given again")


def assignments(given: Iterable[str], prefix: str, values: str, make: Callable[..., Made]) -> Made:
    """What ``make`` makes of what ``--set KEY=VALUE`` sets; a key may be the full one, with what is before ``prefix``.

    Raises:
        ReportError: where a value cannot be read, which ``values`` says how to write, or ``make`` refuses a setting.

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
