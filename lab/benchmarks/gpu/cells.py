# SPDX-License-Identifier: Apache-2.0
"""Cells of the GPU benchmark: a healthy step, planted spikes compared with the truth, memory, waits, two processes."""

import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradloc.core.gradients import GradientSpace
from gradloc.core.memory import SearchMemory, StepPeak
from gradloc.core.memory_plans import PLANS, SearchPlan
from gradloc.core.probe import Prober
from gradloc.core.ranks import Ranks
from gradloc.core.tracker import NormTracker
from gradloc.search.find import localize
from gradloc.search.task import SearchResult
from gradloc.trigger import Spike
from lab.benchmarks.counter import PACKAGE, DeviceCounter
from lab.benchmarks.run import REPO
from tests.toy_model import Batch, Decoder, ModelSize, Place, ToyStep, log_prob_of, shard
from tests.toy_model.model import SIZES, Block, _attend

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
"""Gradient norm of each culprit, in multiples of the healthy step's."""
_NUM_MICRO_BATCHES = 4
_THRESHOLD = 4.0  # times the healthy norm: the trigger's minimum
_LONGEST = 2048  # response tokens of a row


def attentions(device: torch.device) -> list[str]:
    """Return the kinds of attention that can run on the device."""
    if device.type == "cpu":
        return ["sdpa", "varlen"]
    return ["sdpa", "sdpa_flash", *(["flash_attn", "varlen"] if find_spec("flash_attn") else [])]


class Bench:
    """A model, a batch and the healthy step over both, on every rank.

    Args:
        size: a name in ``MODELS``.
        attention: one of :func:`attentions`.
        num_tokens: response tokens over all ranks.
        dtype: dtype of the computation; master weights are float32.
        device: this rank's device.
    """

    def __init__(self, size: str, attention: str, num_tokens: int, dtype: str, device: torch.device):
        torch.manual_seed(0)
        self.size, self.attention, self.dtype, self.device = size, attention, dtype, device
        self.precision = getattr(torch, dtype)
        with torch.device(device):
            model = Decoder(MODELS[size])
        self.batch = random_answers(model, num_tokens)
        layout = "fsdp2" if dist.is_initialized() else "plain"
        if device.type == "cuda" and dist.get_backend() == "gloo":
            layout = "fsdp1"  # FSDP2's reduce-scatter over gloo crashes processes that share a card (torch 2.11)
        self.model = shard(model, layout, self.precision, device)
        self.space, self.ranks = GradientSpace(self.model), Ranks(device=device)
        # without a rate it allocates its memory and changes no weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        self.tracker, self.peak = NormTracker(8), StepPeak()
        with attended(attention, is_deterministic=False):
            for _ in range(4):  # the first one allocates; the tracker measures its cost on three
                self.step, self.seconds = _timed(device, self.update)
        self.healthy = self.space.norm()

    def update(self) -> ToyStep:
        """Take a healthy step, with the norms tracked as in training."""
        self.space.clear()
        step = ToyStep(self.model, self.batch, _NUM_MICRO_BATCHES, self.precision)
        self.tracker.begin_update()
        self.tracker.begin_mini_batch()
        self.peak.begin(self.device)
        step.train(lambda: self.tracker.after_backward(self.space))
        self.peak.end(self.device)
        self.tracker.after_mini_batch(self.space, 1.0, 1.0, is_spike=False)
        self.optimizer.step()
        self.tracker.end_update()
        return step

    def facts(self) -> dict[str, Any]:
        """Return the facts that every cell has."""
        return {
            "model": f"{self.size} {self.dtype} x{self.ranks.size}",
            "attention": self.attention,
            "tokens": self.batch.num_tokens,
            "healthy_norm": self.healthy,
            "update_seconds": self.seconds,
            "tracker_is_on": self.tracker.reads_backwards,
        }

    def spiked(self, plant: str) -> tuple[ToyStep, Spike, dict[Place, float]]:
        """Train a step with this spike; its gradient is in ``.grad``."""
        planted = _planted(self, plant)
        batch = self.batch.planted(planted)
        step = ToyStep(self.model, batch, _NUM_MICRO_BATCHES, self.precision)
        self.space.clear()
        step.train()
        norm, threshold = self.space.norm(), _THRESHOLD * self.healthy
        return step, Spike("fixed", norm, threshold, threshold * batch.num_tokens**0.5, batch.num_tokens), planted

    def search(self, step: ToyStep, spike: Spike, plan: SearchPlan = PLANS[0]) -> tuple[SearchResult, dict[str, Any]]:
        """Localize with a plan; return the result, the seconds, and the peak of memory and its forecast in GiB."""
        room = SearchMemory(self.space, self.optimizer, self.peak.size, step.forward_bytes())
        is_card, strategy = self.device.type == "cuda", "auto" if plan.is_full else "bisect"
        if is_card:
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        room.make(plan)
        try:
            given = {"strategy": strategy, "max_steps": 20}
            work = partial(localize, step, self.space, self.ranks, spike, 1.0, **given)
            finding, seconds = _timed(self.device, work)
        finally:
            room.close()
        figures = {"seconds": seconds, "peak_gib": None, "forecast_gib": None}
        if is_card:
            peak = torch.cuda.max_memory_allocated(self.device) - before
            figures |= {"peak_gib": peak / 2**30, "forecast_gib": max(room.need.peak_bytes(plan), 0) / 2**30}
        return finding, figures

    def named(self, finding: SearchResult) -> set[Place]:
        """Return the culprits' places in the batch."""
        return {self.batch.place(token, self.ranks.size, _NUM_MICRO_BATCHES) for token in finding.tokens}


