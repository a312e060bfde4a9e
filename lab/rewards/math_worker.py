# SPDX-License-Identifier: Apache-2.0
"""A process that math_pool starts: compares one pair of answers at a time, until its pipe is closed.

Run as a file, ``python -I math_worker.py FD``, with one end of a socket as file descriptor FD. Messages are
JSON: the first names the import path, each later one an item; each gets one reply with a ``score`` or an ``error``.
Imports neither verl nor torch, so that it starts in the time that sympy takes.
"""

import json
import logging
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

# A worker whose parent was killed ends itself this long after its item's limit.
ORPHAN_GRACE_S = 1.0
# Power towers eat half a gigabyte in five seconds. Beyond this sympy gets a MemoryError, and the trainer's host lives.
MEMORY_BYTES = 4 * 2**30


def serve(connection: Connection) -> None:
    """A worker's life: it ends when its parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    # The default action of the alarm ends the process even inside one long call into C.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    sys.path[:] = json.loads(connection.recv_bytes())["sys_path"]
    try:
        compare = _load_math_verify()
    except Exception as error:
        connection.send_bytes(_reply(error=error))
        return
    connection.send_bytes(_reply())
    while True:
        request = json.loads(connection.recv_bytes())
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"] + ORPHAN_GRACE_S)
        try:
            reply = _reply(score=compare(request["gold"], request["answer"]))
        except Exception as error:
            reply = _reply(error=error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(reply)


def _limit_memory() -> None:
    if sys.platform == "linux":  # elsewhere the limit may be missing or refused
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        is_lower = hard != resource.RLIM_INFINITY and hard < MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (hard if is_lower else MEMORY_BYTES, hard))


def _reply(error: Exception | None = None, **content: float) -> bytes:
    if error is not None:
        content["error"] = f"{type(error).__name__}: {error}"[:500]
    return json.dumps(content).encode()


def _load_math_verify() -> Callable[[str, str], float]:
    """Imports Math-Verify and returns its ``math_metric`` without the alarms, tried on one item."""
    from math_verify import parse, verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its alarms are off
    _limit_memory()

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
