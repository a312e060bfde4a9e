# SPDX-License-Identifier: Apache-2.0
"""Random mixtures of culprits against every token's own backward: who is named, and who is not."""

import random

import pytest

from gradloc.core.gradients import GradientSpace
from gradloc.core.ranks import Ranks
from gradloc.core.trigger import Spike
from gradloc.search.find import localize
from tests.bare import BareStep, Oracle, build, random_batch

NUM_MICRO_BATCHES, MOST = 4, 8
SIZES = (3.0, 1e5)  # of an advantage; healthy ones are near 1


def mixture(seed: int) -> dict:
    """Plant 0 to 12 tokens and rows, localize, and count.

    Returns:
        ``over``: tokens whose own norm is over the threshold; ``missed`` of these, where no more than the largest
        number of culprits are there; ``weak``: tokens named that are under a tenth of it;
        ``innocent``: of these, which were not planted (a planted row is a sequence, its weakest token included).
    """
    draw = random.Random(seed)
    model = build("tiny")
    healthy = random_batch(model, seed=seed)
    places = [tuple(place) for place in healthy.mask.nonzero().tolist()]
    planted: dict = {}
    for _ in range(draw.randint(0, 12)):
        size = SIZES[0] * (SIZES[1] / SIZES[0]) ** draw.random() * draw.choice((-1, 1))
        row, position = draw.choice(places)
        span = draw.choice(["token", "token", "token", "run", "row"])
        for place in places:
            near = place == (row, position) or (span == "run" and 0 <= place[1] - position < 4) or span == "row"
            if place[0] == row and near:
                planted[place] = size
    batch = healthy.planted(planted)
    step = BareStep(model, batch, NUM_MICRO_BATCHES)
    space, ranks = GradientSpace(model), Ranks()
    step.train()
    threshold = 4.0 * float(Oracle(model, healthy).gradient().norm())
    norms = Oracle(model, batch).norms(places)
    over = {place for place, norm in norms.items() if norm > threshold}
    told = {"seed": seed, "planted": len(planted), "over": len(over), "named": 0, "status": "", "verdict": ""}
    if not space.norm() > threshold:
        return told | {"missed": 0, "innocent": 0}
    spike = Spike("fixed", space.norm(), threshold, threshold * batch.num_tokens**0.5, batch.num_tokens)
    found = localize(step, space, ranks, spike, 1.0, max_culprits=MOST)
    named = {batch.place(token, 1, NUM_MICRO_BATCHES) for token in found.tokens}
    weak = [place for place in named if norms[place] < threshold / 10]
    is_whole = found.status != "max_culprits"
    return told | {
        "named": len(named),
        "status": found.status,
        "verdict": found.certificate.verdict,
        "missed": len(over - named) if is_whole else 0,
        "innocent": sum(place not in planted for place in weak),
        "weak": len(weak),
    }


def check(told: dict) -> None:
    assert told["missed"] == told["innocent"] == 0, told
    if told["over"] and told["status"] == "found":
        assert told["verdict"] == "explained", told


@pytest.mark.parametrize("seed", range(3))
def test_whoever_is_over_the_threshold_is_named_and_nobody_under_a_tenth_of_it(seed):
    check(mixture(seed))


@pytest.mark.slow
def test_so_it_is_for_thirty_mixtures():
    table = [mixture(seed) for seed in range(30)]
    for told in table:
        print("  ".join(f"{name}={value}" for name, value in told.items()))
    for told in table:
        check(told)
