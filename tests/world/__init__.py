# SPDX-License-Identifier: Apache-2.0
"""Ranks of a process group that stay up and call functions together.

Importing torch and verl costs seconds, an update of a tiny actor a fraction of one. So the processes
of a world are started once; each call names a function, every rank calls it, and the results come
back by rank. Needs torch alone: the tests and the benchmarks use it.
"""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.world.settings import Unsupported

REPO = Path(__file__).resolve().parents[2]
DEVICE = os.environ.get("GRADLOC_TEST_DEVICE", "cpu")
"""Where the tests' models compute; ``cuda``: on one GPU that all ranks share."""
SHARDING = "fsdp2" if DEVICE == "cpu" else "fsdp"
"""verl's strategy for them: where ranks share a GPU by gloo, FSDP2's reduce-scatter ends the process (torch 2.11)."""
# Ranks are forked from a process that has these, where they are installed: importing them is most of a start.
PRELOADED: tuple[str, ...] = ("datasets", "hydra", "peft", "ray", "tensordict", "torchdata", "transformers")
PRELOADED += ("transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3")


def trainer_folder() -> str:
    """Return the name of the folder in tests/adapters of the trainer under test.

    GRADLOC_TEST_TRAINER names one that no environment of ours has. verl 0.7 is not installed, but a patched copy.
    """
    if name := os.environ.get("GRADLOC_TEST_TRAINER"):
        return name
    if find_spec("trl"):
        return "trl"
    try:
        return "verl09" if version("verl").startswith("0.9.") else "verl07"
    except PackageNotFoundError:
        return "verl07"


class RankError(AssertionError):
    """A function raised on some rank, or a rank was lost; carries the tracebacks as text."""


class World:
    """``size`` processes, one rank each, started by the first call.

    Args:
        size: number of ranks.
        device: ``cpu`` (gloo) or ``cuda``: NCCL, or gloo where ranks share a device.
        path: folders to put on ``sys.path`` of the ranks, after this repository: verl's archive has
            a ``tests`` of its own.
        timeout_s: how long a call may take, unless it says otherwise.
        preloaded: modules to import once for all worlds of this process, beside torch; the first that starts decides.
    """

    def __init__(
        self,
        size: int,
        device: str = DEVICE,
        path: tuple[str, ...] = (),
        timeout_s: float = 120,
        preloaded: tuple[str, ...] = PRELOADED,
    ):
        self.size = size
        self._preloaded = ["torch", "torch.distributed.fsdp", *preloaded]
        self._settings = (device, path)
        self._timeout_s = timeout_s
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, function: str, *, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call ``<module>.<name>(**kwargs)`` on every rank at once; ``spikes.train`` is tests.world's.

        Returns:
            Each rank's return value.

        Raises:
            Unsupported: the trainer has not what the function asks for; the test is skipped.
            RankError: when a rank raised, died, or did not answer within ``timeout_s``. After the
                latter two the ranks are ended, and the next call starts new ones.
        """
        self._call(function, kwargs)
        limit = timeout_s or self._timeout_s
        answers, errors, unsupported = [], [], None
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(limit):
                    raise TimeoutError(f"did not answer within {limit} s")
                is_ok, answer = pipe.recv()
            except (EOFError, OSError) as error:
                self._processes[rank].join(1.0)
                ended = self._processes[rank].exitcode
                self.close()
                errors.append(f"rank {rank} was lost in {function}: {error!r}, exit code {ended}")
                raise RankError("\n".join(errors)) from error
            answers.append(answer)
            if isinstance(answer, Unsupported):
                unsupported = answer
            elif not is_ok:
                errors.append(f"rank {rank}:\n{answer}")
        if errors:
            raise RankError("\n".join(errors))
        if unsupported is not None:
            raise unsupported
        return answers

    def outcomes(self, function: str, *, timeout_s: float, **kwargs: Any) -> list[tuple[str, Any]]:
        """Call what may end a rank; each one's fate (``ended``, ``raised``, ``went on`` or ``hangs``) and its answer.

        Where not all went on, the ranks are ended, and the next call starts new ones.
        """
        self._call(function, kwargs)
        deadline = time.monotonic() + timeout_s
        found: list[tuple[str, Any]] = []
        for pipe in self._pipes:
            try:
                if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
                    found.append(("hangs", None))
                    continue
                is_ok, answer = pipe.recv()
                if isinstance(answer, Unsupported):
                    raise answer
                found.append(("went on" if is_ok else "raised", answer))
            except (EOFError, OSError):
                found.append(("ended", None))
        if any(fate != "went on" for fate, _ in found):
            self.close()
        return found

    def close(self) -> None:
        """End the ranks; the next call starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, function: str, kwargs: dict[str, Any]) -> None:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, kwargs))

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(self._preloaded)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, port, *self._settings, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that a rank's end is seen at once
            self._pipes.append(ours)
            self._processes.append(process)


def _serve(rank: int, size: int, port: int, device: str, path: tuple[str, ...], pipe: Connection) -> None:
    sys.pycache_prefix = str(REPO / ".gradloc" / "pycache")  # other tests compare the trees byte for byte
    sys.path[:0] = [str(REPO), *path]
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank)
    )
    faulthandler.enable()  # a rank that a signal ends says where it stood
    import torch

    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        devices = torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(rank % devices)
        torch.cuda.set_device(rank % devices)
        backend = "cpu:gloo,cuda:nccl" if size <= devices else "cpu:gloo,cuda:gloo"
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.distributed.init_process_group(backend, rank=rank, world_size=size)
    # A search may take four updates' time, at least eight seconds. On a busy machine it ended there, without its last
    # pass: what is held here is passes. The limit on time has tests of its own.
    importlib.import_module("gradloc.search.limit")._LEAST_SECONDS = 60.0
    is_frozen = False
    while True:
        try:
            function, kwargs = pipe.recv()
        except EOFError:
            return
        module, name = function.rsplit(".", 1)
        module = module if "." in module else f"tests.world.{module}"
        try:
            answer = getattr(importlib.import_module(module), name)(**kwargs)
            if not is_frozen:  # the first call has imported it all: later collections need not walk that
                gc.collect()
                gc.freeze()
                is_frozen = True
            pipe.send((True, answer))
        except Unsupported as why:
            pipe.send((False, why))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
