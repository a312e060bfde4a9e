# SPDX-License-Identifier: Apache-2.0
"""Math-Verify in a few long-lived processes of its own, every item under a time limit.

Math-Verify parses and simplifies what a language model wrote, and ``9^{9^{9^9}}`` keeps it busy for ever. Its own time
limit is an alarm signal, which Python delivers to the main thread only, while verl scores in threads, asyncio
executors, Ray actors and daemonic processes. So the work is done elsewhere: whoever scores talks over a pipe to a
worker process and kills it when its time is up. The item then fails, and no other does.

The workers are plain child processes running math_worker.py, not ``multiprocessing`` ones: daemonic processes
may not have those, and those import the caller's main module, which in verl means torch and seconds. Math-Verify is
imported in the workers only.

Environment:
    VERL_MATH_VERIFY_TIMEOUT_S: seconds that one item may take, 10 unless set. The time spent waiting for a free worker
        does not count.
    VERL_MATH_VERIFY_WORKERS: worker processes for each process that scores, 4 unless set; about 60 MB each, started
        when first needed.
"""

import atexit
import json
import logging
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Pipe
from pathlib import Path
from queue import LifoQueue

__all__ = ["INSTALL_COMMAND", "Pool", "ScoringError", "ScoringTimeout", "close", "counts", "score"]

