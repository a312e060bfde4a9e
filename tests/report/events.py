# SPDX-License-Identifier: Apache-2.0
"""The golden events of tests/data/golden/events.json: what is special about each, and the facts that are said of it.

Every cause, verdict, action, trainer and number of culprits, shares of every worth; each rule of what to do now, under
the rule's name; and what the search itself finds on a bare model where no token made the spike.
"""

import functools
import json
import math
from typing import Any

import torch

from gradloc.explain.causes import RULES
from gradloc.record import Certificate, Rerun, StepCause
from gradloc.record.store import plain
from tests.report.builder import REPO, make_culprit, make_event
from tests.search.test_step_causes import PLANT, THRESHOLD, Spiking
from tests.toy_model import build, random_batch
from tests.toy_model.routers import add_router_loss

GOLDEN = REPO / "tests" / "data" / "golden"
CASES = json.loads((GOLDEN / "events.json").read_text(encoding="utf-8"))
"""For each event its parts as they differ from the usual ones, and what is said of it."""
OF_RULES = [rule.seen for rule in RULES if rule.seen in CASES]
CHECKPOINT = "checkpoints/math/run 7/global_step_400"
NUMBERS = {
    "advantage_over_typical": 14577.6,
    "ratio_over_typical": 62.6,
    "jacobian_over_typical": 9.1,
    "kl_over_typical": 44.0,
    "is_weight_over_typical": 5.0,
    "error_over_typical": 5e4,
}
"""Of a cause that is given by its label alone."""


def parts(name: str) -> dict[str, Any]:
    """What a golden event has that others have not, as the parts of a record."""
    given = CASES[name]["event"]
    if "culprits" not in given:
        return given
    return given | {"culprits": [_culprit(**changes) for changes in given["culprits"]]}


def _culprit(**changes: Any) -> dict:
    label = changes.get("cause")
    return make_culprit(**changes | ({"cause": {"label": label, "numbers": NUMBERS}} if isinstance(label, str) else {}))


def event(name: str, step: int = 40, **changes: Any) -> dict:
    """A golden event's record, of a run of verl 0.9.1 where it says no other, with parts of it changed."""
    if name.startswith("searched: "):
        step, made = 412, searched()[name.removeprefix("searched: ")]
    else:
        made = parts(name)
    record = make_event(step, **made | {"run": {"trainer": "verl 0.9.1"} | made.get("run", {})} | changes)
    place = [*CASES].index(name)
    return record | {"event_id": f"kind{place:03d}", "folder": f"events/kind{place:03d}"}


@functools.cache
def searched() -> dict[str, dict]:
    """What the search itself finds of spikes that no token made, on a bare model; parts of an event."""
    weights, padded, scaled, transient = Spiking(), random_batch(build("tiny")).mask, Spiking(factor=1e4), Spiking()
    with torch.no_grad():
        weights.model.blocks[1].mlp.up.weight[5, 7] = math.nan
        weights.model.head.weight[0, 0] = math.inf
    padding = Spiking({tuple(place): math.nan for place in (~padded).nonzero()[3:6].tolist()})
    routers = [Spiking(), Spiking(PLANT)]
    for spiking in routers:
        add_router_loss(spiking.model, 3e4)

    def corrupt(space):
        space.params[3].grad.view(-1)[11] = 1e5

    found = {
        "weights": _found(weights.search(), "NaN"),
        "padding": _found(padding.search(), "NaN"),
        "scale": _found(scaled.search(scaled.coefficient()), 8_312.0, advantage_over_run=1e4),
        "loss_scale": _found(scaled.search(scaled.coefficient()), 8_312.0, advantage_over_run=1.1),
        "transient": _found(transient.search(corrupt=corrupt, reruns=True), 1e5),
        **{name: _found(of.search()) for name, of in zip(("router", "router_and_token"), routers, strict=True)},
    }
    found["weights"]["consequence"]["last_checkpoint"] = CHECKPOINT
    found["padding"]["cause"]["names"] = ["advantages"]  # the driver looks into the batch's tensors
    del found["router_and_token"]["culprits"]
    return found


def _found(finding, norm: float | str | None = None, **numbers: float) -> dict:
    """A finding as the driver would have written it."""
    norm = finding.certificate.norm_before if norm is None else norm
    is_finite = not isinstance(norm, str)
    cause = plain(StepCause(**vars(finding.source)))
    return {
        "culprits": [],
        "trigger": {"grad_norm": norm, "threshold": THRESHOLD, "kind": "fixed" if is_finite else "non_finite"},
        "search": {"status": finding.status, "stop_reason": finding.stop_reason, "path": [], "strategy": "auto"},
        "cause": cause | {"numbers": cause["numbers"] | numbers},
        "certificate": plain(Certificate(**vars(finding.certificate))),
        "consequence": {"grad_clip": 1.0} | ({"clip_scale": 1.0 / norm} if is_finite else {}),
        "rerun": None if finding.rerun is None else plain(Rerun(**vars(finding.rerun))),
        "shares": None,
    }
