# SPDX-License-Identifier: Apache-2.0
"""Run Math-Verify in a few long-lived processes, every item under a time limit.

Math-Verify parses and simplifies what a language model wrote, and ``9^{9^{9^9}}`` keeps it busy for ever. Its own limit
is an alarm, which Python delivers to a main thread only, while verl scores in threads, asyncio executors, Ray actors
and daemonic processes. So a scorer sends each item to a worker over a pipe, and kills the worker when the time is up.

A worker is this file run as ``python -I math_pool.py FD``, a plain child process: daemonic ones may not have
``multiprocessing``'s, which also import the caller's main module, in verl torch. Messages are JSON: the first names the
import path, each later one an item; each gets one reply, with a ``score`` or an ``error``.
"""

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from queue import LifoQueue

logger = logging.getLogger(__file__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

# The second pin keeps the antlr runtime that Hydra 1.3 needs. Math-Verify's extra for it is ignored by pip 23.2.
INSTALL_COMMAND = "pip install math-verify==0.9.0 antlr4-python3-runtime==4.9.3"
TIMEOUT_S = 10.0
"""What Math-Verify itself grants in a main thread. Usual answers take milliseconds, hard integrals about a second."""
NUM_WORKERS = 4
"""Workers of each process that scores: 60 MB each, started when first needed."""
START_LIMIT_S = 120.0
"""A start is the import of sympy: 0.3 s, but much more from a cold network file system."""
ORPHAN_GRACE_S = 1.0
"""A worker whose parent was killed ends itself this long after its item's limit."""
MEMORY_BYTES = 4 * 2**30
"""Power towers eat half a gigabyte in five seconds. Beyond this limit sympy gets a MemoryError, and the host lives."""


class ScoringError(Exception):
    """An item that could not be scored: the worker died of it, or Math-Verify raised."""


class ScoringTimeout(ScoringError):
    """An item that took longer than its limit; its worker was killed."""


class Worker:
    """A process that scores one item at a time; the constructor returns when it is ready.

    Raises:
        ImportError: with the command that installs Math-Verify, if the worker cannot load it.
        RuntimeError: if the process ends, or sends nothing for ``START_LIMIT_S``, before it is ready.
    """

    def __init__(self):
        self._connection, theirs = Pipe()
        with theirs:
            # -I keeps this folder off the worker's path, where math_verify.py would hide the package of that name.
            command = [sys.executable, "-I", os.path.abspath(__file__), str(theirs.fileno())]
            silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], **silent)
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
        """Return the worker's reply to one request.

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
            # A KeyboardInterrupt, too, may cut the wait: the reply would be taken for the next item's.
            self.kill()
            raise

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Pool:
    """Up to ``num_workers`` processes, started when first needed, kept, and replaced when they die.

    Any number of threads may call ``score``; those beyond ``num_workers`` wait for a free worker.

    Attributes:
        counts: items so far, by outcome: ``scored``, ``timeouts``, ``errors``.
        workers: the process of each place, dead or alive; None before the place was needed.
    """

    def __init__(self, num_workers: int):
        self.counts = Counter(scored=0, timeouts=0, errors=0)
        self.workers: list[Worker | None] = [None] * num_workers
        self._lock = threading.Lock()  # guards counts
        self._free: LifoQueue[int] = LifoQueue()  # the place that was used last comes first
        for place in range(num_workers):
            self._free.put(place)

    def score(self, gold: str, answer: str, limit_s: float) -> float:
        """Return 1.0 if the last answer in ``answer`` equals the one in ``gold``, else 0.0.

        Args:
            gold: a text whose answer Math-Verify can find, such as ``\\boxed{1/2}``.
            answer: what the model wrote.
            limit_s: seconds that the worker may take, from when it begins.

        Raises:
            ScoringTimeout: if it takes longer.
            ScoringError: if the worker dies of the item, or Math-Verify raises.
            ImportError, RuntimeError: if no worker can be started, see ``Worker``.
        """
        place = self._free.get()
        try:
            worker = self.workers[place]
            if worker is None or not worker.is_alive():  # killed from outside while it was idle: no item's fault
                worker = self.workers[place] = Worker()
            reply = worker.ask({"gold": gold, "answer": answer, "limit_s": limit_s}, limit_s)
            if "error" in reply:
                raise ScoringError(reply["error"])
        except ScoringError as error:
            self._count("timeouts" if isinstance(error, ScoringTimeout) else "errors", error, answer)
            raise
        finally:
            self._free.put(place)
        self._count("scored")
        return float(reply["score"])

    def _count(self, kind: str, error: Exception | None = None, answer: str = "") -> None:
        with self._lock:
            self.counts[kind] += 1
            count, total = self.counts[kind], sum(self.counts.values())
        if error and count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...: a bad data set must not flood the log
            text = "math_verify: %s (%s so far: %d of %d items); the answer ends in %r"
            logger.warning(text, error, kind, count, total, answer[-100:])


_pool: Pool | None = None
_pool_lock = threading.Lock()


def score(gold: str, answer: str, limit_s: float = TIMEOUT_S) -> float:
    """Call ``Pool.score`` with this process's pool."""
    return _shared_pool().score(gold, answer, limit_s)


