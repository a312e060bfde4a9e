# SPDX-License-Identifier: Apache-2.0
"""Measure what many ranks cost a rank's host: seconds, messages, bytes and sockets, by two processes that play all.

    python -m lab.benchmarks.ranks                # 64, 512 and 2,048 ranks: three minutes
    python -m lab.benchmarks.ranks --ranks 64     # the first alone

The first process is the first rank. The second one stands for all others: its gradient, its sums and its messages
count as often. ``gradloc.Watch`` runs as it is, so a healthy step, and a spike with its search and its event, send and
unpack what a real run's would. Host work is the first process' processor time less the passes of the model. Sockets
are counted as gloo opens them for the ranks' own group on NCCL. Writes ranks.json.
"""

import itertools
import os
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradloc
from gradloc.core.probe import Prober
from gradloc.core.ranks import Ranks
from gradloc.watch.watch import Watch
from lab.benchmarks.run import Parser, Record, finish
from lab.output import table
from tests.toy_model.model import build
from tests.world import World

SIZES = (64, 512, 2048)
ROWS, T, VOCABULARY, MICRO_BATCHES = 4, 64, 96, 2
"""Rows and positions of a micro-batch, the vocabulary, and micro-batches of a rank."""
STEPS = ("", "", "", "a healthy step", "one token", "", "all tokens unlike", "", "all tokens alike")
"""Steps in order, those that are measured by name; the optimizer's first ones allocate."""
LIMIT_S = 1.0
"""Host work of a spike with 512 ranks, beyond its passes."""
_MOST = 4.0  # times the largest healthy norm: the threshold
_PER_VALUE = 8  # bytes of a number


class PlayedRanks(Ranks):
    """Ranks that two processes play, the second one all but the first; counts what the first sends and receives."""

    num_played = 2

    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, **more)
        self.size, self.counts = self.num_played, Counter[str]()

    def _note(self, sent: int, received: int) -> None:
        self.counts.update(messages=1, sent=sent, received=received)

    def _both(self, value: Any) -> list[Any]:
        found = [None, None]
        dist.all_gather_object(found, value)
        return found

    def _reduced(self, values: list[float], op: Any) -> list[float]:
        self._note(_PER_VALUE * len(values), _PER_VALUE * len(values))
        first, other = self._both([float(value) for value in values])
        if op == dist.ReduceOp.MAX:
            return [max(pair) for pair in zip(first, other, strict=True)]
        if len(values) >= self.size:  # a number of each rank in a place of its own
            return [first[at] if at % self.size == 0 else other[at - at % self.size + 1] for at in range(len(values))]
        return [mine + (self.size - 1) * theirs for mine, theirs in zip(first, other, strict=True)]

    def _sum_watched(self, has_failed: bool) -> float:
        self._note(_PER_VALUE, _PER_VALUE)
        return super()._sum_watched(has_failed)

    def gather(self, value: Any) -> list[Any]:
        first, other = (pickle.dumps(each) for each in self._both(value))
        longest = max(len(first), len(other))  # torch pads what it gathers
        self._note(longest, self.size * longest)
        return [pickle.loads(first), *(pickle.loads(other) for _ in range(self.size - 1))]

    def gather_first(self, value: Any) -> list[Any] | None:
        found = self.gather(value)
        return found if self.is_first else None

    def broadcast_from(self, rank: int, value: Any) -> Any:
        found = self._both(value)[min(rank, 1)]
        self._note(len(pickle.dumps(found)) if rank == 0 else 0, len(pickle.dumps(found)) if rank else 0)
        return found


