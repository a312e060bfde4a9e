# SPDX-License-Identifier: Apache-2.0
"""Train, search and set back one planted step, on a rank of a world."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gradloc.core.gradients import GradientSpace
from gradloc.core.ranks import Ranks
from gradloc.core.sharding import local_shard
from gradloc.core.step import Outputs
from gradloc.core.tracker import NormTracker
from gradloc.search.find import localize
from gradloc.trigger import Spike
from tests.toy_model import Loss, Oracle, Place, ToyStep, build, clip_gradient, random_batch, shard
from tests.toy_model.model import Block, _attend
from tests.toy_model.noise import unrepeatable

TERMS = Loss(entropy=0.01, kl=0.05)
NUM_MICRO_BATCHES = 4


def search_planted(
    layout: str,
    plants: dict[Place, float],
    dtype: str = "float32",
    masters: str = "float32",
    aggregation: str = TERMS.aggregation,
    threshold: float = 20.0,
    strategy: str = "auto",
    scattered: float = 0.0,
    said: float | None = None,
    refuses: bool = False,
) -> dict[str, Any]:
    """Train once on a batch with planted advantages and localize; what was found, as plain values.

    Args:
        layout: of the weights.
        plants: advantage by place.
        dtype: of the computation.
        masters: of the weights and their gradient.
        aggregation: of the loss.
        threshold: healthy norms are near 1.
        strategy: of the search.
        scattered: how far every forward of the search is off, see :func:`scatter`.
        said: the norm by the trainer, such as one that float32 cannot hold; None for the true one.
        refuses: whether attention takes no float32, as flash kernels do not.
    """
    model, precision = build("tiny").to(getattr(torch, masters)), getattr(torch, dtype)
    batch = random_batch(model).planted(plants)
    loss = replace(TERMS, aggregation=aggregation)
    step = ToyStep(shard(model, layout, precision), batch, NUM_MICRO_BATCHES, precision, loss)
    space, ranks = GradientSpace(step.model), Ranks()
    step.train()
    before = [local_shard(grad).clone() for grad in space.current()]
    norm = said or space.norm()
    kind = "fixed" if math.isfinite(norm) else "non_finite"
    spike = Spike(kind, norm, threshold, threshold * batch.num_tokens**0.5, batch.num_tokens)
    if scattered:
        scatter(step, scattered, ranks.rank)
    attend = staticmethod(_attend_in_half if refuses else _attend)
    with mock.patch.object(Block, "attend", attend):
        finding = localize(step, space, ranks, spike, 1.0, strategy=strategy)
    restored = all(torch.equal(a, local_shard(b)) for a, b in zip(before, space.current(), strict=True))
    certificate, shares = finding.certificate, finding.shares
    return {
        "norm": norm,
        "clipped_from": float(clip_gradient(step.model, 1.0)),
        "norm_clipped": space.norm(),
        "places": sorted(batch.place(token, ranks.size, NUM_MICRO_BATCHES) for token in finding.tokens),
        "norms": [culprit.norm for culprit in finding.culprits],
        "verdict": certificate.verdict,
        "norm_after": certificate.norm_after,
        "error_bound": certificate.error_bound,
        "closure": None if shares is None else shares.closure,
        "restored": restored,
        "status": finding.status,
        "cost": finding.num_forwards + 2 * finding.num_backwards,
    }


def _attend_in_half(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if q.dtype == torch.float32:
        raise RuntimeError("this kernel takes fp16 and bf16 alone")
    return _attend(q, k, v)


def useless_shares(layout: str, strategy: str, dtype: str) -> dict[str, Any]:
    """Localize where every forward at moved weights scatters by ten times what the move does.

    Args:
        layout: of the weights.
        strategy: of the search.
        dtype: of the computation.
    """
    planted = {(3, 2): 300.0, (9, 1): -250.0, (14, 0): 280.0}
    found = search_planted(layout, planted, dtype, threshold=4.0, strategy=strategy, scattered=4.0)
    return found | {"planted": sorted(planted)}


def scatter(step: ToyStep, size: float, seed: int) -> None:
    """From here on every forward's log-probs are too low by up to ``size``, each by its own part of it."""
    forward, noise = step.forward, torch.Generator().manual_seed(seed)

    def scattered(micro_batch: int, needs_entropy: bool = False) -> Outputs:
        log_prob, *others = forward(micro_batch, needs_entropy)
        if not torch.is_grad_enabled():
            log_prob = log_prob - size * torch.rand(log_prob.shape, generator=noise).to(log_prob.device)
        return Outputs(log_prob, *others)

    step.forward = scattered


