# SPDX-License-Identifier: Apache-2.0
"""Random mixtures of culprits against every token's own backward: who is named, and who is not."""

import random
from typing import Any

import torch

from gradloc.core.gradients import GradientSpace
from gradloc.core.ranks import Ranks
from gradloc.search.find import localize
from gradloc.trigger import Spike
from tests.toy_model import Oracle, Place, ToyStep, build, random_batch, shard

NUM_MICRO_BATCHES, MOST = 4, 8
SIZES = (2.0, 1e5)  # a culprit's own gradient norm, in healthy norms
SPIKE = 4.0  # the threshold, in healthy norms
KINDS = ("token", "token", "span", "row", "ranks")


def mixture(seed: int, layout: str = "plain", num_rows: int = 16, dtype: str = "float32") -> dict[str, Any]:
    """Plant 0 to 12 culprits, localize, and count; on several ranks all of them call this together.

    A culprit is a token, a span of up to four, a row, or one token on every rank; the advantages of its tokens are
    scaled until its gradient has the size drawn.

    Args:
        seed: of everything.
        layout: of the weights.
        num_rows: over all ranks.
        dtype: of the computation, which ``plain`` has in float32 alone.

    Returns:
        ``culprits`` and ``tokens`` planted; ``norm``, of the step in healthy norms; ``over``: tokens whose own norm is
        over the threshold; ``named``: tokens; ``missed``: of those over it, where not the largest number of culprits
        ended the search; ``weak``: named tokens under a tenth of it, as part of a planted span or row; ``innocent``:
        named tokens under a tenth of it that nobody planted, or that are named each by itself.
    """
    draw, model, ranks = random.Random(seed), build("tiny"), Ranks()
    healthy = random_batch(model, rows=num_rows, seed=seed)
    oracle = Oracle(model, healthy)
    normal = float(oracle.gradient().norm())
    places: list[Place] = [tuple(place) for place in healthy.mask.nonzero().tolist()]
    planted: dict[Place, float] = {}
    culprits = draw.randint(0, 12)
    for _ in range(culprits):
        size = normal * SIZES[0] * (SIZES[1] / SIZES[0]) ** draw.random() * draw.choice((-1, 1))
        group = _group(draw.choice(KINDS), draw.choice(places), places, num_rows // ranks.size)
        factor = size / float(oracle.gradient(group).norm())
        planted |= {place: factor * float(healthy.advantages[place]) for place in group}
    batch = healthy.planted(planted)
    threshold = SPIKE * normal
    norms = Oracle(model, batch).norms(places)
    over = {place for place, norm in norms.items() if norm > threshold}
    precision = getattr(torch, dtype)
    step = ToyStep(shard(build("tiny"), layout, precision), batch, NUM_MICRO_BATCHES, precision)
    space = GradientSpace(step.model)
    step.train()
    norm = space.norm()
    told = {"seed": seed, "culprits": culprits, "tokens": len(planted), "norm": norm / normal, "over": len(over)}
    told |= {"named": 0, "missed": 0, "weak": 0, "innocent": 0, "status": "no spike", "verdict": ""}
    if not norm > threshold:
        return told
    spike = Spike("fixed", norm, threshold, threshold * batch.num_tokens**0.5, batch.num_tokens)
    found = localize(step, space, ranks, spike, 1.0, max_culprits=MOST)
    named = {
        batch.place(token, ranks.size, NUM_MICRO_BATCHES): culprit.span
        for culprit in found.culprits
        for token in culprit.tokens
    }
    weak = [place for place in named if norms[place] < threshold / 10]
    innocent = [place for place in weak if place not in planted or named[place] == "token"]
    return told | {
        "named": len(named),
        "missed": len(over - set(named)) if found.status != "max_culprits" else 0,
        "weak": len(weak) - len(innocent),
        "innocent": len(innocent),
        "status": found.status,
        "verdict": found.certificate.verdict,
    }


def _group(kind: str, place: Place, places: list[Place], rows_per_rank: int) -> list[Place]:
    """The places of a culprit of that kind at or around this one."""
    row, position = place
    if kind == "ranks":
        return [other for other in places if other[1] == position and (other[0] - row) % rows_per_rank == 0]
    length = {"token": 1, "span": 4, "row": 10**6}[kind]
    first = 0 if kind == "row" else position
    return [other for other in places if other[0] == row and first <= other[1] < first + length]


def problems(told: dict[str, Any]) -> list[str]:
    """Return what is wrong with a mixture's answer; nothing where it is right."""
    found = [f"{told[name]} {name}" for name in ("missed", "innocent") if told[name]]
    if told["over"] and told["status"] == "found" and told["verdict"] != "explained":
        found.append(f"the verdict is {told['verdict']}")
    return found
