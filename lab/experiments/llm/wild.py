# SPDX-License-Identifier: Apache-2.0
"""Print a table of what spiked in each arm of `wild`, and why.

    python -m lab.experiments.llm.wild SUITE_DIR [SUITE_DIR ...]

Prints one table of all suites and writes it to `summary.md` in the first. Standard library only.
"""

import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from lab.experiments import suite
from lab.experiments.verdict import read_events

NORM, REWARD, LENGTH = "actor/grad_norm_max", "critic/score/mean", "response_length/mean"
LEGEND = """\
norm: of the gradient before clipping, the largest of a step's updates. reward: the mean of a step's rollouts, in the
arm's own measure. tokens an answer: their mean in the first and the last step. named: how many tokens, in how many
answers, and the token that counts most. cause: of the step where it has one, else the commonest of the named. norm
without: what the certificate measured without what is named, which is the norm that `mask` steps with. done: what the
run did about it."""


def read(folder: Path) -> tuple[dict[int, dict], list[dict]]:
    """Return a run's metrics by step, and its events.

    Raises:
        ExperimentError: if the metrics are missing or truncated, or have no step.
    """
    return suite.read_steps(folder, NORM), read_events(folder / "gradloc" / "events.jsonl")


def cells(folder: Path, cell: suite.Cell) -> dict[str, str]:
    """Return one run's cells by column."""
    steps, events = read(folder)
    norms = {step: float(data[NORM]) for step, data in steps.items()}
    rewards, lengths = ([data[name] for data in steps.values()] for name in (REWARD, LENGTH))
    worst = max(norms, key=lambda step: norms[step])
    return {
        "arm": cell["arm"],
        "seed": "config's" if cell["seed"] is None else str(cell["seed"]),
        "steps": str(len(norms)),
        "minutes": f"{cell['seconds'] / 60:.1f}",
        "norm: median": number(statistics.median(norms.values())),
        "largest (step)": f"{number(norms[worst])} ({worst})",
        "reward: first, last": f"{number(rewards[0])}, {number(rewards[-1])}",
        "tokens an answer": f"{number(lengths[0])}, {number(lengths[-1])}",
        "events": str(len(events)),
        **cells_of_event(events[0] if events else None),
    }


def cells_of_event(event: dict | None) -> dict[str, str]:
    """Return the cells of a run's first event by column."""
    first = "first event: norm / threshold"
    if event is None:
        return {first: "no event", **dict.fromkeys(("named", "cause", "norm without", "certificate", "done"), "-")}
    trigger, certificate = event["trigger"], event["certificate"]
    norms = f"{number(trigger['grad_norm'])} / {number(trigger['threshold'])}"
    return {
        first: f"step {event['step']['global_step']}: {norms}",
        "named": named(event["culprits"]),
        "cause": cause(event),
        "norm without": number(certificate["norm_after"]),
        "certificate": certificate["verdict"],
        "done": event["action"]["taken"],
    }


def named(culprits: list[dict]) -> str:
    """Describe the number of tokens and answers, and the token with the largest share."""
    if not culprits:
        return "nothing"
    num_tokens = sum(len(culprit["positions"]) for culprit in culprits)
    answers = len({culprit["sequence_id"] for culprit in culprits})
    worst = largest(culprits)
    return f"{num_tokens} in {answers}: {text(worst)!r}, advantage {number(worst['values'].get('advantage'))}"


def largest(culprits: list[dict]) -> dict:
    """Return the culprit with the largest share."""
    return max(culprits, key=lambda culprit: abs(finite(culprit["share"]) or 0.0))


def text(culprit: dict) -> str:
    """Return the beginning of a culprit's text."""
    return "".join(culprit["tokens"] or ())[:16]


def finite(value: Any) -> float | None:
    """Return the number, or None if it is missing or not finite, which records write as a word."""
    return value if isinstance(value, int | float) else None


def cause(event: dict) -> str:
    """Return the step's cause, else the most common one of its culprits."""
    if event.get("cause"):
        return event["cause"]["label"]
    labels = Counter(culprit["cause"]["label"] for culprit in event["culprits"])
    return labels.most_common(1)[0][0] if labels else "-"


def number(value: float | str | None) -> str:
    """Format with three digits; return a word unchanged."""
    return f"{value:.3g}" if isinstance(value, int | float) else str(value or "-")


def make(runs: list[suite.Run], _folder: Path) -> list[suite.Table]:
    """Return one table of all runs."""
    return [suite.table_of([cells(*run) for run in runs])]


def main(argv=None) -> int:
    return suite.print_summary(__doc__, LEGEND, make, argv)


if __name__ == "__main__":
    sys.exit(main())
