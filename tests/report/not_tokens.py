# SPDX-License-Identifier: Apache-2.0
"""Events of spikes that no token made, one of each cause: the search's own findings on a bare model."""

import math

import torch

from gradloc.record import Certificate, Event, Rerun, StepCause
from gradloc.record.reading import read
from gradloc.record.store import plain
from gradloc.words.verdict import verdict_sentences
from tests.bare import build, random_batch
from tests.bare.routers import add_router_loss
from tests.report.builder import make_event
from tests.search.test_beside import PLANT, THRESHOLD, Spiking

CHECKPOINT = "checkpoints/math/run 7/global_step_400"


def causes() -> dict[str, dict]:
    """An event's record by what made the spike."""
    found = {
        "weights": _weights(),
        "padding": _padding(),
        "scale": _scale(over_run={"advantage": 1e4, "coefficient": 1e4, "length": 1.0}),
        "loss_scale": _scale(over_run={"advantage": 1.1, "coefficient": 1e4, "length": 1.0}),
        "transient": _transient(),
        "router": _router({}),
        "router_and_token": _router(PLANT),
        "entropy": _entropy(),
        "nothing": _nothing(),
    }
    for event in found.values():
        event["verdict"] = verdict_sentences(read(Event, event))
    return found


def _event(spiking: Spiking, norm: float | str, finding, culprits: list[dict], **changes) -> dict:
    """The finding as the driver would have written it."""
    made = make_event(412, culprits)
    given = {"grad_clip": 1.0} if isinstance(norm, str) else {"grad_clip": 1.0, "clip_scale": 1.0 / norm}
    made["trigger"].update(grad_norm=norm, threshold=THRESHOLD, kind="non_finite" if isinstance(norm, str) else "fixed")
    made["search"].update(status=finding.status, stop_reason=finding.result.stop_reason, path=[], strategy="auto")
    rerun = None if finding.rerun is None else plain(Rerun(**vars(finding.rerun)))
    return made | {
        "cause": plain(StepCause(**vars(finding.result.source))),
        "certificate": plain(Certificate(**vars(finding.certificate))),
        "consequence": given,
        "rerun": rerun,
        "shares": None,
        **changes,
    }


def _weights() -> dict:
    spiking = Spiking()
    with torch.no_grad():
        spiking.model.blocks[1].mlp.up.weight[5, 7] = math.nan
        spiking.model.head.weight[0, 0] = math.inf
    made = _event(spiking, "NaN", spiking.search(), [])
    made["consequence"]["last_checkpoint"] = CHECKPOINT
    return made


def _padding() -> dict:
    mask = random_batch(build("tiny")).mask
    spiking = Spiking({tuple(place): math.nan for place in (~mask).nonzero()[3:6].tolist()})
    made = _event(spiking, "NaN", spiking.search(), [])
    made["cause"]["names"] = ["advantages"]  # the driver looks into the batch's tensors
    return made


def _scale(over_run: dict[str, float]) -> dict:
    spiking = Spiking(factor=1e4)
    made = _event(spiking, 8_312.0, spiking.search(spiking.coefficient()), [])
    made["cause"]["numbers"] |= {f"{name}_over_run": value for name, value in over_run.items()}
    made["batch"]["over_run"] = over_run
    return made


def _transient() -> dict:
    def corrupt(space):
        space.params[3].grad.view(-1)[11] = 1e5

    spiking = Spiking()
    return _event(spiking, 1e5, spiking.search(corrupt=corrupt, reruns=True), [])


def _router(plants: dict) -> dict:
    spiking = Spiking(plants)
    add_router_loss(spiking.model, 3e4)
    found = spiking.search()
    culprits = make_event()["culprits"] if plants else []
    return _event(spiking, found.certificate.norm_before, found, culprits)


def _nothing() -> dict:
    made = make_event(412, [])
    made["search"].update(status="not_found", stop_reason="no part is over its threshold")
    norm, why = made["trigger"]["grad_norm"], "no culprit was found"
    made["certificate"].update(norm_after=norm, verdict="not_explained", reason=why)
    return made


def _entropy() -> dict:
    made = make_event(412, [])
    why = "the coefficients of the loss's entropy term are 61.3 times the policy term's"
    numbers = {"entropy_term_over_policy": 61.3}
    made["certificate"] = _nothing()["certificate"]
    made["cause"] = {"label": "entropy_term", "reason": why, "numbers": numbers, "names": [], "places": []}
    return made
