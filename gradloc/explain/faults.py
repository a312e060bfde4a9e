# SPDX-License-Identifier: Apache-2.0
"""Sentences about the link of a step that broke. Pure, standard library only."""

import math
from collections.abc import Mapping, Sequence

from ..record import Event
from .numbers import number

LINKS = {
    "batch": "the batch",
    "last_update": "the last update",
    "weights": "the weights",
    "after_backward": "the code between backward and step",
    "undecided": "not decided",
}
"""Names of the links in sentences."""
_MEASURED = {
    "norm_without_update": "With the last update undone this step's norm is {norm}.",
    "norm_under_usual_update": "{usual}, it would be {norm}.",
    "norm_with_those_undone": "With those parameters' update undone alone it is {norm}.",
    "norm_without_change": "With that change taken back it is {norm}.",
}
"""Norm among a fault's evidence -> its sentence."""


def fault_sentences(event: Event) -> list[str]:
    """Describe the measurements behind the fault; empty where none was looked for."""
    fault = event.fault
    if fault is None:
        return []
    known = {name: value for name, value in fault.evidence.items() if value is not None and math.isfinite(value)}
    made = []
    if {"reference_norm", "reference_usual_norm"} <= known.keys():
        at, own = number(known["reference_norm"], 3), number(known["reference_usual_norm"], 3)
        made.append(
            "As a check, a micro-batch of an earlier step was run again with this step's weights: its gradient norm "
            f"is {at}, and with the weights of its own step it was {own}."
        )
    usual = "Had that update been of its usual size"
    for name in ("learning_rate", "weight_decay"):
        if f"usual_{name}" in known:
            usual = f"With the {name.replace('_', ' ')} at {number(known[f'usual_{name}'], 3)}, as before"
    norms = {name: number(known[name], 3) for name in _MEASURED if name in known}
    made += [_MEASURED[name].format(usual=usual, norm=norm) for name, norm in norms.items()]
    if fault.at == "batch" and is_new_since_update(known):
        loudest = [number(known[name], 3) for name in ("loudest_norm", "loudest_norm_without_update") if name in known]
        more = f": its loudest micro-batch has norm {loudest[0]}, and {loudest[1]} without it" if loudest else ""
        made.append(f"It is loud only since the last update{more}.")
    if fault.at == "batch":
        made.append("So the weights are healthy, and the spike came with this batch, its data or its loss.")
    if not made and fault.reason and fault.at == "undecided":
        made.append(f"Which link broke is not decided: {fault.reason}.")
    return made


def is_new_since_update(evidence: Mapping[str, float | None]) -> bool:
    """Return whether a batch is loud only since the last update, as where ratios run away over epochs.

    Without that update its loudest micro-batch, or the step where that is not known, has a norm of at most the
    geometric mean of the step's norm and the usual one, and is quieter by the root of their ratio.
    """
    norm, usual = evidence.get("norm"), evidence.get("usual_norm")
    now = evidence.get("loudest_norm", norm)
    before = evidence.get("loudest_norm_without_update", evidence.get("norm_without_update"))
    if norm is None or usual is None or now is None or before is None:
        return False
    return before <= math.sqrt(norm * usual) and before * math.sqrt(norm / usual) <= now


def step_before(event: Event, events: Sequence[Event]) -> str:
    """Describe the event of the step whose update is at fault; empty where there is none."""
    fault = event.fault
    if fault is None or fault.at != "last_update":
        return ""
    before = next((each for each in events if each.step.global_step == fault.step and each is not event), None)
    if before is None or not before.verdict:
        return ""
    return f"Step {fault.step}, which made that update, had an event of its own: {before.verdict}."
