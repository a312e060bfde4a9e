# SPDX-License-Identifier: Apache-2.0
"""Run tools on one spike of the collection, and score their answers against the truth."""

import contextlib
import io
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from lab.benchmarks.links import HEALTHY, Plan
from lab.benchmarks.run import Record
from lab.benchmarks.spikes.collection import AFTER, KINDS, TIMES, Kind, Truth, spike_of
from lab.benchmarks.spikes.natural import NATURAL, STEPS, first_spike, measured_truth
from lab.benchmarks.spikes.tools import TOOLS, Answer, Bisection, GradLoc, Tool, TrainScope
from lab.output import figure, table

ALONE = (GradLoc, Bisection, TrainScope)
"""Tools that get a run of their own, as they have hooks on the model; the others share one."""
MEASURED = range(24, HEALTHY)  # steps whose processor time is compared


def measure(kind: str, model: str, seed: int, tools: Sequence[str]) -> Record:
    """Return each tool's answer to one spike, and its score.

    Args:
        kind: of :data:`KINDS` or :data:`NATURAL`.
        model: ``gpt`` or ``llama``.
        seed: draws sizes, batches, and the faulty parameter.
        tools: names in :data:`TOOLS`.
    """
    torch.set_num_threads(1)
    for name in ("gradloc", "trainscope", "rlprobe", "rl-doctor"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return measure_plan(kind, Plan.of(model, seed), tools)


def measure_plan(kind: str, plan: Plan, tools: Sequence[str]) -> Record:
    """Return :func:`measure` of a run whose sizes are given."""
    is_natural = kind in NATURAL
    before, usual_s, _ = _run(kind, plan, False, [], STEPS if is_natural else HEALTHY + AFTER)
    row: Record = {"kind": kind, "model": plan.model, "seed": plan.seed, "spike": None, "answers": {}}
    spike, truth = first_spike(before) if is_natural else None, None
    if is_natural:
        if spike is None:
            return row
        truth = measured_truth(kind, plan, spike)
        row["truth"] = {"links": sorted(truth.links), "rows": sorted(truth.rows), "involved": sorted(truth.involved)}
    classes = [TOOLS[name] for name in tools]
    groups = [[each] for each in classes if each in ALONE] + [[each for each in classes if each not in ALONE]]
    for group in filter(None, groups):
        with tempfile.TemporaryDirectory(prefix="spikes-", ignore_cleanup_errors=True) as folder:
            attached = [each(Path(tempfile.mkdtemp(dir=folder))) for each in group]
            norms, seconds, run = _run(kind, plan, True, attached, HEALTHY + AFTER if spike is None else spike + AFTER)
            row["spike"] = spike = spike if is_natural else spike_of(norms, before)
            if spike is None:
                return row
            for tool in attached:
                answer = tool.answer(run, spike)
                extra = seconds[spike] - statistics.median(seconds[step] for step in MEASURED)
                first = spike if is_natural else HEALTHY
                found = score(truth or run.truth, answer, spike, first) | {"answer": vars(answer)}
                if len(group) == 1:
                    prices = [seconds[step] / usual_s[step] - 1 for step in MEASURED]
                    found |= {"price": statistics.median(prices), "seconds": max(extra, 0.0)}
                row["answers"][tool.name] = found
    return row


def _run(
    kind: str, plan: Plan, is_faulty: bool, tools: Sequence[Tool], num_steps: int
) -> tuple[list[float], list[float], Kind]:
    """Return the norms and the processor time of each step, and the run."""
    given: dict[str, object] = {}
    for tool in tools:
        given |= tool.given()
    seconds = []
    with contextlib.redirect_stdout(io.StringIO()):
        run = (KINDS | NATURAL)[kind](plan, is_faulty, **given)
        for tool in tools:
            tool.attach(run)
            run.observers.append(tool.after_backward)
        for _ in range(num_steps):
            before = time.process_time()
            run.take()
            seconds.append(time.process_time() - before)
    return run.norms, seconds, run


def score(truth: Truth, answer: Answer, spike: int, first: int = HEALTHY) -> Record:
    """Return whether a tool noticed by itself, and whether it names the right link and place, and anything innocent.

    To notice is to speak between the ``first`` faulty step and the one after the spike. What a tool names at the
    spike's step counts whether or not it noticed: a user who knows the step may ask for it.
    """
    noticed = answer.step is not None and first <= answer.step <= spike + 1
    if truth.rows and truth.position is not None and answer.tokens:
        place = any((*row, truth.position) in answer.tokens[:3] for row in truth.rows)
    elif truth.rows:
        place = bool(truth.rows & {*answer.rows[:3]})
        is_elsewhere = truth.is_everywhere or answer.link != "batch"  # two links may be right answers
        place |= is_elsewhere and answer.link in truth.links and not answer.rows
    elif truth.parameter:
        place = truth.parameter in answer.parameters[:3]
    else:  # the whole batch, or every parameter
        place = answer.link in truth.links and not answer.rows
    accused = {*answer.rows[: answer.num_accused]} - truth.rows - truth.involved
    return {"noticed": noticed, "link": answer.link in truth.links, "place": place, "innocent": bool(accused)}


def planted(rows: Sequence[Record]) -> list[Record]:
    """Return the rows of planted faults."""
    return [row for row in rows if row["kind"] in KINDS]


def natural(rows: Sequence[Record]) -> list[Record]:
    """Return the rows of runs with nothing planted."""
    return [row for row in rows if row["kind"] in NATURAL]


def report(rows: Sequence[Record]) -> str:
    """Return the tables of planted faults, and those of natural spikes, in Markdown."""
    parts = [part for part in (planted(rows), natural(rows)) if any(row["spike"] is not None for row in part)]
    return "\n\n".join(text for part in parts for text in (sentence(part), comparison(part), by_kind(part)))


def comparison(rows: Sequence[Record]) -> str:
    """Return each tool's counts over all spikes, as a Markdown table."""
    spikes = [row for row in rows if row["spike"] is not None]
    lines: list[Sequence[object]] = [
        ("tool", "noticed", "right link", "right place", "accused innocents", "healthy step", "seconds at the spike"),
    ]
    for name in _names(spikes):
        found = [row["answers"][name] for row in spikes]
        counts = [sum(each[column] for each in found) for column in ("noticed", "link", "place", "innocent")]
        price, seconds = "", ""
        if "price" in found[0]:
            price = f"{statistics.median(each['price'] for each in found):+.0%}"
            seconds = f"{statistics.median(each['seconds'] for each in found):.2f}"
        lines.append((name, *counts, price, seconds))
    return table(lines)


def by_kind(rows: Sequence[Record]) -> str:
    """Return how often each tool has the right place, by kind of spike, as a Markdown table."""
    spikes = [row for row in rows if row["spike"] is not None]
    names = _names(spikes)
    lines: list[Sequence[object]] = [("kind", "spikes", *names)]
    for kind in [*KINDS, *NATURAL]:
        found = [row["answers"] for row in spikes if row["kind"] == kind]
        if found:
            lines.append((kind, len(found), *(sum(each[name]["place"] for each in found) for name in names)))
    return table(lines)


def _names(spikes: Sequence[Record]) -> list[str]:
    """Return the tools that were compared, in the order of :data:`TOOLS`."""
    return [name for name in TOOLS if name in spikes[0]["answers"]]


def picture(rows: Sequence[Record], path: Path) -> None:
    """Draw the shares of planted spikes with the right place, and with an innocent accused, as bars by tool."""
    spikes = [row for row in planted(rows) if row["spike"] is not None]
    names = _names(spikes)[::-1]
    bars = ((0.2, "place", "right place", "#2a7f62"), (-0.2, "innocent", "innocent", "#c0504d"))
    with figure(path, 8, 1) as (_, axes):
        for offset, column, label, color in bars:
            shares = [100 * sum(row["answers"][name][column] for row in spikes) / len(spikes) for name in names]
            axes.barh([at + offset for at in range(len(names))], shares, 0.38, label=label, color=color)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlim=(0, 100), xlabel=f"% of {len(spikes)} spikes")
        axes.legend(loc="lower right", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)


def sentence(rows: Sequence[Record]) -> str:
    """Return how many runs spiked."""
    num_spikes, what = sum(row["spike"] is not None for row in rows), "with a fault" if planted(rows) else "without one"
    return f"{len(rows)} runs {what}; {num_spikes} had a norm {TIMES:g} times the usual one, and are compared."
