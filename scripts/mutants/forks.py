# SPDX-License-Identifier: Apache-2.0
"""Run pytest in forks of one process with torch, each in a copy of the repository that its subprocesses also use."""

import contextlib
import json
import mmap
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest

LEFT_OUT = ("slow", "browser", "e2e", "verl09")
NEED_VERL = {"worlds", "doomed", "verl", "reward_score", "patched_trees", "base_tree"}
"""Fixtures of tests on a patched verl, whose sources are not mutated."""
OUTPUT = ".output.txt"
"""File for pytest's output, in the copy."""
RANKS_SECONDS = 2.0
"""Factor for the time of ranks, since only a test's own processor time is known."""


def copied(root: Path, folder: Path) -> Path:
    """Copy the working tree into ``folder``, without ignored files."""
    shutil.rmtree(folder, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    (folder / ".gradloc").symlink_to(root / ".gradloc")
    return folder


_HERE: Path
"""A worker's copy of the repository."""


def in_copies(folders: list[Path], work: Callable[..., Any], jobs: list[tuple[Any, ...]]) -> Iterator[Any]:
    """Yield the results of ``work(folder, *job)`` as they arrive; each folder has one process."""
    context = multiprocessing.get_context("fork")
    free = context.SimpleQueue()
    for folder in folders:
        free.put(folder)
    workers = ProcessPoolExecutor(len(folders), context, _take_folder, (free,))
    try:
        for done in as_completed([workers.submit(_work_here, work, *job) for job in jobs]):
            yield done.result()
    finally:
        workers.shutdown(cancel_futures=True)


def _take_folder(free: Any) -> None:
    """Make one of the free folders this worker's own."""
    global _HERE
    _HERE = free.get()


def _work_here(work: Callable[..., Any], *job: Any) -> Any:
    return work(_HERE, *job)


def run_tests(folder: Path, files: list[str], plugin: Any, seconds: float) -> dict[str, Any]:
    """Run pytest in a fork; return its ``code`` and the plugin's ``result``, or {} if it timed out or died.

    Args:
        folder: a copy of the repository.
        files: test files and options.
        plugin: a pytest plugin with a ``result``.
        seconds: limit of processor time; wall time may be sixty times that on a busy machine.
    """
    result, ends = folder / ".result.json", time.monotonic() + 60 * seconds
    result.unlink(missing_ok=True)
    pid = os.fork()
    if not pid:
        try:
            _prepare_fork(folder, int(seconds))
            code = pytest.main(_OPTIONS + files, plugins=[plugin])
            result.write_text(json.dumps({"code": int(code), "result": plugin.result}))
        finally:
            os._exit(0)
    try:
        while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < ends:
            time.sleep(0.05)
    finally:
        for end in (os.killpg, os.kill):  # with its ranks; only itself if it has no group yet
            with contextlib.suppress(ProcessLookupError):
                end(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return json.loads(result.read_text()) if result.exists() else {}


_OPTIONS = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]


def _prepare_fork(folder: Path, seconds: int) -> None:
    """Move this fork into the copy, its output into a file, and itself into a process group with a time limit."""
    os.setsid()
    os.chdir(folder)
    sys.path[0] = os.environ["PYTHONPATH"] = str(folder)
    output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    context = multiprocessing.get_context  # ranks are forked as well, since they have torch
    multiprocessing.get_context = lambda method=None: context("fork" if method == "forkserver" else method)


class Chosen:
    """Run only these tests, in this order; the result is the first that failed."""

    def __init__(self, names: list[str]):
        self._order = {name: index for index, name in enumerate(names)}
        self.result: str | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._order]
        items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.result = report.nodeid


class Traced:
    """Trace tests; the result has each passing test's seconds, and file -> lines that it or its ranks reach.

    Args:
        folder: pytest's copy of the repository.
        lengths: file -> number of lines.
    """

    def __init__(self, folder: Path, lengths: dict[str, int]):
        self.result: dict[str, tuple[float, dict[str, list[int]]]] = {}
        self._folder = folder
        # ranks write into these as well
        self._hits = {str(folder / name): mmap.mmap(-1, length + 1) for name, length in lengths.items()}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = filter(self._is_quick, items)

    @staticmethod
    def _is_quick(item: Any) -> bool:
        # patchkit's longer tests start processes, except for those of test_faults.py
        is_of_patchkit = "patchkit" in item.path.parts and item.path.name != "test_faults.py"
        starts_processes = is_of_patchkit and item.get_closest_marker("full")
        needs_verl = NEED_VERL & {*getattr(item, "fixturenames", ())}
        return not (starts_processes or needs_verl or any(map(item.get_closest_marker, LEFT_OUT)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        for hits in self._hits.values():
            hits[:] = bytes(len(hits))
        self._failed, began = False, time.process_time()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            seconds = time.process_time() - began + RANKS_SECONDS * ("bare_world" in item.fixturenames)
            if not self._failed:
                self.result[item.nodeid] = round(seconds, 3), self._lines()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= not report.passed

    def _lines(self) -> dict[str, list[int]]:
        found = {path: [line for line, is_hit in enumerate(hits[:]) if is_hit] for path, hits in self._hits.items()}
        return {Path(path).relative_to(self._folder).as_posix(): lines for path, lines in found.items() if lines}

    def _trace(self, frame: Any, event: str, _: Any) -> Callable[..., Any] | None:
        hits = self._hits.get(frame.f_code.co_filename)
        if hits is None:
            return None

        def line(frame: Any, event: str, _: Any) -> Callable[..., Any]:
            hits[frame.f_lineno] = 1
            return line

        return line(frame, event, None)