def spike_cell(bench: Bench, plant: str) -> dict[str, Any]:
    """Search one planted spike: the norm must be within its bound, the memory within the forecast."""
    step, spike, planted = bench.spiked(plant)
    finding, figures = bench.search(step, spike)
    named, certificate, shares = bench.named(finding), finding.certificate, finding.shares
    with attended(bench.attention, is_deterministic=True):
        truth = step.norm_of(bench.space, named, without=True)
    off = abs(certificate.norm_after - truth)
    is_within = off <= certificate.error_bound + 1e-6 * certificate.norm_after
    fits = figures["peak_gib"] is None or figures["peak_gib"] <= 1.05 * figures["forecast_gib"]
    return figures | {
        "plant": plant,
        "norm": spike.grad_norm,
        "recall": len(named & planted.keys()) / len(planted),
        "false_positives": len(named - planted.keys()),
        "closure": None if shares is None else shares.closure,
        "verdict": certificate.verdict,
        "method": certificate.method,
        "norm_after": certificate.norm_after,
        "error_bound": certificate.error_bound,
        "truth": truth,
        "cost_f": finding.num_forwards + 2 * finding.num_backwards,
        "times_update": 1 + figures["seconds"] / bench.seconds,
        "is_ok": is_within and fits,
    }


def repeat_cell(bench: Bench) -> dict[str, Any]:
    """Measure how much two passes of a micro-batch differ, and a row alone from itself among others; no check."""
    step, space = bench.step, bench.space
    space.clear()
    step.loss(0, None).backward()
    first = space.take()
    first_norm = space.norm(first)
    step.loss(0, None).backward()
    space.add(first, alpha=-1.0)
    difference = space.norm() / first_norm
    space.clear()
    log_prob, again, alone = step.forward(0).log_prob, step.forward(0).log_prob, step.forward_rows([(0, [0])]).log_prob
    return {
        "backward_difference": difference,
        "forward_difference": float((log_prob - again).abs().max()),
        "row_difference": float((log_prob[:1] - alone).abs().max()),
        "is_ok": None,
    }


def tracker_cell(bench: Bench) -> dict[str, Any]:
    """Check that the tracker stays on, and measure its cost."""
    tracker = bench.tracker
    for _ in range(4):
        bench.update()
    return {"cost": tracker.cost, "is_ok": tracker.reads_backwards or bench.device.type == "cpu"}


def room_cell(bench: Bench, number: int) -> dict[str, Any]:
    """Search a spike with a plan that saves memory: same verdict, unchanged optimizer state."""
    step, spike, planted = bench.spiked("three")
    values = [value for state in bench.optimizer.state.values() for value in state.values()]
    before = [value.clone() for value in values]
    finding, figures = bench.search(step, spike, PLANS[number])
    is_back = all(torch.equal(value, old) for value, old in zip(values, before, strict=True))
    named = bench.named(finding)
    is_found = named == planted.keys() if PLANS[number].is_full else bool(named)
    bench.space.clear()
    return figures | {
        "way": number,
        "recall": len(named & planted.keys()) / len(planted),
        "is_ok": is_back and is_found,
    }


def mask_cell(bench: Bench) -> dict[str, Any]:
    """Compute the step without the culprits twice: they may differ only as two backwards do."""
    repeats = repeat_cell(bench)["backward_difference"]
    step, spike, planted = bench.spiked("three")
    prober = Prober(step, bench.space, bench.ranks)
    finding, _ = bench.search(step, spike)
    prober.compute_without(finding.tokens)
    first = bench.space.take()
    norm = bench.space.norm(first)
    prober.compute_without(finding.tokens)
    prober.add(first, alpha=-1.0)
    difference = bench.space.norm() / norm
    bench.space.clear()
    is_ok = difference <= max(2**-6, 2 * repeats) and norm < spike.threshold
    return {"difference": difference, "backward_difference": repeats, "norm": norm, "is_ok": is_ok}


