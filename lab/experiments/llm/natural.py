# SPDX-License-Identifier: Apache-2.0
"""Summarize the spikes of `wild`, `wild-long` and `tool-loop`: every event, and the effect of each action.

Writes their record to `natural.json`, and a figure to `natural.png`.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lab.experiments import suite, summaries
from lab.experiments.verdict import read_events
from lab.output import figure, write_json

NORM, REWARD = "actor/grad_norm_max", "critic/score/mean"
MODES = ("observe", "mask", "skip", "heal", "twin")
KINDS = ("one token", "a few", "whole answers", "nothing")
"""Kinds of what an event names."""
LEGEND = """\
All tables but the second: of runs that observe. norm: of the gradient before clipping, the largest of a step's updates.
reward: the mean of a step's rollouts, in the arm's own measure. cause: of the step where it has one, else the commonest
of what is named. updates: the search's passes, in steps of the trainer."""


def record(found: list[summaries.Run], experiment: str) -> dict[str, Any]:
    """Return the record of the tables: `command`, `runs` and `events`.

    Raises:
        ExperimentError: if a successful run cannot be read.
    """
    runs, events = [], []
    for folder, cell in found:
        steps, own = summaries.read_steps(folder, NORM), read_events(folder)
        arm, _, mode = cell["arm"].rpartition("-")
        arm, mode = (arm, mode) if mode in MODES else (cell["arm"], MODES[0])
        place = {"arm": arm, "mode": mode, "seed": cell["seed"]}
        norms, rewards = [float(data[NORM]) for data in steps.values()], [data[REWARD] for data in steps.values()]
        runs.append({**place, "minutes": round(cell["seconds"] / 60, 1), "norms": norms, "rewards": rewards})
        events += [{**place, **summary(event)} for event in own]
    return {"command": f"./run_experiment.sh {experiment}", "runs": runs, "events": events}


def summary(event: dict) -> dict[str, Any]:
    """Return an event's numbers for the tables; `largest` describes the culprit with the largest share."""
    step, search, shares = event["step"], event["search"], event["shares"] or {}
    culprits = event["culprits"]
    data = {
        "step": step["global_step"],
        "norm": event["trigger"]["grad_norm"],
        "threshold": event["trigger"]["threshold"],
        "named": [len(culprit["positions"]) for culprit in culprits],
        "spans": [culprit["span"] for culprit in culprits],
        "answers": len({culprit["sequence_id"] for culprit in culprits}),
        "cause": cause(event),
        **{key: shares.get(key) for key in ("closure", "closure_error", "is_trusted")},
        "norm_after": event["certificate"]["norm_after"],
        "verdict": event["certificate"]["verdict"],
        # an update of M micro-batches is M forwards and M backwards, and a backward counts as two forwards
        "updates": (search["forwards"] + 2 * search["backwards"]) / (3 * step["num_micro_batches"]),
        "cures": [
            {key: cure[key] for key in ("name", "verdict", "norm_after", "forwards")} for cure in event["cures"] or ()
        ],
        "largest": None,
    }
    if culprits:
        worst = max(culprits, key=lambda culprit: abs(finite(culprit["share"]) or 0.0))
        old, now = (finite(worst["values"].get(key)) for key in ("old_log_prob_used", "log_prob"))
        data["largest"] = {
            "text": "".join(worst["tokens"] or ())[:16],
            "p": [probability(old), probability(now)],
            "ratio": None if old is None or now is None else math.exp(now - old),
            "advantage": finite(worst["values"].get("advantage")),
            "share": finite(worst["share"]),
        }
    return data


def finite(value: Any) -> float | None:
    """Return the number, or None if it is missing or not finite, which records write as a word."""
    return value if isinstance(value, int | float) else None


def cause(event: dict) -> str:
    """Return the step's cause, else the most common one of its culprits."""
    if event.get("cause"):
        return event["cause"]["label"]
    labels = Counter(culprit["cause"]["label"] for culprit in event["culprits"])
    return labels.most_common(1)[0][0] if labels else "-"


