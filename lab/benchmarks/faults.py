# SPDX-License-Identifier: Apache-2.0
"""Make something fail during the search of a spike, and record how the run continues or ends.

    python -m lab.benchmarks.faults                       # every installed trainer; resumes
    python -m lab.benchmarks.faults --trainer "TRL, DDP"  # one of them
    python -m lab.benchmarks.faults --every 20            # every twentieth case
    python -m lab.benchmarks.faults --pause 90            # a rank stops for 90 s instead of 3
    python -m lab.benchmarks.faults --table               # the page's table, from the record

Each case is a real trainer on two ranks: an optimizer step with a planted spike, during whose search something fails,
and a healthy one. There are two good outcomes. Either the run continues with the step of its mode, with or without the
token, and has exactly its weights. Or all processes end within a minute, with a sentence. Writes faults.json.
"""

import errno
import importlib.util
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import yaml
from tqdm import tqdm

from gradloc.core import ranks
from lab.benchmarks.actor import is_engine
from lab.benchmarks.run import Parser, Record, digest, write
from lab.output import table
from tests.core.card import Card
from tests.toy_model.faults import memory_is
from tests.world import World
from tests.world import harness as verl_harness
from tests.world.spikes import plant

_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
TRAINERS: dict[str, str] = _TABLES["trainers"]
"""Trainer -> Megatron's layout."""
PLACES = {place: tuple(function.split()) for place, function in _TABLES["places"].items()}
"""Places of a search in order -> module and function called there."""
KINDS: dict[str, str] = _TABLES["kinds"]
"""Kinds of fault -> explanation."""
COPIES = {"copy to the host": ("core.gradients", "host_copy"), "state to the host": ("core.memory", "host_copy")}
SAVES = {"weights": ("torch", "save"), "safetensors": ("transformers.modeling_utils", "safe_save_file")}
ERRORS = {
    "full disk": OSError(errno.ENOSPC, "No space left on device"),
    "host memory": MemoryError("made to fail"),
    "device memory": torch.OutOfMemoryError("made to fail"),
}
"""Kinds of fault that a call raises."""
PAUSE_S, LIMIT_S, PATIENCE_S = 3.0, 60.0, 5.0
"""Seconds that a rank or a disk stops; seconds in which all processes must end; seconds that a failed rank waits for
its peers, fewer than in the package, so that cases take less time."""
_ACTOR = "actor_rollout_ref.actor"
_ON = [f"{_ACTOR}.spike_detection=True", f"{_ACTOR}.grad_norm_threshold=640"]
_PLANT = (6, 2, 1e4)


@dataclass(frozen=True)
class Fault:
    """A fault on a ``rank`` (None: on both) when it reaches ``place`` for the ``number``-th time."""

    kind: str = ""
    place: str = ""
    number: int = 1
    rank: int | None = 0
    mode: str = "observe"

    @property
    def key(self) -> str:
        who = "both ranks" if self.rank is None else f"rank {self.rank}"
        return f"{self.kind} | {self.place} | {self.number} | {who} | {self.mode}"


# ---- on a rank