def _averaged(size: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients over all ranks that are played; a communication hook of DDP's."""
    whole = bucket.buffer().mul_(1.0 if dist.get_rank() == 0 else size - 1.0)
    dist.all_reduce(whole)
    made: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    made.set_result(whole.div_(size))
    return made


def play(size: int, folder: str) -> Record:
    """Train with this many ranks, and measure the first one's steps.

    Returns:
        By name of the step ``host_s``, ``messages``, ``sent`` and ``received`` (bytes), ``culprits`` and ``verdict``.
    """
    torch.set_num_threads(1)
    norms = _train(size, folder, {"action": "off"})[0]
    limit = _MOST * max(norm for norm, name in zip(norms, STEPS, strict=True) if name in ("", "a healthy step"))
    return _train(size, folder, {"trigger": {"warmup": 2, "floor": limit, "cap": limit}})[1]


def _train(size: int, folder: str, settings: dict[str, Any]) -> tuple[list[float], Record]:
    rank, drawn = dist.get_rank(), torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(0)
    model = DistributedDataParallel(build("tiny"))
    model.register_comm_hook(size, _averaged)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    PlayedRanks.num_played = size
    with (
        mock.patch("gradloc.watch.watch.Ranks", PlayedRanks),
        mock.patch("gradloc.watch.watch.host_group", lambda: None),
    ):
        watch = gradloc.Watch(model, optimizer, folder, **settings)
    norms, found = list[float](), {}
    with _metered() as seconds:
        for name in STEPS:
            weights = torch.ones(MICRO_BATCHES, ROWS, T)
            if name.startswith("all tokens"):
                factors = torch.randn(weights.shape, generator=drawn).mul(2).exp() if name.endswith("unlike") else 1.0
                weights *= 10 * _MOST * factors
            elif name == "one token" and rank == 0:
                weights[0, 1, 5] = 10 * _MOST * size * MICRO_BATCHES * ROWS
            optimizer.zero_grad()
            for weight in weights:
                ids = torch.randint(VOCABULARY, (ROWS, T + 1), generator=drawn)
                log_probs = watch.log_probs(
                    lambda ids=ids: gradloc.token_log_probs(model(ids[:, :-1], T), ids[:, 1:]), weight > 0, ids[:, 1:]
                )
                (-(log_probs * weight).mean() / MICRO_BATCHES).backward()
            watch.ranks.counts.clear()
            seconds.clear()
            norms.append(float(watch.clip_grad_norm_(1.0)))
            found[name] = {"host_s": sum(seconds), **watch.ranks.counts}
            found[name] |= {
                key: watch.metrics.get(f"gradloc/{key}", 0.0) for key in ("spikes", "culprits", "explained")
            }
            optimizer.step()
    found.pop("")
    return norms, found


@contextmanager
def _metered() -> Iterator[list[float]]:
    """Yield a list to which every checked step adds its processor time, and every pass of the model minus its own."""
    seconds: list[float] = []

    def timed(owner: type, name: str, sign: float) -> Any:
        method = getattr(owner, name)

        def run(*given: Any) -> Any:
            started = time.process_time()
            try:
                return method(*given)
            finally:
                seconds.append(sign * (time.process_time() - started))

        return mock.patch.object(owner, name, run)

    with timed(Watch, "check_step", 1.0), timed(Prober, "_run_on_all_ranks", -1.0):
        yield seconds


def num_sockets() -> int:
    """Return how many sockets a group of gloo's own opens in this process, on four real ranks for instance."""

    def there() -> int:
        links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return sum(os.path.islink(link) and os.readlink(link).startswith("socket:") for link in links)

    before = there()
    group = dist.new_group(backend="gloo")
    dist.all_reduce(torch.zeros(1), group=group)
    return there() - before


def markdown(record: Record) -> str:
    """Return a table with a row for each step and number of ranks."""
    rows: list[list[object]] = [["ranks", "step", "host work (s)", "messages", "sent (kB)", "received (kB)", "sockets"]]
    for size, name in itertools.product(sorted(record["ranks"], key=int), filter(None, STEPS)):
        found = record["ranks"][size][name]
        sent, received = (f"{found[key] / 1e3:,.0f}" for key in ("sent", "received"))
        num_sockets = int(size) - 4 + max(record["sockets_of_four"])
        cells = f"{found['host_s']:.2f}", found["messages"], sent, received, f"{num_sockets:,}"
        rows.append([f"{int(size):,}", name, *cells])
    return table(rows)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table and write ``ranks.json``; the exit code is 1 if 512 ranks exceed :data:`LIMIT_S`."""
    options = Parser("ranks", __doc__)
    options.add_argument("--ranks", type=int, nargs="*", default=SIZES, help="how many (%(default)s)")
    parsed = options.parse_args(arguments)
    found: Record = {}
    with World(2, timeout_s=600, preloaded=()) as world, tempfile.TemporaryDirectory() as folder:
        for size in parsed.ranks:
            found[str(size)] = world.run("lab.benchmarks.ranks.play", size=size, folder=f"{folder}/{size}")[0]
    with World(4, preloaded=()) as world:
        sockets = world.run("lab.benchmarks.ranks.num_sockets")
    record = {"ranks": found, "sockets_of_four": sockets}
    finish(parsed, record, markdown(record))
    return int(any(each["host_s"] > LIMIT_S for name, each in found.get("512", {}).items()))


if __name__ == "__main__":
    raise SystemExit(main())
