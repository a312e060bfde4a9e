# SPDX-License-Identifier: Apache-2.0
"""One analysis on one rank, as a trainer's worker is asked for it."""

import logging
import time
from collections.abc import Mapping
from typing import Any

from ..core.gradients import GradientSpace
from ..core.ranks import PeerFailure, Ranks
from .actor import NUM_BUCKETS_KEY, NUM_SAMPLED_KEY, Actor, Rows, undisturbed
from .buckets.probe import BucketProbe
from .quartiles.probe import QuartileProbe

logger = logging.getLogger(__name__)


def measure(actor: Actor, ranks: Ranks, rows: Rows, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Split the gradient of a batch; the actor is left as it was, bit for bit.

    Args:
        actor: whose gradient it is.
        ranks: the data-parallel ranks.
        rows: this rank's, as many as every other rank has.
        asked: ``NUM_BUCKETS_KEY`` to split it by term and bucket, or ``NUM_SAMPLED_KEY`` by probability quartile.

    Returns:
        Plain numbers, see the two probes' ``record``; ``{"error": sentence}`` when a rank failed where all could be
        told.

    Raises:
        Exception: whatever a forward or backward raised. Peers wait in its collective, so the run cannot go on.
    """
    space = GradientSpace(actor.module)
    is_by_quartile = NUM_SAMPLED_KEY in asked
    probe = (QuartileProbe if is_by_quartile else BucketProbe)(actor, ranks, space)
    start = time.perf_counter()
    try:
        with undisturbed(actor, space):
            probe.measure(rows, asked[NUM_SAMPLED_KEY if is_by_quartile else NUM_BUCKETS_KEY])
    except PeerFailure as error:
        logger.exception("gradloc: the gradient analysis failed; training goes on")
        return {"error": str(error)}
    except Exception:
        logger.exception("gradloc: the gradient analysis failed inside the model; other ranks wait for this one")
        raise
    return {**probe.record(), "seconds": time.perf_counter() - start}