def counts() -> dict[str, int]:
    """Return this process's items so far: ``scored``, ``timeouts`` and ``errors``."""
    return dict(_shared_pool().counts)


def close() -> None:
    """End this process's workers. The next item starts new ones, with new counts."""
    global _pool
    with _pool_lock:
        pool, _pool = _pool, None
    for worker in filter(None, pool.workers if pool else ()):
        worker.kill()  # items that are under way fail


def _shared_pool() -> Pool:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = Pool(NUM_WORKERS)
        return _pool


def _start_afresh_after_fork() -> None:
    """Forget the workers, which answer to the parent; the child's ends of their pipes close with the objects."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


# ---- in a worker


def serve(connection: Connection) -> None:
    """Compare answers until the parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    # The default action of the alarm ends the process even inside one long call into C.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    compare, request = None, json.loads(connection.recv_bytes())
    sys.path[:] = request["sys_path"]
    while True:
        try:
            if compare is None:
                compare, reply = _load_math_verify(), {}
            else:
                reply = {"score": compare(request["gold"], request["answer"])}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(json.dumps(reply).encode())
        request = json.loads(connection.recv_bytes())
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"] + ORPHAN_GRACE_S)


def _load_math_verify() -> Callable[[str, str], float]:
    """Import Math-Verify and return its ``math_metric`` without the alarms, tried on one item."""
    import resource

    from math_verify import parse, verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its alarms are off
    if sys.platform == "linux":  # elsewhere the limit may be missing or refused
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        least = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (least, least))

    def compare(gold: str, answer: str) -> float:
        golds = parse(gold, (LatexExtractionConfig(),), parsing_timeout=None)
        if not golds:
            raise ValueError("no answer could be read from the ground truth")
        answers = parse(answer, (ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=None)
        # Each list holds an expression and the text it came from, and only like is compared with like. Texts first:
        # they cannot hang, and two equal power towers need no arithmetic.
        for is_text in (True, False):
            ours, theirs = ([x for x in side if isinstance(x, str) == is_text] for side in (golds, answers))
            if verify(ours, theirs, 6, timeout_seconds=None):
                return 1.0
        return 0.0

    # Loads the grammar outside any item's time. And Math-Verify swallows what goes wrong in a parse: without this look
    # a broken installation would score 0 for every answer.
    if compare(r"\boxed{\frac{1}{2}}", "$0.5$") != 1.0:
        raise ImportError("it does not find 1/2 equal to 0.5, so the installation is broken")
    return compare


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as pipe:
        try:
            serve(pipe)
        except (EOFError, ConnectionError):
            pass
else:
    atexit.register(close)
    os.register_at_fork(after_in_child=_start_afresh_after_fork)