logger = logging.getLogger(__file__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

# The second pin keeps the antlr runtime that Hydra 1.3 needs. Math-Verify's extra for it is ignored by pip 23.2.
INSTALL_COMMAND = "pip install math-verify==0.9.0 antlr4-python3-runtime==4.9.3"

WORKER_FILE = Path(__file__).resolve().with_name("math_worker.py")
# What Math-Verify itself grants in a main thread: 5 s to parse an answer and 5 s for a comparison. Usual answers take
# milliseconds, hard integrals about one second.
DEFAULT_TIMEOUT_S = 10.0
# One or two hanging answers leave workers over for the rest.
DEFAULT_NUM_WORKERS = 4
# A start is the import of sympy: 0.3 s, but much more from a cold network file system.
START_LIMIT_S = 120.0


class ScoringError(Exception):
    """An item that could not be scored: the worker died of it, or Math-Verify raised."""


class ScoringTimeout(ScoringError):
    """An item that took longer than its limit; its worker was killed."""


class Worker:
    """One process that scores one item at a time; the constructor returns when it is ready.

    Raises:
        ImportError: with the command that installs Math-Verify, if the worker cannot load it.
        RuntimeError: if the process ends, or says nothing for ``START_LIMIT_S``, before it is ready.
    """

    def __init__(self):
        self._connection, theirs = Pipe()
        with theirs:
            # -I keeps this folder off the worker's path, where math_verify.py would hide the package of that name.
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(WORKER_FILE), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        try:
            reply = self.ask({"sys_path": sys.path}, START_LIMIT_S)
        except ScoringError as error:
            raise RuntimeError(f"a Math-Verify worker did not start: {error}") from error
        if "error" in reply:
            self.kill()
            raise ImportError(
                f"lab.rewards.math_verify needs the package math-verify, which could not be loaded "
                f"({reply['error']}): run `{INSTALL_COMMAND}`."
            )

    def ask(self, request: dict, limit_s: float) -> dict:
        """Returns the worker's reply to one request.

        Raises:
            ScoringTimeout: if there is none within ``limit_s`` seconds; the worker is killed.
            ScoringError: if the worker dies before it replies.
        """
        try:
            self._connection.send_bytes(json.dumps(request).encode())
            if self._connection.poll(limit_s):
                return json.loads(self._connection.recv_bytes())
            raise ScoringTimeout(f"no answer within {limit_s:g} s")
        except (EOFError, OSError) as error:
            self.kill()
            raise ScoringError(f"the worker died, exit code {self._process.returncode}") from error
        except BaseException:
            # Also when a KeyboardInterrupt cut the wait: the reply would be taken for the next item's.
            self.kill()
            raise

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Closes this process's end of the pipe: a worker that no other process holds ends by itself."""
        self._connection.close()


class Pool:
    """Up to ``num_workers`` processes, started when first needed, kept, and replaced when they die.

    Any number of threads may call ``score``; those beyond ``num_workers`` wait for a free worker.

    Attributes:
        counts: items so far, by outcome: ``scored``, ``timeouts``, ``errors``.
        workers: the process of each place, dead or alive; None before the place was needed.
    """

    def __init__(self, num_workers: int):
        self.counts: Counter = Counter(scored=0, timeouts=0, errors=0)
        self.workers: list[Worker | None] = [None] * num_workers
        self._lock = threading.Lock()  # guards counts
        self._free: LifoQueue[int] = LifoQueue()  # the place that was used last comes first
        for place in range(num_workers):
            self._free.put(place)

    def score(self, gold: str, answer: str, limit_s: float) -> float:
        """Returns 1.0 if the last answer in ``answer`` equals the one in ``gold``, else 0.0.

        Args:
            gold: a text whose answer Math-Verify can find, such as ``\\boxed{1/2}``.
            answer: what the model wrote.
            limit_s: seconds the worker may take, from when it begins.

        Raises:
            ScoringTimeout: if it takes longer.
            ScoringError: if the worker dies of the item, or Math-Verify raises.
            ImportError, RuntimeError: if no worker can be started, see ``Worker``.
        """
        try:
            place = self._free.get()
            try:
                worker = self.workers[place]
                if worker is None or not worker.is_alive():  # killed from outside while it was idle: no item's fault
                    worker = self.workers[place] = Worker()
                reply = worker.ask({"gold": gold, "answer": answer, "limit_s": limit_s}, limit_s)
            finally:
                self._free.put(place)
            if "error" in reply:
                raise ScoringError(reply["error"])
        except ScoringError as error:
            self._count_failure(error, answer)
            raise
        with self._lock:
            self.counts["scored"] += 1
        return float(reply["score"])

    def _count_failure(self, error: ScoringError, answer: str) -> None:
        kind = "timeouts" if isinstance(error, ScoringTimeout) else "errors"
        with self._lock:
            self.counts[kind] += 1
            count, total = self.counts[kind], sum(self.counts.values())
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...: a bad data set must not flood the log
            text = "math_verify: %s (%s so far: %d of %d items); the answer ends in %r"
            logger.warning(text, error, kind, count, total, answer[-100:])


_pool: Pool | None = None
_pool_lock = threading.Lock()


def score(gold: str, answer: str, limit_s: float | None = None) -> float:
    """``Pool.score`` with this process's pool; ``limit_s=None`` is the environment's limit."""
    if limit_s is None:
        limit_s = _positive("VERL_MATH_VERIFY_TIMEOUT_S", float, DEFAULT_TIMEOUT_S)
    return _shared_pool().score(gold, answer, limit_s)


def counts() -> dict[str, int]:
    """Return this process's items so far: ``scored``, ``timeouts`` and ``errors``."""
    return dict(_shared_pool().counts)


def close() -> None:
    """Ends this process's workers. The next item starts new ones, with new counts."""
    global _pool
    with _pool_lock:
        pool, _pool = _pool, None
    if pool is not None:
        for worker in filter(None, pool.workers):
            worker.kill()  # items that are under way fail


def _shared_pool() -> Pool:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = Pool(_positive("VERL_MATH_VERIFY_WORKERS", int, DEFAULT_NUM_WORKERS))
        return _pool


def _positive(variable: str, convert: Callable, default: float):
    text = os.getenv(variable)
    if text is None:
        return default
    try:
        value = convert(text)
    except ValueError:
        value = 0
    if not value > 0:
        raise ValueError(f"{variable} must be a positive {convert.__name__}, got {text!r}")
    return value


def _start_afresh_after_fork() -> None:
    # The workers answer to the parent. Holding on to their pipes would also keep them up after the parent's death.
    global _pool, _pool_lock
    _pool_lock = threading.Lock()
    if _pool is not None:
        for worker in filter(None, _pool.workers):
            worker.close()
        _pool = None


atexit.register(close)
os.register_at_fork(after_in_child=_start_afresh_after_fork)