def probability(log_prob: Any) -> float | None:
    """Return the probability of a log-prob; None where this is no finite number."""
    return None if finite(log_prob) is None else math.exp(log_prob)


# ---- tables


def number(value: float | str | None) -> str:
    """Format with three digits; return a word unchanged, and a dash for None."""
    return f"{value:.3g}" if isinstance(value, int | float) else str(value or "-")


def composition_table(data: dict[str, Any]) -> summaries.Table:
    """Return a row for each arm, over its seeds, and one for all, from the runs that observe."""
    runs = Counter(run["arm"] for run in data["runs"] if run["mode"] == MODES[0])
    lines = [composition_row(arm, count, observed(data, arm)) for arm, count in runs.items()]
    return summaries.table_of([*lines, composition_row("all", runs.total(), observed(data))])


def observed(data: dict[str, Any], arm: str | None = None) -> list[dict]:
    """Return the events of the runs that observe, of one arm or of all."""
    return [event for event in data["events"] if event["mode"] == MODES[0] and (arm is None or event["arm"] == arm)]


def composition_row(arm: str, num_runs: int, found: list[dict]) -> dict[str, str]:
    kinds, causes = Counter(map(kind, found)), Counter(event["cause"] for event in found)
    measured = [event for event in found if event["closure"] is not None]
    largest = [event["largest"] for event in found if event["largest"]]
    updates = [event["updates"] for event in found]
    return {
        "arm": arm,
        "runs": str(num_runs),
        "events": str(len(found)),
        **{name: str(kinds[name]) for name in KINDS},
        "causes": ", ".join(f"{count} {label}" for label, count in causes.most_common()) or "-",
        "explained": str(sum(event["verdict"] == "explained" for event in found)),
        "shares trusted": f"{sum(bool(event['is_trusted']) for event in measured)} of {len(measured)}",
        "the largest: p when sampled": spread(token["p"][0] for token in largest),
        "ratio": spread(token["ratio"] for token in largest),
        "updates a search: median": spread(updates, statistics.median),
        "most": spread(updates, max),
    }


def kind(event: dict) -> str:
    """Return which of `KINDS` was named; `a few` are tokens or spans, but no whole answer."""
    one, few, answers, nothing = KINDS
    if not event["named"]:
        return nothing
    if "sequence" in event["spans"]:
        return answers
    return one if sum(event["named"]) == 1 else few


def spread(values: Iterable[float | None], *picks: Callable[[list[float]], float]) -> str:
    """Format these picks of the known values: by default minimum, median and maximum."""
    known = [value for value in values if value is not None]
    return ", ".join(number(pick(known)) for pick in picks or (min, statistics.median, max)) if known else "-"


def effects_table(data: dict[str, Any]) -> summaries.Table:
    """Return a row for each arm and seed: largest norm and last reward, as it is, with each action, and as a twin."""
    modes = [mode for mode in MODES if any(run["mode"] == mode for run in data["runs"])]
    by_place: dict[tuple[str, int], dict[str, dict]] = {}
    for run in data["runs"]:
        by_place.setdefault((run["arm"], run["seed"]), {})[run["mode"]] = run
    lines = []
    for (arm, seed), runs in by_place.items():
        norms = {mode: number(max(run["norms"])) for mode, run in runs.items()}
        rewards = {mode: number(run["rewards"][-1]) for mode, run in runs.items()}
        cells = {f"largest norm: {mode}": norms.get(mode, "-") for mode in modes}
        cells |= {f"last reward: {mode}": rewards.get(mode, "-") for mode in modes}
        lines.append({"arm": arm, "seed": str(seed), **cells})
    return summaries.table_of(lines)


def events_table(data: dict[str, Any]) -> summaries.Table:
    """Return a row for each event of the runs that observe."""
    return summaries.table_of([events_row(event) for event in observed(data)])


