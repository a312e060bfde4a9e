# SPDX-License-Identifier: Apache-2.0
"""What a rank of a world does: one planted step, trained, searched and set back."""

from typing import Any

import torch

from gradloc.core.gradients import GradientSpace, local_shard
from gradloc.core.ranks import Ranks
from gradloc.core.trigger import Spike
from gradloc.search.find import localize
from tests.bare import BareStep, Loss, Place, build, clip_gradient, random_batch, shard

TERMS = Loss(entropy=0.01, kl=0.05)
NUM_MICRO_BATCHES = 4
_THRESHOLD = 20.0  # healthy norms are near 1


def search_planted(layout: str, plants: dict[Place, float], dtype: str = "float32") -> dict[str, Any]:
    """Train once on a batch with planted advantages and localize; what was found, as plain values."""
    model = build("tiny")
    batch = random_batch(model).planted(plants)
    step = BareStep(shard(model, layout, getattr(torch, dtype)), batch, NUM_MICRO_BATCHES, getattr(torch, dtype), TERMS)
    space, ranks = GradientSpace(step.model), Ranks()
    step.train()
    before = [local_shard(grad).clone() for grad in space.current()]
    norm = space.norm()
    spike = Spike("fixed", norm, _THRESHOLD, _THRESHOLD * batch.num_tokens**0.5, batch.num_tokens)
    finding = localize(step, space, ranks, spike, 1.0)
    restored = all(torch.equal(a, local_shard(b)) for a, b in zip(before, space.current(), strict=True))
    certificate = finding.certificate
    return {
        "norm": norm,
        "clipped_from": float(clip_gradient(step.model, 1.0)),
        "norm_clipped": space.norm(),
        "places": sorted(batch.place(token, ranks.size, NUM_MICRO_BATCHES) for token in finding.result.tokens),
        "norms": [culprit.norm for culprit in finding.result.culprits],
        "verdict": certificate.verdict,
        "norm_after": certificate.norm_after,
        "error_bound": certificate.error_bound,
        "restored": restored,
    }