def history_of_ranks(windows: Sequence[int], periods: Sequence[int]) -> tuple[list[list[float]], list[list[float]]]:
    """Return what the ranks' trackers share of five steps, and the squared norms of all five.

    Args:
        windows: how many steps each rank keeps.
        periods: each rank reads one step in this many.
    """
    step = ToyStep(shard(build("tiny"), "fsdp2"), random_batch(build("tiny")), NUM_MICRO_BATCHES)
    space, ranks, exact = GradientSpace(step.model), Ranks(), []
    tracker = NormTracker(windows[dist.get_rank()])
    tracker._period = periods[dist.get_rank()]
    for number in range(5):
        space.clear()
        tracker.begin_mini_batch()
        step.train()
        space.scale(1.0 + number)
        exact.append(space.squares().tolist())
        tracker.after_mini_batch(space, 1.0, 1.0, is_spike=False)
    return tracker.read(space, ranks).history.tolist(), exact


def params_after_a_forward(layout: str) -> bool:
    """Whether a space has the optimizer's parameters although a forward without a backward has gathered weights."""
    model = shard(build("tiny"), layout)
    params = GradientSpace(model).params
    with torch.no_grad():
        model(random_batch(build("tiny")).tokens, 1)
    return [id(param) for param in GradientSpace(model).params] == [id(param) for param in params]


def certify_unrepeatable(
    layout: str, dtype: str, share: float, size: float, seed: int = 0, others: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Localize a planted spike with kernels that do not repeat, and hold the certificate against ones that do.

    Args:
        layout: of the weights.
        dtype: of the computation.
        share: of the elements that are a unit off, fresh in every backward.
        size: of the spike, in multiples of the healthy norm.
        seed: of batch and noise.
        others: rows with a token like the planted one.
    """
    model, precision = build("tiny"), getattr(torch, dtype)
    healthy = random_batch(model, seed=seed)
    places = sorted((row, 1) for row in (3 + seed % 4, *others))
    batch = healthy.planted({place: _advantage_for(model, healthy, place, size) for place in places})
    step = ToyStep(shard(model, layout, precision), batch, NUM_MICRO_BATCHES, precision)
    space, ranks = GradientSpace(step.model), Ranks()
    step.train()
    truth = step.norm_of(space, places, without=True)  # on kernels that repeat
    with unrepeatable(step.model, share, seed=100 * seed + ranks.rank):
        step.train()
        norm = space.norm()
        threshold = 5.0 * truth
        spike = Spike("fixed", norm, threshold, threshold * batch.num_tokens**0.5, batch.num_tokens)
        finding = localize(step, space, ranks, spike, 1.0)
    certificate = finding.certificate
    return {
        "size": norm / truth,
        "places": sorted(batch.place(token, ranks.size, NUM_MICRO_BATCHES) for token in finding.tokens),
        "planted": places,
        "truth": truth,
        "norm_after": certificate.norm_after,
        "error_bound": certificate.error_bound,
        "replay_difference": certificate.replay_difference,
        "method": certificate.method,
        "verdict": certificate.verdict,
        "threshold": threshold,
        "cost": finding.num_forwards + 2 * finding.num_backwards,
    }


def _advantage_for(model: torch.nn.Module, batch: Any, place: Place, size: float) -> float:
    """The advantage with which this token's gradient alone is ``size`` times the whole healthy one."""
    oracle = Oracle(model, batch)
    own = oracle.norm(place)
    return float(batch.advantages[place]) * size * float(oracle.gradient().norm()) / own
