# SPDX-License-Identifier: Apache-2.0
"""Compares the runs of the explosion: a table and a plot.

    python -m experiments.explosion.summary SUITE_DIR

It writes `summary.md` and `summary.png` beside the runs' folders.
"""

import sys
from pathlib import Path

from experiments import suite
from experiments.explosion import readings
from experiments.explosion.readings import LAST_STEPS, Reading, distance, mean_and_error

TWIN = "healthy"
"""The arm that the others are compared with, seed by seed."""
HEADER = [
    "arm",
    "final reward",
    "against twin",
    "norm before",
    "warning",
    "spike",
    "done at the spike",
    "named",
    "norm without it",
    "from twin",
    "moved at the spike",
    f"moved in the last {LAST_STEPS}",
]
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


def make(runs: list[suite.Run], folder: Path) -> list[suite.Table]:
    """The table of these runs; their plot goes into the folder.

    Raises:
        ExperimentError: if a run that ended well cannot be read.
    """
    found = [(readings.read(place, cell["folder"]), cell) for place, cell in runs]
    by_seed = {cell["seed"]: reading for reading, cell in found if cell["arm"] == TWIN}
    twins = {reading.name: by_seed[cell["seed"]] for reading, cell in found if cell["seed"] in by_seed}
    every = [reading for reading, _ in found]
    draw(every, twins, folder / "summary.png")
    return [[HEADER, *(row(reading, twins.get(reading.name)) for reading in every)]]


def row(reading: Reading, twin: Reading | None) -> list[str]:
    """One run's cells, in the order of `HEADER`."""
    warning, spike = (entry["step"] for entry in reading.planted)
    event = reading.event_at(spike)
    return [
        reading.name,
        "{:.2f} ± {:.2f}".format(*mean_and_error(list(reading.rewards.values()))),
        "-" if twin is None else "{:+.2f} ± {:.2f}".format(*gain(reading, twin)),
        number(reading.typical_norm),
        number(reading.norms[warning]),
        number(reading.norms[spike]),
        done(reading, spike),
        named(reading, spike),
        "-" if event is None else number(event["certificate"]["norm_after"]),
        "-" if twin is None else f"{distance(reading.weights[-1], twin.weights[-1]) / twin.moved:.0%}",
        "-" if twin is None else f"{reading.moved_at_the_spike / twin.moved_at_the_spike:.0%}",
        "-" if twin is None else f"{reading.moved_lately / twin.moved_lately:.0%}",
    ]


def gain(reading: Reading, twin: Reading) -> tuple[float, float]:
    """How much higher the final reward is than the twin's, question by question, and the error."""
    return mean_and_error([mean - twin.rewards[key] for key, mean in reading.rewards.items()])


def done(reading: Reading, step: int) -> str:
    """What the run's safeguards did at a step, as far as its metrics say."""
    metrics = reading.steps[step]
    norm, limit = metrics["actor/grad_norm_max"], reading.knobs["max_grad_norm"]
    deeds = []
    if metrics.get("gradloc/mask"):
        deeds.append("step without the culprit")
    if metrics.get("gradloc/heal"):
        deeds.append("step under another setting")
    if metrics.get("gradloc/skip") or metrics.get("gradloc/skip_step/skipped"):
        deeds.append("step skipped")
    if metrics.get("gradloc/layer_clip/scale_min", 1.0) < 1:
        deeds.append(f"layers scaled by down to {number(metrics['gradloc/layer_clip/scale_min'])}")
    if metrics.get("gradloc/token_clip/share", 0.0) > 0:
        deeds.append("token left out")
    if metrics.get("actor/pg_clipfrac", 0.0) > 0:
        deeds.append("ratios clipped")
    if not deeds and norm > limit:
        deeds.append(f"scaled by {number(limit / norm)}")
    return ", ".join(deeds) or "nothing"


def named(reading: Reading, step: int) -> str:
    """What the localizer said about a step's first culprit."""
    event = reading.event_at(step)
    if event is None or not event["culprits"]:
        return "no event" if event is None else "no culprit"
    planted = next(entry for entry in reading.planted if entry["step"] == step)
    culprit = event["culprits"][0]
    ratio = culprit["ratios"]["current_over_old"]
    said = f"{culprit['cause']['label']}, ratio {number(ratio)}"
    return f"{said}, as planted" if is_as_planted(event, planted) else said


def is_as_planted(event: dict, planted: dict) -> bool:
    """Whether the event names exactly the stale tokens and nothing else."""
    culprits = event["culprits"]
    positions = sorted(position for culprit in culprits for position in culprit["positions"])
    sequence = f"{planted['uid']}:{planted['rollout_index']}"
    return positions == planted["positions"] and all(culprit["sequence_id"] == sequence for culprit in culprits)


def number(value: float | None) -> str:
    """Three digits, with thousands apart from 10 000 on."""
    if value is None:
        return "-"
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 1000 else f"{value:.3g}"


def draw(runs: list[Reading], twins: dict[str, Reading], path: Path) -> None:
    """Draws gradient norm (log), training reward and distance from the healthy twin over the steps.

    Args:
        runs: a line for each.
        twins: the healthy run to compare with, by the run's name.
        path: of the PNG.
    """
    with suite.figure(path, 13, 3) as (figure, plots):
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
        figure.legend(*norms.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)


def main(argv=None) -> int:
    return suite.print_summary(__doc__, LEGEND, make, argv)


if __name__ == "__main__":
    sys.exit(main())
