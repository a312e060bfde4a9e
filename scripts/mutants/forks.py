# SPDX-License-Identifier: Apache-2.0
"""Pytest in forks of one process that has torch, each in a copy of the repository, which its subprocesses see, too."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LEFT_OUT = ("slow", "browser", "e2e", "verl09")
NEED_VERL = {"worlds", "doomed", "verl", "reward_score", "patched_trees", "base_tree"}
"""Fixtures: in a patched verl the sources are as they were when it was patched."""
OUTPUT = ".output.txt"
"""What pytest said, in the copy that it ran in."""
RANKS_SECONDS = 2.0
"""What ranks add to a test, whose own processor time alone is known."""


def copied(root: Path, folder: Path) -> Path:
    """A fresh copy of the working tree in ``folder``; what git ignores is left out."""
    shutil.rmtree(folder, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    (folder / ".gradloc").symlink_to(root / ".gradloc")
    return folder


class Fork:
    """Runs pytest in a fork.

    Args:
        folder: a copy of the repository.
        files: of tests, and options.
        plugin: has a ``result`` that is kept.
        seconds: of processor time. On the clock it may take sixty times that: the machine may be busy.
    """

    def __init__(self, folder: Path, files: list[str], plugin: Any, seconds: float):
        self._ends = time.monotonic() + 60 * seconds
        self._folder, self._result = folder, folder / ".result.json"
        self._result.unlink(missing_ok=True)
        self._pid = os.fork()
        if not self._pid:
            try:
                self._run(files, plugin, int(seconds))
            finally:
                os._exit(1)

    def ended(self) -> dict[str, Any] | None:
        """None while it runs; pytest's ``code`` and the plugin's ``result``; {} where it took too long or died."""
        pid, _ = os.waitpid(self._pid, os.WNOHANG)
        if not pid and time.monotonic() < self._ends:
            return None
        self.kill(is_running=not pid)
        return json.loads(self._result.read_text()) if self._result.exists() else {}

    def kill(self, is_running: bool = True) -> None:
        """End it and its ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        if is_running:
            os.kill(self._pid, signal.SIGKILL)  # where it has no group yet
            os.waitpid(self._pid, 0)

    def _run(self, files: list[str], plugin: Any, seconds: int) -> None:
        os.setsid()
        os.chdir(self._folder)
        sys.path[0] = os.environ["PYTHONPATH"] = str(self._folder)
        output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        context = multiprocessing.get_context  # ranks are forked, too: they have torch
        multiprocessing.get_context = lambda method=None: context("fork" if method == "forkserver" else method)
        options = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
        code = pytest.main([*options, *files], plugins=[plugin])
        self._result.write_text(json.dumps({"code": int(code), "result": plugin.result}))
        os._exit(0)


UNTRIED = {"code": None}
Job = tuple[list[Callable[[Path], Fork]], Callable[[dict[str, Any], Path], None]]
"""Forks that follow each other until one ends badly, and what is told of the last one; UNTRIED where there is none."""


def run_all(jobs: list[Job], folders: list[Path]) -> None:
    """Run the jobs in their order, in each folder one at a time; where this is stopped, the forks are."""
    rest = list(reversed(jobs))
    busy: dict[Path, tuple[Job, int, Fork]] = {}
    try:
        while rest or busy:
            for folder in folders:
                if folder in busy:
                    _look_after(busy, folder)
                elif rest:
                    job = rest.pop()
                    if job[0]:
                        busy[folder] = (job, 0, job[0][0](folder))
                    else:
                        job[1](UNTRIED, folder)
            time.sleep(0.1)
    finally:
        for _, _, fork in busy.values():
            fork.kill()


def _look_after(busy: dict[Path, tuple[Job, int, Fork]], folder: Path) -> None:
    (starts, tell), number, fork = busy[folder]
    ended = fork.ended()
    if ended is None:
        return
    if ended.get("code") == 0 and number + 1 < len(starts):
        busy[folder] = ((starts, tell), number + 1, starts[number + 1](folder))
    else:
        del busy[folder]
        tell(ended, folder)


class Chosen:
    """Runs these tests alone, in this order. Its result: the first that failed."""

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
    """Its result: for each test that passes, its seconds, and the lines that it or its ranks reach, by file.

    Args:
        folder: the copy that pytest runs in.
        lengths: of the files, in lines.
    """

    def __init__(self, folder: Path, lengths: dict[str, int]):
        self.result: dict[str, tuple[float, dict[str, list[int]]]] = {}
        self._starts, total = {}, 0
        for name, length in lengths.items():
            self._starts[str(folder / name)] = (name, total)
            total += length + 1
        self._hits = mmap.mmap(-1, total)  # ranks write into it, too

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = filter(self._is_quick, items)

    @staticmethod
    def _is_quick(item: Any) -> bool:
        in_process = item.path.name == "test_faults.py"
        starts_processes = item.get_closest_marker("full") and "patchkit" in item.path.parts and not in_process
        needs_verl = NEED_VERL & {*getattr(item, "fixturenames", ())}
        return not (starts_processes or needs_verl or any(map(item.get_closest_marker, LEFT_OUT)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._hits[:] = bytes(len(self._hits))
        self._failed, began = False, time.process_time()
        threading.settrace(self._call)
        sys.settrace(self._call)
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
        found: dict[str, list[int]] = {}
        ends = [start for _, start in self._starts.values()][1:] + [len(self._hits)]
        for (name, start), end in zip(self._starts.values(), ends, strict=True):
            of_file = self._hits[start:end]
            if any(of_file):
                found[name] = [line for line, is_hit in enumerate(of_file) if is_hit]
        return found

    def _call(self, frame: Any, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in self._starts:
            return None
        hits, (_, start) = self._hits, self._starts[frame.f_code.co_filename]

        def line(frame: Any, event: str, _: Any) -> Callable[..., Any]:
            hits[start + frame.f_lineno] = 1
            return line

        return line(frame, event, None)