def syncs_cell(bench: Bench) -> dict[str, Any]:
    """Find where a healthy update and a search wait for the device; a healthy update must not in gradloc."""
    step, spike, _ = bench.spiked("three")
    bench.space.clear()
    healthy = _waits(bench.device, bench.update)
    step.train()
    searched = _waits(bench.device, lambda: bench.search(step, spike))
    bench.space.clear()
    return {"healthy": healthy, "search": searched, "is_ok": not any(place.startswith("gradloc/") for place in healthy)}


def _waits(device: torch.device, work: Any) -> dict[str, int]:
    """Count the lines that wait for the device, by torch's warnings, or by the counter on a CPU."""
    if device.type != "cuda":
        with DeviceCounter() as counter:
            work()
        return {f"gradloc/{place.strip()}": count for place, count in counter.places.most_common()}
    found: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchronizing" in str(warning.message):
            name = warning.filename
            ours = name.startswith(PACKAGE)
            found[f"{'gradloc/' + name.removeprefix(PACKAGE) if ours else name}:{warning.lineno}"] += 1
    return dict(found.most_common())


def two_cell(device: torch.device, size: str, num_tokens: int, out: Path) -> dict[str, Any]:
    """Run the first part in two processes on this device, over gloo, with real collectives."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "lab.benchmarks.gpu", "--device", device.type, "--size", size, "--parts", "first"]
    command += ["--tokens", str(num_tokens), "--out", str(out / "two")]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=REPO, **silent) as ranks:
        try:
            _, errors = ranks.communicate(timeout=600)
        finally:
            ranks.terminate()  # torchrun ends its processes as well
    said = errors.strip().splitlines()[-20:] if ranks.returncode else []
    return {"exit_code": ranks.returncode, "said": said, "is_ok": ranks.returncode == 0}


def _planted(bench: Bench, plant: str) -> dict[Place, float]:
    """Return places spread over the rows, with the advantage that gives each its norm; the same on every rank.

    A token that the random model is sure of has no gradient, so the row's next token is used.
    """
    found: dict[Place, float] = {}
    for number, size in enumerate(PLANTS[plant]):
        row, position, norm = (5 * number + 1) % len(bench.batch.labels), 7 + 3 * number, 0.0
        while norm < 1e-6 * bench.healthy:
            place = (row, position)
            norm = bench.step.norm_of(bench.space, [place])
            position += 1
        found[place] = float(bench.batch.advantages[place]) * size * bench.healthy / norm
    return found


@torch.no_grad()
def random_answers(model: Decoder, num_tokens: int) -> Batch:
    """Return rows of random prompts, with answers sampled from the model at every position; advantages by row.

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
    old_log_probs = torch.cat(old)
    old_log_probs += 0.05 * torch.randn(old_log_probs.shape, generator=generator, device=device)
    fields = {
        "tokens": tokens,
        "labels": torch.cat(labels),
        "mask": torch.ones_like(old_log_probs, dtype=torch.bool),
        "advantages": torch.randn(rows, 1, generator=generator, device=device).expand_as(old_log_probs),
        "old_log_probs": old_log_probs,
        "reference_log_probs": old_log_probs,
    }
    return Batch(**{name: field.cpu().clone() for name, field in fields.items()})


@contextmanager
def attended(attention: str, is_deterministic: bool) -> Iterator[None]:
    """Have all blocks use this attention; ``is_deterministic`` selects deterministic kernels everywhere."""
    own, was = Block.attend, torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        if attention == "flash_attn":
            Block.attend = staticmethod(_flash(is_deterministic))
        if attention == "varlen":
            Block.attend = staticmethod(_varlen(is_deterministic))
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


def _varlen(is_deterministic: bool) -> Callable:
    """Attend packed rows, as verl does; on a CPU, which has no such kernel, one row at a time."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows, heads, length, width = q.shape
        if q.device.type == "cpu":
            each = [_attend(*(x[row : row + 1] for x in (q, k, v))) for row in range(rows)]
            return torch.cat(each)
        from flash_attn import flash_attn_varlen_func

        packed = [x.transpose(1, 2).reshape(rows * length, heads, width) for x in (q, k, v)]
        ends = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=q.device)
        given = {"causal": True, "deterministic": is_deterministic}
        found = flash_attn_varlen_func(*packed, ends, ends, length, length, **given)
        return found.view(rows, length, heads, width).transpose(1, 2)

    return attend


def _timed(device: torch.device, work: Callable[[], Any]) -> tuple[Any, float]:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    started = time.perf_counter()
    answer = work()
    wait()
    return answer, time.perf_counter() - started
