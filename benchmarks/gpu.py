# SPDX-License-Identifier: Apache-2.0
"""What holds on a GPU: repeatability, closure, certificate, recall, cost and memory, on a bare model of random weights.

    python -m benchmarks.gpu                              # one GPU: 0.5B, bf16, 4k to 32k tokens, every attention
    python -m benchmarks.gpu --size 1.5B --tokens 32768
    torchrun --nproc-per-node 8 -m benchmarks.gpu         # the same step dealt out to eight
    python -m benchmarks.gpu --device cpu --size tiny --tokens 128

Needs torch and this repository; flash-attn where it is installed. Prints a table; writes gpu.json and gpu.md.
"""

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS has no deterministic kernels

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.run import REPO, digest
from gradloc.core.gradients import GradientSpace
from gradloc.core.ranks import Ranks
from gradloc.core.trigger import Spike
from gradloc.search.find import localize
from tests.bare import BareStep, Batch, Decoder, ModelSize, Place, log_prob_of, shard
from tests.bare.model import SIZES, Block

MODELS = {
    "tiny": SIZES["tiny"],
    "0.5B": ModelSize(vocabulary=151_936, width=896, layers=24, heads=14),
    "1.5B": ModelSize(vocabulary=151_936, width=1536, layers=28, heads=12),
}
PLANTS = {
    "single_10": (10.0,),
    "single_1e3": (1e3,),
    "single_1e5": (1e5,),
    "three": (10.0, 6.0, 4.0),
    "eight": (8.0,) * 8,
}
"""Each culprit's own gradient norm, in multiples of the healthy step's."""
_NUM_MICRO_BATCHES = 4
_THRESHOLD = 4.0  # times the healthy norm: the lowest that the trigger has
_LONGEST = 2048  # response tokens of a row


def main(arguments: list[str] | None = None) -> int:
    """Measure every attention at every number of tokens, and write what was measured."""
    parsed = _parser().parse_args(arguments)
    device = _join(parsed.device)
    cells = []
    for attention in parsed.attention or attentions(device):
        for num_tokens in parsed.tokens:
            cells.append(measure(parsed.size, attention, num_tokens, parsed.dtype, device))
            if _is_first():
                print(rows_of(cells[-1]), flush=True)
    if _is_first():
        command = shlex.join(["python", "-m", "benchmarks.gpu", *(sys.argv[1:] if arguments is None else arguments)])
        name = torch.cuda.get_device_name() if device.type == "cuda" else f"cpu ({platform.machine()})"
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        run = {"command": command, "core_sha256": digest(), "device": name, "versions": versions, "cells": cells}
        out = Path(parsed.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu.json").write_text(json.dumps(run, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        (out / "gpu.md").write_text(markdown(run) + "\n", encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def attentions(device: torch.device) -> list[str]:
    """The kinds of attention that can run here."""
    if device.type == "cpu":
        return ["sdpa"]
    return ["sdpa", "sdpa_flash", *(["flash_attn"] if find_spec("flash_attn") else [])]


@dataclass
class Found:
    """One planted spike, searched."""

    plant: str
    norm: float
    recall: float
    false_positives: int
    closure: float | None
    verdict: str
    method: str
    norm_after: float
    error_bound: float
    truth: float
    """The norm without the culprits, with deterministic kernels."""
    cost_f: int
    seconds: float
    times_update: float
    """How long the update takes with the search, in multiples of one without."""
    peak_gib: float | None
    """Of memory in use, over training's own peak; None on a CPU."""

    @property
    def is_within_bound(self) -> bool:
        return abs(self.norm_after - self.truth) <= self.error_bound + 1e-6 * self.norm_after


def measure(size: str, attention: str, num_tokens: int, dtype: str, device: torch.device) -> dict[str, Any]:
    """One kind of attention, one batch: a healthy step, then every spike of ``PLANTS``.

    Args:
        size: a name in ``MODELS``.
        attention: ``sdpa`` (torch's choice), ``sdpa_flash`` (torch's flash kernel) or ``flash_attn`` (the package).
        num_tokens: response tokens over all ranks.
        dtype: of the computation; masters are float32.
        device: of this rank.
    """
    torch.manual_seed(0)
    precision = getattr(torch, dtype)
    with torch.device(device):
        model = Decoder(MODELS[size])
    batch = random_answers(model, num_tokens)
    sharded = shard(model, "fsdp2" if dist.is_initialized() else "plain", precision, device)
    space, ranks = GradientSpace(sharded), Ranks(device=device)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.0)  # its memory is there, its step moves nothing
    with attended(attention, is_deterministic=False):
        for _ in range(2):  # the first allocates
            _forget_peak(device)
            step, seconds = _timed(device, lambda: _update(sharded, batch, precision, space, optimizer))
        training_peak = _peak(device)
        healthy = space.norm()
        found = [
            _search(plant, step, batch, healthy, seconds, training_peak, precision, attention, space, ranks)
            for plant in PLANTS
        ]
        space.clear()
        repeat = _repeatability(step, space)
    cell = {"size": size, "attention": attention, "tokens": batch.num_tokens, "dtype": dtype, "ranks": ranks.size}
    figures = {"healthy_norm": healthy, "update_seconds": seconds, "training_peak_gib": training_peak}
    return {**cell, **figures, **repeat, "found": [{**asdict(f), "is_within_bound": f.is_within_bound} for f in found]}


