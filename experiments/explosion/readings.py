# SPDX-License-Identifier: Apache-2.0
"""What one run of the explosion left on disk, in numbers. No torch and no verl."""

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from experiments import suite
from experiments.cpu.verdict import read_events
from experiments.errors import ExperimentError

LAST_STEPS = 5
"""How many steps at the end of a run the weights' late movement is measured over."""


@dataclass(frozen=True)
class Reading:
    """One run."""

    name: str
    knobs: dict
    steps: dict[int, dict]
    """verl's metrics, by step."""
    planted: list[dict]
    """What was planted, in the order of steps; a healthy twin's have no positions."""
    events: list[dict]
    rewards: dict[str, float]
    """Mean reward of each question's answers in the final validation; empty without one."""
    weights: list[np.ndarray]
    """All parameters as one float64 vector: before each step, and after the last."""

    @property
    def norms(self) -> dict[int, float]:
        """The largest norm of each step's mini-batches, before anything was clipped."""
        return {step: metrics["actor/grad_norm_max"] for step, metrics in self.steps.items()}

    @property
    def typical_norm(self) -> float:
        """The median of the norms before anything was planted."""
        first = self.planted[0]["step"]
        return float(np.median([norm for step, norm in self.norms.items() if step < first]))

    @property
    def moved(self) -> float:
        """How far the weights are from where they began."""
        return distance(self.weights[-1], self.weights[0])

    @property
    def moved_at_the_spike(self) -> float:
        """How far the spike's step and the next one took the weights."""
        spike = self.planted[-1]["step"]
        # The first weights are those before step 1.
        return distance(self.weights[min(spike + 1, len(self.weights) - 1)], self.weights[spike - 1])

    @property
    def moved_lately(self) -> float:
        """How far the last `LAST_STEPS` steps took the weights."""
        return distance(self.weights[-1], self.weights[-1 - LAST_STEPS])

    def event_at(self, step: int) -> dict | None:
        """The event of a step, or None."""
        return next((event for event in self.events if event["step"]["global_step"] == step), None)


def read(folder: Path, name: str) -> Reading:
    """Reads a run's folder.

    Raises:
        ExperimentError: if a file of it is missing or cut off.
    """
    try:
        return Reading(
            name=name,
            knobs=json.loads((folder / "knobs.json").read_text(encoding="utf-8")),
            steps=suite.read_steps(folder, "actor/grad_norm_max"),
            planted=json_lines(folder / "planted.jsonl"),
            events=read_events(folder / "gradloc" / "events.jsonl"),
            rewards=read_rewards(folder / "validation"),
            weights=[as_vector(path) for path in sorted((folder / "weights").glob("*.safetensors"))],
        )
    except (OSError, ValueError, KeyError) as error:
        raise ExperimentError(f"the run in {folder} cannot be read: {error}.") from None


def json_lines(path: Path) -> list[dict]:
    """Every line of a file, as JSON."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def as_vector(path: Path) -> np.ndarray:
    """A safetensors file's values, one after the other by name."""
    state = load_file(path)
    return np.concatenate([state[name].ravel().astype(np.float64) for name in sorted(state)])


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The L2 norm of the difference."""
    return float(np.linalg.norm(one - other))


def read_rewards(folder: Path) -> dict[str, float]:
    """The last validation's mean reward of each question's answers."""
    files = sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem))
    by_question = defaultdict(list)
    for line in json_lines(files[-1]) if files else []:
        by_question[line["input"]].append(line["score"])
    return {question: float(np.mean(scores)) for question, scores in by_question.items()}


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean of independent values and its standard error; NaN where one value has none."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(np.mean(values)), error
