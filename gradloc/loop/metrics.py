# SPDX-License-Identifier: Apache-2.0
"""Our metrics of an update, and how each is joined where a step of the trainer has several: said here alone."""

import math
import statistics
from collections.abc import Mapping, Sequence

from ..explain.cures import healer
from ..record import Event
from ..trigger import spike_kind
from .messages import Policy, RankReport

_TAKEN = ("mask", "heal", "skip", "abort")
_ADDED = frozenset(
    "spikes unwritten mask heal skip abort masked_tokens events culprits explained healed probes seconds".split()
)
_LARGEST = frozenset(
    "head_grad_norm norm_after failures write_failures grad_norm_max median_coefficient health/state health/reasons "
    "health/failures".split()
)
_FROM_NEAREST = frozenset("threshold norm_over_threshold clip_scale culprit_share healthy_norm".split())
"""Metrics that are taken from the update whose norm came nearest to its threshold, all from the same one."""


def is_ours(name: str) -> bool:
    """Return whether this metric is joined by these rules."""
    return _plain(name) in _ADDED | _LARGEST | _FROM_NEAREST


def joined(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Join each metric of a step's updates, in order, to one value; the last where no rule says another."""
    names = list(dict.fromkeys(name for metrics in updates for name in metrics))
    nearness = next((name for name in names if _plain(name) == "norm_over_threshold"), "")
    nearest_last = sorted(updates, key=lambda metrics: size(metrics.get(nearness, 0.0)))
    found = {}
    for name in names:
        plain = _plain(name)
        ordered = nearest_last if plain in _FROM_NEAREST else updates
        values = [metrics[name] for metrics in ordered if name in metrics]
        if plain in _ADDED:
            found[name] = sum(values)
        elif plain in _LARGEST:
            found[name] = max(values, key=size)
        else:
            found[name] = values[-1]
    return found


# Names: mind that verl takes the smallest of what has "min" in its name, and the largest of what has "max".


def metrics_of(
    policy: Policy, reports: Sequence[RankReport], first: RankReport, num_write_failures: int
) -> dict[str, float]:
    """Return our scalars of one update, under the actor's names; ``grad_norm_max`` is the model's own.

    ``reports`` has one of each process, ``first`` is the first one's; the write failures are the whole run's.
    """
    squares = [math.fsum(parts) for parts in zip(*(report.head_squares for report in reports), strict=True)]
    heads = [math.sqrt(square) for square in squares if not square < 0]  # negative: not known
    counts = {f"gradloc/{taken}": sum(spike.taken == taken for spike in first.outcomes) for taken in _TAKEN}
    return {
        "grad_norm_max": max(first.norms, key=size),
        "gradloc/failures": max(report.num_failures for report in reports),
        "gradloc/write_failures": num_write_failures,
        "gradloc/median_coefficient": statistics.median(report.coefficient for report in reports),
        **({"gradloc/head_grad_norm": max(heads, key=size)} if heads else {}),
        "gradloc/unwritten": sum(not spike.is_written for spike in first.outcomes),
        **counts,
        **_trigger_metrics(policy, first.norms),
        **_event_metrics([raw.event for raw in first.events]),
    }


def _trigger_metrics(policy: Policy, norms: Sequence[float]) -> dict[str, float]:
    """Spikes, and of the optimizer step that came nearest to its threshold: the threshold and the ratio to it."""
    pairs = [(norm, policy.threshold(number)) for number, norm in enumerate(norms)]
    metrics: dict[str, float] = {"gradloc/spikes": sum(spike_kind(*pair, policy.kind) is not None for pair in pairs)}
    judged = [(norm, threshold) for norm, threshold in pairs if threshold]
    if judged:
        norm, threshold = max(judged, key=lambda pair: size(pair[0]) / pair[1])
        metrics |= {"gradloc/threshold": threshold, "gradloc/norm_over_threshold": norm / threshold}
    return metrics


def _event_metrics(events: Sequence[Event]) -> dict[str, float]:
    metrics: dict[str, float] = {
        "gradloc/events": len(events),
        "gradloc/culprits": sum(len(event.culprits) for event in events),
        "gradloc/healed": sum(healer(event) is not None for event in events),
        "gradloc/explained": sum(event.certificate.verdict == "explained" for event in events),
        "gradloc/probes": sum(event.search.backwards or 0 for event in events),
        "gradloc/seconds": sum(event.search.seconds or 0.0 for event in events),
    }
    after = [event.certificate.norm_after for event in events if event.certificate.norm_after is not None]
    if after:
        metrics["gradloc/norm_after"] = max(after)
    clipped = [event.consequence for event in events if event.consequence and event.consequence.clip_scale is not None]
    if clipped:
        hardest = min(clipped, key=lambda step: step.clip_scale or 0.0)
        values = {name: getattr(hardest, name) for name in ("clip_scale", "culprit_share", "healthy_norm")}
        metrics |= {f"gradloc/{name}": value for name, value in values.items() if value is not None}
    masked = [event for event in events if event.action.taken == "mask"]
    if masked:
        metrics["gradloc/masked_tokens"] = sum(len(culprit.positions) for event in masked for culprit in event.culprits)
    return metrics


def size(value: float) -> float:
    """Return the key to compare a metric by: NaN is larger than any number."""
    return math.inf if value != value else value


def _plain(name: str) -> str:
    """Strip the model from a metric's name: ``gradloc/critic_spikes`` and ``gradloc/spikes`` are joined alike."""
    room, _, rest = name.partition("/")
    return rest.removeprefix("critic_") if room in ("gradloc", "actor", "critic") else name
