# SPDX-License-Identifier: Apache-2.0
"""What every rank does: healthy steps, and one spiked step searched by each strategy in turn."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradloc.core.gradients import GradientSpace
from gradloc.core.probe import Prober
from gradloc.core.ranks import Ranks
from gradloc.core.tracker import NormTracker, median_size
from gradloc.core.trigger import Spike
from gradloc.search.find import localize
from gradloc.search.task import SearchResult
from lab.benchmarks.localization.corpus import load
from lab.benchmarks.localization.memory import peak_memory
from lab.benchmarks.localization.plan import UNTRACKED, Cell
from lab.benchmarks.localization.published import descend
from tests.toy_model import Batch, ToyStep, shard

_GRAD_CLIP = 1.0  # verl's default: what is in .grad when the trigger fires is clipped


def healthy_steps(
    cell: Cell, weights: str, micro_batches: int, batches: list[Batch], device: str
) -> list[tuple[float, float]]:
    """Of each batch's training pass the gradient norm, and this rank's median coefficient."""
    model = _sharded(cell, weights, device)
    space = GradientSpace(model)
    steps = []
    space.clear()
    for batch in batches:
        step = ToyStep(model, batch, micro_batches, getattr(torch, cell.dtype), cell.loss)
        step.train()
        records = [step.recorded(index) for index in range(micro_batches)]
        sizes = median_size(record.coefficients(step.numerics.weight)[0] for record in records)
        steps.append((space.norm(), sizes))
        space.clear()
    return steps


def search_cell(
    cell: Cell,
    weights: str,
    batch: Batch,
    threshold: float,
    typical: dict[str, tuple[float, float]],
    limits: dict[str, int],
    device: str,
) -> dict[str, Any]:
    """Train once on the batch, then let every strategy of the cell search the same gradient.

    Args:
        cell: what is measured.
        weights: the model's file.
        batch: all ranks' rows.
        threshold: on the gradient norm, from history.
        typical: of the run, see ``gradloc.search.find.localize``; empty where the search is not told.
        limits: of the core's strategies: ``budget``, in probes, and ``max_culprits``.
        device: ``cpu`` or ``cuda``.
    """
    model = _sharded(cell, weights, device)
    step = ToyStep(model, batch, cell.micro_batches, getattr(torch, cell.dtype), cell.loss)
    space = GradientSpace(model)
    ranks = Ranks(device=step.device)
    space.clear()  # what an earlier cell left behind
    tracker = NormTracker(0)
    tracker.begin_mini_batch()
    step.train(lambda: tracker.after_backward(space))
    increments = tracker.increments(space, ranks, 1.0)
    norm = space.norm()
    clip_scale = min(1.0, _GRAD_CLIP / (norm + 1e-6))
    space.scale(clip_scale)
    spike = Spike("adaptive", norm, threshold, threshold * batch.num_tokens**0.5, batch.num_tokens)
    answer = {"grad_norm": norm, "threshold": threshold, "spikes": norm > threshold, "strategies": {}}
    before = space.current()
    for name in cell.strategies if norm > threshold else ():
        dist.barrier()
        with peak_memory(step.device) as peak:
            started = time.perf_counter()
            if name == "published":
                found = _published(step, space, ranks)
            else:
                tracked = None if name == UNTRACKED else increments
                strategy = "auto" if name == UNTRACKED else name
                found = _told(
                    localize(step, space, ranks, spike, clip_scale, tracked, typical, strategy=strategy, **limits)
                )
            found["seconds"] = time.perf_counter() - started
        mib = peak.extra_mib
        found["peak_extra_mib"] = None if mib is None else ranks.max([mib])[0]
        found["gradient_restored"] = all(a is b for a, b in zip(before, space.current(), strict=True))
        found["culprits"] = [_culprit(culprit, batch, ranks.size, cell.micro_batches) for culprit in found["culprits"]]
        if found.get("norm_after") is not None:
            found["norm_without"] = _norm_without(model, cell, batch, found["culprits"])
        answer["strategies"][name] = found
    return answer


def _told(finding: SearchResult) -> dict[str, Any]:
    certificate = finding.certificate
    return {
        "culprits": [(culprit.span, culprit.tokens, culprit.norm, culprit.is_exact) for culprit in finding.culprits],
        "forwards": finding.num_forwards,
        "backwards": finding.num_backwards,
        "status": finding.status,
        "stop_reason": finding.stop_reason,
        "source": None if finding.source is None else finding.source.label,
        "closure": None if finding.shares is None else finding.shares.closure,
        "closure_error": None if finding.shares is None else finding.shares.closure_error,
        "is_trusted": finding.shares is not None and finding.shares.is_trusted,
        "verdict": certificate.verdict,
        "norm_after": certificate.norm_after,
        "error_bound": certificate.error_bound,
        "path": [f"{e.phase} {e.verdict}" + (f" {e.norm:.4g}" if e.norm is not None else "") for e in finding.path],
    }


def _published(step, space, ranks) -> dict[str, Any]:
    saved = space.take()
    prober = Prober(step, space, ranks)
    try:
        token, norm = descend(prober)
    finally:
        space.put(saved)
    return {
        "culprits": [("token", (token,), norm, True)],
        "forwards": prober.num_forwards,
        "backwards": prober.num_backwards,
    }


def _norm_without(model: torch.nn.Module, cell: Cell, batch: Batch, culprits: list[dict]) -> float:
    """The norm that training has where what is named has no advantage; ``.grad`` is left as it was."""
    space = GradientSpace(model)
    saved = space.take()
    places = [place for culprit in culprits for place in culprit["places"]]
    without = batch.planted(dict.fromkeys(places, 0.0))
    ToyStep(model, without, cell.micro_batches, getattr(torch, cell.dtype), cell.loss).train()
    norm = space.norm()
    space.put(saved)
    return norm


def _culprit(found, batch: Batch, num_ranks: int, micro_batches: int) -> dict[str, Any]:
    """Tokens as (row of the batch, position)."""
    span, tokens, norm, is_exact = found
    places = [batch.place(token, num_ranks, micro_batches) for token in tokens]
    return {"span": span, "places": places, "norm": norm, "is_exact": is_exact}


_kept: dict[tuple, torch.nn.Module] = {}


def _sharded(cell: Cell, weights: str, device: str) -> torch.nn.Module:
    key = (cell.model, weights, cell.dtype, cell.masters)
    if key not in _kept:
        _kept.clear()
        place = torch.device(device, dist.get_rank()) if device == "cuda" else torch.device(device)
        decoder = load(cell.model, Path(weights)).to(getattr(torch, cell.masters))
        _kept[key] = shard(decoder, "fsdp2", getattr(torch, cell.dtype), place)
    return _kept[key]