def events_row(event: dict) -> dict[str, str]:
    largest = event["largest"] or {"p": []}
    error = "" if event["closure_error"] is None else f" ± {event['closure_error']:.3f}"
    return {
        "arm": event["arm"],
        "seed": str(event["seed"]),
        "step": str(event["step"]),
        "norm / threshold": f"{number(event['norm'])} / {number(event['threshold'])}",
        "named": f"{sum(event['named'])} in {event['answers']}" if event["named"] else "nothing",
        "largest": f"`{largest['text']!r}`".replace("|", "\\|") if event["largest"] else "-",
        "p: old, now": ", ".join(map(number, largest["p"])) or "-",
        **{key: number(largest.get(key)) for key in ("ratio", "advantage", "share")},
        "cause": event["cause"],
        "closure": "-" if event["closure"] is None else f"{event['closure']:.3f}{error}",
        "norm without": number(event["norm_after"]),
        "certificate": event["verdict"],
        "updates": number(event["updates"]),
    }


def cures_table(data: dict[str, Any]) -> summaries.Table:
    """Return a row for each arm with cures, over its seeds: the settings measured, and which healed the step."""
    by_arm: dict[str, list[dict]] = {}
    for event in observed(data):
        if "cures" in event:
            by_arm.setdefault(event["arm"], []).append(event)
    return summaries.table_of([cures_row(arm, found) for arm, found in by_arm.items()])


def cures_row(arm: str, found: list[dict]) -> dict[str, str]:
    first, under, left = Counter[str](), list[float](), list[str]()
    for event in found:
        measured = [cure for cure in event["cures"] if cure["forwards"]]
        healed = next((cure for cure in event["cures"] if cure["verdict"] == "healed"), None)
        # the search ends with the setting that heals, so that one was measured last
        measured.sort(key=lambda cure: cure["verdict"] == "healed")
        first.update(cure["name"] for cure in measured[:1])
        if healed:
            under.append(healed["norm_after"] / event["threshold"])
        else:
            names = ", ".join(cure["name"] for cure in measured)
            left.append(f"{event['seed']}/{event['step']}: {names or 'none measured'}")
    return {
        "arm": arm,
        "events": str(len(found)),
        "healed": str(len(under)),
        "the setting measured first": ", ".join(f"{count} {name}" for name, count in first.most_common()) or "-",
        "norm under it / threshold": spread(under),
        "not healed": "; ".join(left) or "-",
    }


# ---- the figure


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw the figure of docs/natural-spikes.md: each event's norm with and without its culprits, its largest one."""
    arms = list(dict.fromkeys(event["arm"] for event in data["events"]))
    drawn = [event for event in observed(data) if finite(event["norm"]) is not None]
    with figure(path, 11, 2) as (_, (steps, places)):
        for index, event in enumerate(sorted(drawn, key=lambda event: event["norm"])):
            color = f"C{arms.index(event['arm'])}"
            ends = (event["norm_after"] or event["norm"], event["norm"])
            steps.plot([index, index], ends, color=color, linewidth=1.2, alpha=0.6)
            steps.plot(index, ends[1], "o", color=color, markersize=5)
            steps.plot(index, ends[0], "o", color=color, markersize=5, markerfacecolor="white")
            steps.plot(index, event["threshold"], "_", color="black", markersize=7)
            largest = event["largest"]
            if largest and largest["p"][0] and largest["ratio"]:
                places.plot(largest["p"][0], largest["ratio"], "o", color=color, markersize=6, alpha=0.7)
        for index, arm in enumerate(arms):
            steps.plot([], [], "o", color=f"C{index}", label=arm)
        steps.plot([], [], "_", color="black", label="threshold")
        steps.set(yscale="log", title="gradient norm, and (hollow) without what is named", xlabel="event, by its norm")
        steps.legend(frameon=False)
        places.set(xscale="log", yscale="log", title="the largest culprit")
        places.set(xlabel="its probability when it was sampled", ylabel="importance ratio at the spike")


def make(runs: list[summaries.Run], folder: Path) -> list[summaries.Table]:
    """Return the four tables; write the record and the figure into the folder."""
    data = record(runs, suite.read(folder)["experiment"])
    write_json(folder / "natural.json", data)
    draw(data, folder / "natural.png")
    return [composition_table(data), effects_table(data), cures_table(data), events_table(data)]
