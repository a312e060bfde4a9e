# SPDX-License-Identifier: Apache-2.0
"""A few gloo processes that stay up and run scenario functions together.

Importing torch and verl costs seconds, an update of the tiny actor a fraction of one. So the
processes of a world are started once per test session; each test names a function, every rank calls
it, and the results come back by rank.
"""

import importlib
import multiprocessing
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]


class RankError(AssertionError):
    """A scenario raised on some rank; carries the traceback as text."""


class World:
    """``size`` processes, one gloo rank each, on the patched verl tree.

    Args:
        size: number of ranks.
        verl_tree: the folder that holds the ``verl`` package to test.
    """

    def __init__(self, size: int, verl_tree: Path):
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, str(verl_tree), theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: str, timeout_s: float = 120, **kwargs: Any) -> list[Any]:
        """Call ``tests.gradloc.<module>.<name>(**kwargs)`` on every rank at once.

        A name of more parts, ``tests.analysis.<module>.<name>``, is taken as it is.

        Returns:
            Each rank's return value.

        Raises:
            RankError: with the tracebacks, or when a rank does not answer in time.
        """
        for pipe in self._pipes:
            pipe.send((function, kwargs))
        answers, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout_s):
                self.close()
                raise RankError(f"rank {rank} did not answer {function} within {timeout_s} s")
            is_ok, answer = pipe.recv()
            answers.append(answer)
            if not is_ok:
                errors.append(f"rank {rank}:\n{answer}")
        if errors:
            raise RankError("\n".join(errors))
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, size: int, port: int, verl_tree: str, pipe) -> None:
    sys.dont_write_bytecode = True  # other tests compare these trees byte for byte
    sys.path[:0] = [verl_tree, str(REPO)]
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
    )
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    while True:
        try:
            function, kwargs = pipe.recv()
        except EOFError:
            return
        module, name = function.rsplit(".", 1)
        try:
            pipe.send((True, getattr(importlib.import_module(_in_tests(module)), name)(**kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _in_tests(module: str) -> str:
    return module if "." in module else f"tests.gradloc.{module}"