def _search(
    plant: str,
    step: BareStep,
    batch: Batch,
    healthy: float,
    seconds: float,
    training_peak: float | None,
    precision: torch.dtype,
    attention: str,
    space: GradientSpace,
    ranks: Ranks,
) -> Found:
    planted = _planted(plant, step, batch, healthy, space, ranks)
    spiked = batch.planted(planted)
    step = BareStep(step.model, spiked, _NUM_MICRO_BATCHES, precision)
    space.clear()
    step.train()
    norm, threshold = space.norm(), _THRESHOLD * healthy
    spike = Spike("fixed", norm, threshold, threshold * spiked.num_tokens**0.5, spiked.num_tokens)
    _forget_peak(step.device)
    finding, taken = _timed(step.device, lambda: localize(step, space, ranks, spike, 1.0))
    peak = _peak(step.device)
    named = {spiked.place(token, ranks.size, _NUM_MICRO_BATCHES) for token in finding.tokens}
    certificate, shares = finding.certificate, finding.result.shares
    space.clear()
    with attended(attention, is_deterministic=True):
        truth = _norm_without(named, step, space)
    return Found(
        plant=plant,
        norm=norm,
        recall=len(named & planted.keys()) / len(planted),
        false_positives=len(named - planted.keys()),
        closure=None if shares is None else shares.closure,
        verdict=certificate.verdict,
        method=certificate.method,
        norm_after=certificate.norm_after,
        error_bound=certificate.error_bound,
        truth=truth,
        cost_f=finding.num_forwards + 2 * finding.num_backwards,
        seconds=taken,
        times_update=1 + taken / seconds,
        peak_gib=None if peak is None else peak - training_peak,
    )


def _planted(plant: str, step: BareStep, batch: Batch, healthy: float, space: GradientSpace, ranks: Ranks) -> dict:
    """Places spread over the rows, with the advantage that gives each the norm it is to have; every rank the same."""
    sizes, rows = PLANTS[plant], len(batch.labels)
    places = [((5 * number + 1) % rows, 7 + 3 * number) for number in range(len(sizes))]
    found: dict[Place, float] = {}
    for place, size in zip(places, sizes, strict=True):
        own = _norm_of({place}, step, space)
        found[place] = float(batch.advantages[place]) * size * healthy / own
    return found


def _norm_of(places: set[Place], step: BareStep, space: GradientSpace) -> float:
    """The norm of these tokens' part of the gradient, by a backward of every micro-batch."""
    return _norm(step, space, lambda index: _mask(places, step, index))


def _norm_without(places: set[Place], step: BareStep, space: GradientSpace) -> float:
    return _norm(step, space, lambda index: ~_mask(places, step, index))


def _norm(step: BareStep, space: GradientSpace, selected: Callable[[int], torch.Tensor]) -> float:
    space.clear()
    for index in range(step.num_micro_batches):
        step.loss(index, selected(index)).backward()
    norm = space.norm()
    space.clear()
    return norm


def _mask(places: set[Place], step: BareStep, index: int) -> torch.Tensor:
    mask, rows = torch.zeros_like(step.token_mask(index)), step.rows(index)
    for row, position in places:
        if row in rows:
            mask[rows.index(row), position] = True
    return mask


def _repeatability(step: BareStep, space: GradientSpace) -> dict[str, float]:
    """How far two passes of the same micro-batch differ, relative to the pass."""
    step.loss(0, None).backward()
    first = space.take()
    first_norm = space.norm(first)
    step.loss(0, None).backward()
    space.add(first, alpha=-1.0)
    norm = space.norm()
    space.clear()
    del first
    log_prob, again = step.forward(0)[0], step.forward(0)[0]
    return {
        "backward_difference": norm / first_norm,
        "forward_difference": float((log_prob - again).abs().max()),
    }