class _Injection:
    """Count how often a rank reaches each place, and cause the fault at one."""

    def __init__(self, fault: Fault, folder: str, pause_s: float):
        self.fault, self.counts, self.is_on = fault, Counter[str](), False
        self._folder, self._pause_s = folder, pause_s
        self.card, self._is_searching = Card(), False
        self.card.on_allocation = lambda: self._is_searching and self.come("allocation")

    def come(self, place: str) -> None:
        """Count that this rank reached a place."""
        if not self.is_on:
            return
        self.counts[place] += 1
        fault = self.fault
        if (place, self.counts[place]) == (fault.place, fault.number) and fault.rank in (None, dist.get_rank()):
            self._happen(fault.kind)

    def _happen(self, kind: str) -> None:
        Path(f"{self._folder}/happened").write_text(str(time.monotonic()))
        if kind.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, kind))
            time.sleep(LIMIT_S)  # until it is delivered
        elif kind == "a rank stands still":
            subprocess.Popen(["sh", "-c", f"sleep {self._pause_s}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "device memory, from here on":
            self.card.fill()
        elif kind == "late file system":
            time.sleep(self._pause_s)
        elif kind in ERRORS:
            raise ERRORS[kind]

    @contextmanager
    def at(self, places: dict[str, tuple[str, str]]) -> Iterator[None]:
        """Count each of these calls in here."""
        with ExitStack() as stack:
            for place, (module, path) in places.items():
                owners, _, name = path.rpartition(".")
                owner = pkgutil.resolve_name(f"{module if place in SAVES else f'gradloc.{module}'}:{owners}")
                stack.enter_context(mock.patch.object(owner, name, self._coming(place, getattr(owner, name))))
            yield

    def _coming(self, place: str, original: Callable) -> Callable:
        def coming(*args: Any, **given: Any) -> Any:
            if place != "agreement":
                if place not in SAVES or isinstance(args[1], str | os.PathLike):  # a tensor is pickled by torch.save
                    self.come(place)
                return original(*args, **given)
            ranks, local = args  # the local computation, before the ranks exchange whether it failed
            return original(ranks, lambda: (self.come(place), local())[1])

        return coming

    @contextmanager
    def on_card(self) -> Iterator[None]:
        """Put tensors on the simulated device in here, and count a search's allocations."""
        from gradloc.loop.localizer import Localizer

        look_into = Localizer._look_into

        def searched(*args: Any) -> Any:
            self._is_searching = True
            try:
                return look_into(*args)
            finally:
                self._is_searching = False

        with memory_is(self.card), mock.patch.object(Localizer, "_look_into", searched):
            yield


def suffer(trainer: str, folder: str, fault: dict[str, Any], is_on: bool, pause_s: float, patience_s: float) -> Record:
    """Train a rank with the fault. The process ends if the trainer raises.

    Returns:
        ``weights``, a hash that includes the optimizer's state; ``counts`` of places; ``failures`` and ``events``.
    """
    os.makedirs(folder, exist_ok=True)
    said = os.open(f"{folder}/rank{dist.get_rank()}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(said, stream)
    os.close(said)
    verl_harness.part("core.ranks")._PATIENCE_S = patience_s
    try:
        return _trained(trainer, folder, Fault(**fault), is_on, pause_s)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _trained(name: str, folder: str, fault: Fault, is_on: bool, pause_s: float) -> Record:
    injection, dump_dir = _Injection(fault, folder, pause_s), f"{folder}/events"
    overrides = [*_ON, f"{_ACTOR}.gradloc.action.mode={fault.mode}"] if is_on else []
    places = PLACES
    with ExitStack() as stack:
        if TRAINERS[name]:
            stack.enter_context(_megatron(TRAINERS[name]))
        if fault.place in COPIES:  # as if memory were short
            places = PLACES | COPIES
            stack.enter_context(mock.patch("gradloc.core.memory_plans.MemoryNeed.cheapest_plan", lambda *_: 2))
        if fault.place in SAVES:
            places = PLACES | SAVES
            overrides.append(f"{_ACTOR}.gradloc.evidence.checkpoint=before_step")
        if fault.kind == "dead tracker":
            overrides += _tracker(fault.place)
        trainer = verl_harness.make_trainer(overrides, dump_dir)
        if fault.place in COPIES:  # so that the optimizer has a state
            trainer.update(verl_harness.make_batch(seed=3))
        batch = verl_harness.make_batch(seed=1)
        plant(batch, *_PLANT)
        stack.enter_context(injection.at(places))
        if fault.place == "the device is full" and dist.get_rank() == 0:
            os.makedirs(dump_dir, exist_ok=True)  # TRL has made it already
            os.symlink("/dev/full", f"{dump_dir}/events.jsonl")
        driver = trainer.driver if is_on else None
        if fault.place == "a client that raises" and driver is not None:
            driver.notifier.trackers["file"] = SimpleNamespace()
        injection.is_on = True
        with injection.on_card() if fault.place in ("", "allocation") else nullcontext():
            metrics = trainer.update(batch)["metrics"]
        injection.is_on = False
        trainer.update(verl_harness.make_batch(seed=2))
        weights = trainer.weights_hash()
    found = {name: metrics.get(f"gradloc/{name}", [0])[0] for name in ("failures", "events", "write_failures")}
    return {"weights": weights, "counts": dict(injection.counts), **found}


@contextmanager
def _megatron(layout: str) -> Iterator[None]:
    """Make verl's Megatron engine, with this layout of two processes, the trainer in here."""
    from tests.adapters.verl09.megatron import conformance
    from tests.adapters.verl09.megatron.layouts import LAYOUTS

    conformance._layout.clear()
    conformance._layout.update(LAYOUTS[layout].settings)
    with mock.patch.object(verl_harness, "adapter", lambda: conformance):
        yield


def _tracker(place: str) -> list[str]:
    """Return settings of alerts that cannot be delivered."""
    notify = f"{_ACTOR}.gradloc.notify"
    if place == "a command that hangs":
        return [f"{notify}.command='sleep 600'", f"{notify}.timeout_s=5"]
    if place == "a client that raises":
        return []
    listening = socket.create_server(("127.0.0.1", 0))  # accepts the connection and never answers
    os.environ["GRADLOC_TEST_HOOK"] = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    if place == "a webhook that refuses":
        listening.close()
    else:
        listening.detach()
    return [f"{notify}.webhook=env:GRADLOC_TEST_HOOK", f"{notify}.timeout_s=5"]


# ---- the cases, and what became of them


def installed() -> list[str]:
    """Return the trainers that are installed."""
    has_trl = importlib.util.find_spec("trl") is not None
    kind = "verl 0.9" if is_engine() else "TRL" if has_trl else "verl 0.7"
    return [name for name in TRAINERS if name.startswith(kind)]


def world_of(trainer: str) -> World:
    """Return two ranks for this trainer."""
    if trainer.startswith("verl 0.7"):
        from lab.experiments.environment import ensure_patched_copy

        return World(2, path=(str(ensure_patched_copy(sys.executable)),))
    from lab.experiments.verl09 import ENVIRONMENT
    from tests.trainers import SETTINGS

    if trainer.startswith("verl 0.9"):
        os.environ.update(ENVIRONMENT)
    return World(2, **SETTINGS)


def cases_of(counts: list[dict[str, int]]) -> list[Fault]:
    """Return every case of a trainer, given how often its search reaches each place, by rank."""
    found: list[Fault] = []
    for at, place in enumerate(PLACES):
        most = [of_rank.get(place, 0) for of_rank in counts]
        if max(most) == 0:
            continue
        number, rank = (1, (max(most) + 1) // 2, max(most))[at % 3], at % 2 if min(most) else most.index(max(most))
        kinds = ("SIGTERM", "SIGKILL", "a rank stands still", "device memory", "host memory")
        found += [Fault(kind, place, number, rank) for kind in kinds]
        found += [Fault("device memory", place, number, None)] if min(most) else []
    for kind in ("device memory", "device memory, from here on"):
        for rank, of_rank in enumerate(counts):
            total = of_rank.get("allocation", 0)
            numbers = sorted({1 + total * part // 6 for part in range(6)} if total else ())
            found += [Fault(kind, "allocation", number, rank) for number in numbers]
    found += [Fault("host memory", place, number, rank) for place in COPIES for number in (1, 2) for rank in (0, 1)]
    for kind in ("full disk", "late file system"):
        found += [Fault(kind, place, 1, rank) for place in ("event's folder", "event's line") for rank in (0,)]
        found += [Fault(kind, "weights", 1, rank) for rank in (0, 1)]
    found.append(Fault("full disk", "the device is full"))
    trackers = ("a webhook that refuses", "a webhook that is silent", "a command that hangs", "a client that raises")
    found += [Fault("dead tracker", place) for place in trackers]
    found += [Fault("full disk", "safetensors"), Fault("late file system", "safetensors")]
    return [replace(each, mode="mask" if at // 2 % 2 else "observe") for at, each in enumerate(found)]


class Trial:
    """Run a trainer's cases on the same ranks, until one is lost."""

    def __init__(self, trainer: str, folder: Path, pause_s: float = PAUSE_S, patience_s: float = PATIENCE_S):
        self.trainer, self._folder, self._patience_s = trainer, folder, patience_s
        self._world, self._number, self._seconds = world_of(trainer), 0, {"pause_s": pause_s, "patience_s": patience_s}
        self.cases = cases_of([answer["counts"] for _, answer in self._run()])
        self._left: dict[tuple[bool, str], list[str]] = {}

    def outcome(self, fault: Fault) -> str:
        """Return the outcome in words, with BAD if it is not one of the two good ones; "" if nothing failed."""
        found = self._run(fault)
        happened, fates = Path(f"{self._last}/happened"), {fate for fate, _ in found}
        if happened.exists():
            seconds = time.monotonic() - float(happened.read_text())
        elif fault.place in PLACES | COPIES | SAVES | {"allocation": ()}:
            return ""
        if fates == {"went on"}:
            weights = self._weights(found)
            place = fault.place if fault.place in COPIES else ""
            plain, masked = self._reference(place, is_on=False), self._reference(place)
            failures = max(answer["failures"] for _, answer in found)
            if weights == plain:
                return "goes on, the step as it was" + (", and counts the failure" if failures else "")
            if weights == masked and fault.mode == "mask":
                return "goes on, the step without the token"
            return "BAD: goes on with other weights"
        if not happened.exists():
            return f"BAD: {'/'.join(fate for fate, _ in found)} with nothing that failed: {self._sentence(fault)}"
        if "hangs" in fates or seconds > LIMIT_S - (ranks._PATIENCE_S - self._patience_s):
            return f"BAD: {'/'.join(fate for fate, _ in found)} after {seconds:.0f} s"
        return f"all end, {self._sentence(fault)}"

    def _reference(self, place: str, is_on: bool = True) -> list[str]:
        """Return the result of a run without a fault: without gradloc, or of the step without the token."""
        if (is_on, place) not in self._left:
            self._left[is_on, place] = self._weights(self._run(Fault(place=place, number=0, mode="mask"), is_on))
        return self._left[is_on, place]

    def _run(self, fault: Fault = Fault(), is_on: bool = True) -> list[tuple[str, Any]]:  # noqa: B008 (frozen)
        self._number += 1
        self._last = str(self._folder / str(self._number))
        given = {"trainer": self.trainer, "folder": self._last, "fault": asdict(fault), "is_on": is_on, **self._seconds}
        timeout_s = 3 * LIMIT_S + self._seconds["pause_s"]
        found = self._world.outcomes("lab.benchmarks.faults.suffer", timeout_s=timeout_s, **given)
        if not fault.kind and {fate for fate, _ in found} != {"went on"}:
            raise RuntimeError(f"{self.trainer} does not train here:\n" + "\n".join(self._logs().values()))
        return found

    def _logs(self) -> dict[int, str]:
        paths = sorted(Path(self._last).glob("rank*.log"))
        return {int(path.stem[4:]): path.read_text(errors="replace") for path in paths}

    def _sentence(self, fault: Fault) -> str:
        """Describe which of the remaining processes gave a reason."""
        logs = [log for rank, log in self._logs().items() if not fault.kind.startswith("SIG") or rank != fault.rank]
        if any("gradloc: this rank cannot go on in step with its peers" in log for log in logs):
            return "with gradloc's sentence"
        return "with the trainer's own error" if any("Traceback" in log for log in logs) else "BAD: without a word"

    @staticmethod
    def _weights(found: list[tuple[str, Any]]) -> list[str]:
        return [answer["weights"] for _, answer in found]

    def close(self) -> None:
        self._world.close()


def markdown(record: Record) -> str:
    """Return a table of outcomes by kind of fault and trainer, with their places."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for key, outcome in sorted(record["outcomes"].items()):
        trainer, kind, place, *_ = key.split(" | ")
        groups.setdefault((kind, outcome), []).append((trainer, place))
    totals = Counter(trainer for group in groups.values() for trainer, _ in group)
    names, order = [name for name in TRAINERS if totals[name]], [*PLACES]
    rows: list[list[object]] = [["what fails", "the run", "where", *names]]
    explained: set[str] = set()
    for (kind, outcome), group in sorted(groups.items()):
        counts, found = Counter(trainer for trainer, _ in group), dict.fromkeys(place for _, place in group)
        in_order = sorted(found, key=lambda place: order.index(place) if place in PLACES else len(order))
        where = "everywhere" if PLACES.keys() <= found.keys() else ", ".join(in_order)
        what = kind if kind in explained else f"{kind}: {KINDS[kind]}"
        explained.add(kind)
        rows.append([what, outcome, where, *(counts[name] or "" for name in names)])
    rows.append(["", f"{totals.total()} cases", "", *(totals[name] for name in names)])
    return table(rows)


def _paused(fault: Fault, pause_s: float) -> Fault:
    """Return the case as named in the record, which states an unusual pause."""
    return fault if pause_s == PAUSE_S else replace(fault, kind=f"{fault.kind} for {pause_s:.0f} s")


def _drop_outdated(record: Record, trainer: str, core: str) -> None:
    """Drop a trainer's outcomes on another core than this: a record is of one core for each trainer."""
    if record["core_sha256"].get(trainer) != core:
        kept = {key: outcome for key, outcome in record["outcomes"].items() if not key.startswith(f"{trainer} | ")}
        record["outcomes"] = kept
        record["core_sha256"][trainer] = core


def main(arguments: list[str] | None = None) -> int:
    """Run the cases that are not in the record, and print the table; the exit code is 1 if an outcome is bad."""
    options = Parser("faults", __doc__)
    options.add_argument("--trainer", choices=TRAINERS, help="only this one")
    options.add_argument("--every", type=int, default=1, help="every Nth case (%(default)s)")
    options.add_argument("--kind", default="", help="kinds of fault that begin with this")
    options.add_argument("--pause", type=float, default=PAUSE_S, help="seconds of a stop (%(default)s)")
    options.add_argument("--table", action="store_true", help="print the record's table, and run nothing")
    parsed = options.parse_args(arguments)
    path = parsed.out / "faults.json"
    record: Record = json.loads(path.read_text()) if path.exists() else {"core_sha256": {}, "outcomes": {}}
    core = digest()
    for trainer in () if parsed.table else [parsed.trainer] if parsed.trainer else installed():
        with TemporaryDirectory() as folder:
            trial = Trial(trainer, Path(folder), parsed.pause)
            wanted = [each for each in trial.cases[:: parsed.every] if each.kind.startswith(parsed.kind)]
            keys = {each: f"{trainer} | {_paused(each, parsed.pause).key}" for each in wanted}
            _drop_outdated(record, trainer, core)
            todo = [each for each in wanted if keys[each] not in record["outcomes"]]
            for fault in tqdm(todo, trainer):
                if outcome := trial.outcome(fault):
                    record["outcomes"][keys[fault]] = outcome
                    write(record, parsed.out, "faults")
                tqdm.write(f"{fault.key}: {outcome or 'it did not come there'}", sys.stderr)
            trial.close()
    print(markdown(record))
    return int(any("BAD" in outcome for outcome in record["outcomes"].values()))


if __name__ == "__main__":
    sys.exit(main())
