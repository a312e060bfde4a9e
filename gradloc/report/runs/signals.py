# SPDX-License-Identifier: Apache-2.0
"""The metrics by which a run is judged apart from its norms, and what a finding about them says."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from ...explain.numbers import number
from ...explain.text import plural
from ...health.rules import ENTROPY, LENGTH, REFERENCE_KL, SCORES
from ..logs.names import ADVERSARIAL
from ..logs.recording import Metrics
from ..logs.segments import LoggedRun
from .health import LOSSES


class Effect(NamedTuple):
    """A metric by which an explosion's effects show; its bounds are multiples of the earlier value."""

    title: str
    names: tuple[str, ...]
    """Names of the metric, by preference."""
    fall: float | None
    rise: float | None
    collapse: tuple[float | None, float | None] = (None, None)
    """The fall and the rise that are a collapse in a run without odd norms."""


REWARD = Effect("reward", SCORES, 0.7, None, collapse=(0.5, None))
LOSS = Effect("loss", LOSSES, None, 1.3, collapse=(None, 1.3))
EFFECTS = (
    REWARD,
    Effect("entropy", ENTROPY, 0.5, 2.0, collapse=(0.25, 4.0)),
    Effect("KL to the reference", REFERENCE_KL, None, 5.0, collapse=(None, 20.0)),
    Effect("mismatch KL", ("rollout_corr/kl",), None, 5.0),
    Effect("response length", (LENGTH,), 0.5, 1.5),
    LOSS,
)


@dataclass(frozen=True)
class Sign:
    """Says what was found in a run's metrics."""

    kind: str
    """One of :data:`~.spikes.KINDS`."""
    sentence: str
    """What it is, with the rows or steps that it was judged from."""
    advice: str = ""
    first: int | None = None
    """The first step that shows it."""
    before: int | None = None
    """Where to go back: to a checkpoint from before this step; None where that does not help."""
    is_back: bool = False
    """Whether what was not finite is finite again at the end."""


def is_supervised(metrics: Metrics) -> bool:
    """Return whether a run logs nothing about rollouts, rewards or a policy."""
    known = (*SCORES, *REFERENCE_KL, LENGTH, "actor/ppo_kl", "actor/pg_clipfrac")
    has_words = any(re.search(r"policy|actor/|reward|rollout", name.lower()) for name in metrics.own_names)
    return bool(metrics) and not has_words and not any(metrics.logged(name) for name in known)


def trainer_class(metrics: Metrics) -> str:
    """Return the name of TRL's trainer that logs such metrics."""
    if any("rewards/margins" in name or "rewards/chosen" in name for name in metrics.series):
        return "DPOTrainer"
    return "SFTTrainer" if is_supervised(metrics) else "GRPOTrainer"


def loss_of(metrics: Metrics) -> tuple[str, list[tuple[int, float]]]:
    """Return the loss's own name and values; empty where there is none, or where the run has a reward.

    A reward that few rows have is an evaluation's.
    """
    name = metrics.first(LOSSES)
    logged, num_rewards = metrics.logged(name), max(len(metrics.finite(score)) for score in SCORES)
    return ("", []) if num_rewards and 4 * num_rewards >= len(logged) else (metrics.own(name), logged)


def is_loss_judged(metrics: Metrics) -> bool:
    """Return whether the size of a run's loss shows its health."""
    return bool(loss_of(metrics)[1]) and not is_adversarial(metrics)


def is_adversarial(metrics: Metrics) -> bool:
    """Return whether a run's loss is that of a GAN's generator or discriminator."""
    return ADVERSARIAL.search(loss_of(metrics)[0]) is not None


def sound_loss(metrics: Metrics, first: int) -> str:
    """Say that the loss is finite from a step on, with its range; empty where it is not finite or not logged."""
    name = metrics.first(LOSSES)
    values = [value for step, value in metrics.logged(name) if step >= first]
    if not values or not all(map(math.isfinite, values)):
        return ""
    if len(values) > 2 and is_supervised(metrics) and min(values[1:]) > 3 * values[0] > 0:
        return ""  # it is finite, and the weights are no longer what they were
    sizes = [abs(value) for value in values]
    is_sure = name == "actor/pg_loss" or min(sizes) > 0 and max(sizes) <= 100 * min(sizes)
    if len(values) > 1 and not is_sure:  # a Trainer writes 0 for a NaN
        return ""
    steps = [step for step, _ in metrics.logged(name)]
    if steps[-1] == first and len(steps) > 1:  # what this step did shows in the next one
        return ""
    span = " to ".join(number(value, 3) for value in dict.fromkeys((min(values), max(values))))
    return f"{metrics.own(name)} is finite in {plural(len(values), 'row')} from step {first} on ({span})"


def begins(run: LoggedRun) -> str:
    """Return whether a log begins at the run's ``start`` or ``late``; empty where that is not known."""
    metrics = run.segments[0].metrics
    apart = interval(metrics)
    if len(metrics.steps) == 1 and metrics.finite("epoch")[:1] in ([0.0], [1.0]):
        return ""
    if run.unit != "row":
        return "late" if metrics.steps[0] > 2 * apart else "start"
    epochs = metrics.finite("epoch")
    if len(epochs) < 2:
        return ""
    each = (epochs[-1] - epochs[0]) / (len(epochs) - 1)
    return "late" if epochs[0] > 3 * each + 0.02 else "start"


def interval(metrics: Metrics) -> int:
    """Return the median distance between logged steps."""
    steps = metrics.steps[-1000:]
    return int(median_low(b - a for a, b in zip(steps, steps[1:], strict=False))) if len(steps) > 2 else 1


def onset(logged: Sequence[tuple[int, float]], first: int) -> int:
    """Return the first of the steps just before ``first`` at which a loss is well above all that it was earlier."""
    rows = [row for row in logged if row[0] < first][-_USUAL - _BEFORE :]
    usual = max((loss for _, loss in rows[:-_BEFORE]), default=math.inf)
    rows = rows[-_BEFORE:]
    while rows and rows[-1][1] > usual + abs(usual) / 10:
        first = rows.pop()[0]
    return first


_USUAL, _BEFORE = 40, 5
"""Values that say what a loss was, and values just before a step."""


def from_start(subject: str, begin: str) -> str:
    """Begin a sentence on what is not finite in a log's first row; ``begin`` says whether that is the run's."""
    if begin:
        return f"{subject} is not finite from the first row on, so"
    return "If the first row is the run's first step,"


EARLIER = (
    "The fault began before this log or at its first row. Look at the earlier log, and for a checkpoint from before it "
    "began."
)
"""Advice on a fault that a log has from its first row on, where that is not the run's."""