def _update(model, batch: Batch, precision: torch.dtype, space: GradientSpace, optimizer) -> BareStep:
    space.clear()
    step = BareStep(model, batch, _NUM_MICRO_BATCHES, precision)
    step.train()
    optimizer.step()
    return step


@torch.no_grad()
def random_answers(model: Decoder, num_tokens: int) -> Batch:
    """Rows of random prompts and of answers drawn from the model at every position, row by row; advantages by row.

    Args:
        model: unsharded, on its device.
        num_tokens: N, a multiple of the micro-batches of all ranks.
    """
    device = next(model.parameters()).device
    world = dist.get_world_size() if dist.is_initialized() else 1
    least = _NUM_MICRO_BATCHES * world
    length = min(num_tokens // least, _LONGEST)
    rows = max(num_tokens // length // least, 1) * least
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(model.head.out_features, (rows, 16 + length - 1), generator=generator, device=device)
    labels, old = [], []
    for row in tokens:
        logits = model(row[None], length).float()
        noise = torch.rand(logits.shape, generator=generator, device=device).clamp(1e-20, 1 - 1e-7)
        labels.append((logits - torch.log(-torch.log(noise))).argmax(-1))
        old.append(log_prob_of(logits, labels[-1]))
    before = torch.cat(old)
    before += 0.05 * torch.randn(before.shape, generator=generator, device=device)
    advantages = torch.randn(rows, 1, generator=generator, device=device).expand_as(before)
    fields = tokens, torch.cat(labels), torch.ones_like(before, dtype=torch.bool), advantages, before, before.clone()
    return Batch(*(field.cpu().clone() for field in fields))


@contextmanager
def attended(attention: str, is_deterministic: bool) -> Iterator[None]:
    """Context in which the blocks attend in this way; ``is_deterministic``: with kernels that repeat, all of them."""
    own, was = Block.attend, torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        if attention == "flash_attn":
            Block.attend = staticmethod(_flash(is_deterministic))
        if attention == "sdpa_flash":
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                yield
        else:
            yield
    finally:
        Block.attend = staticmethod(own)
        torch.use_deterministic_algorithms(was)


def _flash(is_deterministic: bool) -> Callable:
    from flash_attn import flash_attn_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # it takes (B, S, H, D)
        return flash_attn_func(q, k, v, causal=True, deterministic=is_deterministic).transpose(1, 2)

    return attend


def _timed(device: torch.device, work: Callable[[], Any]) -> tuple[Any, float]:
    _wait(device)
    started = time.perf_counter()
    answer = work()
    _wait(device)
    return answer, time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def _join(kind: str) -> torch.device:
    """The device of this process, in a group of one or of torchrun's."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


HEAD = (
    "| model | attention | tokens | two backwards differ by | plant | spike | recall | false | closure | verdict "
    "| method | norm after | bound | truth | within | f | update x | peak GiB over training's |"
)


def markdown(run: dict[str, Any]) -> str:
    """The whole run as one table, with where it comes from."""
    lines = [
        f"{run['device']}, torch {run['versions']['torch']}, core `{run['core_sha256'][:8]}`: `{run['command']}`",
        "",
    ]
    lines += [HEAD, "|" + " --- |" * HEAD.count(" | ") + " --- |"]
    return "\n".join(lines + [rows_of(cell) for cell in run["cells"]])


def rows_of(cell: dict[str, Any]) -> str:
    """A cell's rows of the table."""
    lines = []
    for f in cell["found"]:
        closure = "" if f["closure"] is None else f"{f['closure']:.3f}"
        peak = "" if f["peak_gib"] is None else f"{f['peak_gib']:.2f}"
        values = [f"{cell['size']} {cell['dtype']} x{cell['ranks']}", cell["attention"], cell["tokens"]]
        values += [f"{cell['backward_difference']:.1e}", f["plant"], f"{f['norm'] / cell['healthy_norm']:.4g} x"]
        values += [f"{f['recall']:.2f}", f["false_positives"], closure, f["verdict"], f["method"]]
        values += [f"{f['norm_after']:.4g}", f"{f['error_bound']:.1e}", f"{f['truth']:.4g}"]
        values += ["yes" if f["is_within_bound"] else "NO", f["cost_f"], f"{f['times_update']:.2f}", peak]
        lines.append("| " + " | ".join(str(value) for value in values) + " |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=MODELS, default="0.5B")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--attention", nargs="+", choices=("sdpa", "sdpa_flash", "flash_attn"))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--out", default=str(REPO / "runs" / "benchmarks" / "gpu"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
