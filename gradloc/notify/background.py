# SPDX-License-Identifier: Apache-2.0
"""Run slow jobs in a thread, so that training does not wait for them."""

import atexit
import logging
import queue
import threading
from collections.abc import Callable
from contextvars import copy_context

logger = logging.getLogger(__name__)


def error_text(error: BaseException) -> str:
    """Format an error as one short line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


class Background:
    """Runs jobs one after the other in a daemon thread; a job that does not fit into the queue is dropped.

    Args:
        name: of the thread.
        patience_s: seconds that the interpreter's exit waits for jobs.
        size: jobs that may wait.
    """

    def __init__(self, name: str, patience_s: float, size: int = 16):
        self.name, self.patience_s = name, patience_s
        self._jobs: queue.Queue = queue.Queue(size)
        self._thread: threading.Thread | None = None

    def submit(self, what: str, job: Callable[[], None]) -> None:
        """Queue a job; an error in it, or a full queue, is one line in the log.

        Args:
            what: the job's name in that line.
            job: called with the current context variables.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            self._thread.start()
            atexit.register(self.finish)
        context = copy_context()
        try:
            self._jobs.put_nowait((what, lambda: context.run(job)))
        except queue.Full:
            logger.error(
                "gradloc: %s is left out: %d earlier ones still wait; training goes on", what, self._jobs.maxsize
            )

    def finish(self) -> None:
        """Wait until every job is done, for ``patience_s`` at most."""
        jobs = self._jobs
        with jobs.all_tasks_done:
            jobs.all_tasks_done.wait_for(lambda: not jobs.unfinished_tasks, self.patience_s)

    def _work(self) -> None:
        while True:
            what, job = self._jobs.get()
            try:
                job()
            except Exception as error:
                logger.error("gradloc: %s failed (%s); training goes on", what, error_text(error))
            finally:
                self._jobs.task_done()
