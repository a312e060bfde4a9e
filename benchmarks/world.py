# SPDX-License-Identifier: Apache-2.0
"""Ranks that stay up: processes which call a function of this repository together.

Starting torch costs seconds, a benchmark's cell often less; so ranks are started once.
"""

import importlib
import multiprocessing
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 1800


class RankError(RuntimeError):
    """A rank failed or did not answer; carries the tracebacks as text."""


class World:
    """``size`` ranks of one process group.

    Args:
        size: number of processes.
        device: ``cpu`` (gloo) or ``cuda`` (NCCL, one device per rank).
        path: folders to put first on ``sys.path`` of the ranks.
        threads: of torch, per rank.
    """

    def __init__(self, size: int, device: str = "cpu", path: tuple[str, ...] = (), threads: int = 1):
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.size = size
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, port, device, path, threads, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: str, **kwargs: Any) -> list[Any]:
        """Call ``<module>.<name>(**kwargs)`` on every rank at once; returns their answers.

        Raises:
            RankError: when a rank raised, died or did not answer in time.
        """
        for pipe in self._pipes:
            pipe.send((function, kwargs))
        answers, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(_TIMEOUT_S):
                    raise RankError(f"rank {rank} did not answer {function} within {_TIMEOUT_S} s")
                is_ok, answer = pipe.recv()
            except (EOFError, RankError) as error:
                self.close()
                raise RankError(f"rank {rank} was lost in {function}: {error!r}") from error
            answers.append(answer)
            if not is_ok:
                errors.append(f"rank {rank}:\n{answer}")
        if errors:
            self.close()
            raise RankError("\n".join(errors))
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _serve(rank, size, port, device, path, threads, pipe) -> None:
    sys.path[:0] = [str(REPO), *path]  # verl's archive has a "tests" of its own
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
    )
    import torch

    torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=size)
    while True:
        try:
            function, kwargs = pipe.recv()
        except EOFError:
            return
        module, name = function.rsplit(".", 1)
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(**kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
