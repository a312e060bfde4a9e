# SPDX-License-Identifier: Apache-2.0
"""One analysis on one rank, as a trainer's worker is asked for it."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..core.gradients import GradientSpace
from ..core.ranks import PeerFailure, Ranks
from ..core.step import RngState
from .actor import NUM_BUCKETS_KEY, NUM_SAMPLED_KEY, Actor, Rows
from .buckets import BucketProbe
from .quartile_probe import QuartileProbe

logger = logging.getLogger(__name__)


def measure(actor: Actor, ranks: Ranks, rows: Rows, request: Mapping[str, Any]) -> dict[str, Any]:
    """Split the gradient of a batch; the actor is left as it was, bit for bit.

    Args:
        actor: whose gradient it is.
        ranks: the data-parallel ranks.
        rows: this rank's, as many as every other rank has.
        request: ``NUM_BUCKETS_KEY`` to split it by term and bucket, or ``NUM_SAMPLED_KEY`` by probability quartile.

    Returns:
        What the probe's ``measure`` returns; ``{"error": sentence}`` if a rank failed between collectives.

    Raises:
        Exception: whatever a forward or backward raised. Peers wait in its collective, so the run cannot go on.
    """
    space = GradientSpace(actor.module)
    kind, key = (QuartileProbe, NUM_SAMPLED_KEY) if NUM_SAMPLED_KEY in request else (BucketProbe, NUM_BUCKETS_KEY)
    start = time.perf_counter()
    try:
        with undisturbed(actor, space):
            numbers = kind(actor, ranks, space, rows).measure(request[key])
    except PeerFailure as error:
        logger.exception("gradloc: the gradient analysis failed; training goes on")
        return {"error": str(error)}
    except Exception:
        logger.exception("gradloc: the gradient analysis failed inside the model; other ranks wait for this one")
        raise
    return {**numbers, "seconds": time.perf_counter() - start}


@contextmanager
def undisturbed(actor: Actor, space: GradientSpace) -> Iterator[None]:
    """Put back what an analysis touches: gradients, random state, train or eval mode."""
    rng, gradient = RngState(actor.device), space.take()
    was_training = actor.module.training
    actor.module.train()
    try:
        yield
    finally:
        space.put(gradient)
        rng.restore()
        actor.module.train(was_training)
