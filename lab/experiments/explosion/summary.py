# SPDX-License-Identifier: Apache-2.0
"""Compare the runs of the explosion in a table and a plot.

Writes `summary.png` into the suite's folder. No torch and no verl.
"""

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from lab.experiments import summaries
from lab.experiments.errors import ExperimentError
from lab.experiments.verdict import read_events, read_lines
from lab.output import figure

LAST_STEPS = 5
"""Number of final steps for the weights' late movement."""
TWIN = "healthy"
"""The arm that others are compared with, seed by seed."""
LEGEND = f"""\
final reward: mean on unseen questions, 8 answers each at temperature 1, with the final weights, and
  its standard error over the questions; against twin: the same of each question's difference.
norm before: median of the steps before anything was planted; warning, spike: the norm at those
  steps (largest of the step's mini-batches, before clipping; after token_clip).
named: at the spike, the first culprit's cause and its ratio to the old policy; "as planted" if the
  event names the planted token and nothing else; norm without it: the certificate's.
from twin: L2 distance of the final weights from the healthy twin's, as a share of the way that the
  twin's weights went. moved: how far the spike's step and the next one, and the last {LAST_STEPS}
  steps, took the weights, as a share of the twin's."""


# ---- what a run left on disk


@dataclass(frozen=True)
class Reading:
    """The files of one run."""

    name: str
    knobs: dict
    steps: dict[int, dict]
    """verl's metrics, by step."""
    planted: dict[int, dict]
    """The planted row of each step that has one, in order; a healthy twin's have no positions."""
    events: dict[int, dict]
    """Each step's first event."""
    rewards: dict[str, float]
    """Mean reward of each question's answers in the final validation; empty without one."""
    weights: list[np.ndarray]
    """All parameters as one float64 vector, before each step and after the last."""

    @property
    def norms(self) -> dict[int, float]:
        """The largest norm of each step's mini-batches, before anything was clipped."""
        return {step: metrics["actor/grad_norm_max"] for step, metrics in self.steps.items()}

    def moved(self, first: int, last: int) -> float:
        """Return the L2 distance between the weights after two steps, which may count from the end."""
        return distance(self.weights[last], self.weights[first])


def read(folder: Path, name: str) -> Reading:
    """Read a run's folder.

    Raises:
        ExperimentError: if a file is missing or truncated.
    """
    try:
        return Reading(
            name=name,
            knobs=json.loads((folder / "knobs.json").read_text(encoding="utf-8")),
            steps=summaries.read_steps(folder, "actor/grad_norm_max"),
            planted={entry["step"]: entry for entry in read_lines(folder / "planted.jsonl")},
            events={event["step"]["global_step"]: event for event in reversed(read_events(folder))},
            rewards=read_rewards(folder / "validation"),
            weights=[as_vector(path) for path in sorted((folder / "weights").glob("*.safetensors"))],
        )
    except (OSError, ValueError, KeyError) as error:
        raise ExperimentError(f"the run in {folder} cannot be read: {error}.") from None


def as_vector(path: Path) -> np.ndarray:
    """Return a safetensors file's values as one vector, sorted by name."""
    state = load_file(path)
    return np.concatenate([state[name].ravel().astype(np.float64) for name in sorted(state)])


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the L2 norm of the difference."""
    return float(np.linalg.norm(one - other))


def read_rewards(folder: Path) -> dict[str, float]:
    """Return question -> mean reward of its answers in the last validation."""
    files = sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem))
    by_question = defaultdict(list)
    for line in read_lines(files[-1]) if files else []:
        by_question[line["input"]].append(line["score"])
    return {question: float(np.mean(scores)) for question, scores in by_question.items()}


# ---- the table and the plot


def make(runs: list[summaries.Run], folder: Path) -> list[summaries.Table]:
    """Return the table of these runs; draw their plot into the folder.

    Raises:
        ExperimentError: if a successful run cannot be read.
    """
    found = [(read(place, cell["folder"]), cell) for place, cell in runs]
    by_seed = {cell["seed"]: reading for reading, cell in found if cell["arm"] == TWIN}
    twins = {reading.name: by_seed[cell["seed"]] for reading, cell in found if cell["seed"] in by_seed}
    every = [reading for reading, _ in found]
    draw(every, twins, folder / "summary.png")
    return [summaries.table_of([table_row(reading, twins.get(reading.name)) for reading in every])]


def table_row(reading: Reading, twin: Reading | None) -> dict[str, str]:
    """Return one run's cells by column."""
    warning, spike = reading.planted
    before = [norm for step, norm in reading.norms.items() if step < warning]
    event, last = reading.events.get(spike), len(reading.weights) - 1
    against = away = at_the_spike = lately = "-"
    if twin is not None:
        gains = [mean - twin.rewards[question] for question, mean in reading.rewards.items()]
        against = "{:+.2f} ± {:.2f}".format(*mean_and_error(gains))
        away = f"{distance(reading.weights[-1], twin.weights[-1]) / twin.moved(0, -1):.0%}"
        spans = (spike - 1, min(spike + 1, last)), (-1 - LAST_STEPS, -1)
        at_the_spike, lately = (f"{reading.moved(*span) / twin.moved(*span):.0%}" for span in spans)
    return {
        "arm": reading.name,
        "final reward": "{:.2f} ± {:.2f}".format(*mean_and_error(list(reading.rewards.values()))),
        "against twin": against,
        "norm before": number(float(np.median(before))),
        "warning": number(reading.norms[warning]),
        "spike": number(reading.norms[spike]),
        "done at the spike": safeguards_at(reading, spike),
        "named": culprit_at(reading, spike),
        "norm without it": "-" if event is None else number(event["certificate"]["norm_after"]),
        "from twin": away,
        "moved at the spike": at_the_spike,
        f"moved in the last {LAST_STEPS}": lately,
    }


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean of independent values and its standard error, which is NaN for one value."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(np.mean(values)), error


def safeguards_at(reading: Reading, step: int) -> str:
    """Describe what the run's safeguards did at a step, from its metrics."""
    metrics = reading.steps[step]
    norm, limit = metrics["actor/grad_norm_max"], reading.knobs["max_grad_norm"]
    scale = metrics.get("gradloc/layer_clip/scale_min", 1.0)
    known = {
        "step without the culprit": metrics.get("gradloc/mask"),
        "step under another setting": metrics.get("gradloc/heal"),
        "step skipped": metrics.get("gradloc/skip") or metrics.get("gradloc/skip_step/skipped"),
        f"layers scaled by down to {number(scale)}": scale < 1,
        "token left out": metrics.get("gradloc/token_clip/share", 0.0) > 0,
        "ratios clipped": metrics.get("actor/pg_clipfrac", 0.0) > 0,
    }
    done = [what for what, is_done in known.items() if is_done]
    if not done and norm > limit:
        done.append(f"scaled by {number(limit / norm)}")
    return ", ".join(done) or "nothing"


def culprit_at(reading: Reading, step: int) -> str:
    """Describe a step's first culprit; "as planted" if the event names exactly the stale tokens."""
    event, planted = reading.events.get(step), reading.planted[step]
    if event is None or not event["culprits"]:
        return "no event" if event is None else "no culprit"
    first, *_ = culprits = event["culprits"]
    ratio = math.exp(first["values"]["log_prob"] - first["values"]["old_log_prob_used"])
    places = sorted((each["sequence_id"], position) for each in culprits for position in each["positions"])
    sequence = f"{planted['uid']}:{planted['rollout_index']}"
    is_as_planted = places == [(sequence, position) for position in planted["positions"]]
    return f"{first['cause']['label']}, ratio {number(ratio)}{', as planted' if is_as_planted else ''}"


def number(value: float | None) -> str:
    """Format with three digits; from 1000 on as a whole number with spaces."""
    if value is None:
        return "-"
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 1000 else f"{value:.3g}"


def draw(runs: list[Reading], twins: dict[str, Reading], path: Path) -> None:
    """Plot gradient norm (log), training reward and distance from the healthy twin over the steps.

    Args:
        runs: one line each.
        twins: run name -> its healthy twin.
        path: the PNG file.
    """
    with figure(path, 13, 3) as (made, plots):
        norms, rewards, distances = plots
        for index, reading in enumerate(runs):
            twin, steps = twins.get(reading.name), sorted(reading.steps)
            style = {"color": f"C{index % 10}", "label": reading.name, "linewidth": 1.3}
            if reading is twin:
                style.update(color="black", linewidth=2.2, zorder=9)
            norms.plot(steps, [reading.norms[step] for step in steps], **style)
            rewards.plot(steps, [reading.steps[step]["critic/score/mean"] for step in steps], **style)
            if twin is not None:
                pairs = zip(reading.weights, twin.weights, strict=False)
                distances.plot([distance(one, other) for one, other in pairs], **style)
        norms.set(yscale="log", title="largest gradient norm, before clipping", xlabel="step")
        rewards.set(title="mean reward of the step's rollouts", xlabel="step")
        distances.set(title="weights' distance from the healthy twin's", xlabel="steps taken")
        for axes in plots:
            axes.xaxis.get_major_locator().set_params(integer=True)
        made.legend(*norms.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
