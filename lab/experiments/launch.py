# SPDX-License-Identifier: Apache-2.0
"""Run one experiment's command: log its whole output, show a summary of it, and end it cleanly.

A brief run shows one line per step. Standard library only.
"""

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from gradloc.report.logs.lines import Console
from lab.experiments.suite import clock

GRACE_S = 5
"""Seconds that the trainer, and then Ray, may take to end before they are killed."""
POLL_S = 0.1
TAIL_LINES = 30
TOTAL = re.compile(r"Total training steps: (\d+)")
LATE = "The current node timed out during startup"
"""Ray's message if one of its processes did not start within 15 to 30 s, a limit that cannot be changed."""
RAY = re.compile(r"Started a local Ray instance|Connected to Ray cluster")
SHOWN = {"actor/grad_norm": "grad norm", "critic/score/mean": "score", "timing_s/step": "seconds"}


def parse_step(line: str) -> tuple[int, dict[str, float]] | None:
    """Return the step and its metrics from a line of verl's console logger, or None.

    >>> parse_step("(TaskRunner pid=1) step:2 - actor/grad_norm:0.5 - x:np.float64(1.0)")
    (2, {'actor/grad_norm': 0.5, 'x': 1.0})
    """
    console = Console()
    return console.rows[""][0] if console.take(line, process="") else None


class Brief:
    """Reduce the output of a run to milestones and steps, with the remaining time estimated from earlier steps."""

    def __init__(self):
        self.num_steps = 0
        self.seconds: list[float] = []

    def line(self, line: str) -> str | None:
        """Return the text to show for one line of output, or None."""
        if RAY.search(line):
            return "Ray has started"
        total = TOTAL.search(line)
        if total:
            self.num_steps = int(total[1])
            return f"{total[1]} steps to go; the workers load the model"
        step, metrics = parse_step(line) or (0, {})
        parts = [f"{text} {metrics[key]:.3g}" for key, text in SHOWN.items() if key in metrics]
        if not parts:
            return None
        if metrics.get("gradloc/events"):
            parts.append("SPIKE: searched")
        elif metrics.get("gradloc/spikes"):
            parts.append("SPIKE: not searched")
        if "timing_s/step" in metrics:
            self.seconds.append(metrics["timing_s/step"])
            left = self.num_steps - step
            parts += [f"about {clock(statistics.median(self.seconds) * left)} to go"] if left > 0 else []
        return f"step {step:>2}  {'  '.join(parts)}"


@contextlib.contextmanager
def plain_path(python: str):
    """Yield a path to the same interpreter that needs no quoting in a shell.

    Ray starts its workers through a shell and does not quote the interpreter: in a folder with a space in its name no
    worker would start, and Ray would retry for minutes.
    """
    if re.fullmatch(r"[\w./+@:,~-]+", python):
        yield python
        return
    # not in tempfile's default folder, whose name may also have a space
    with tempfile.TemporaryDirectory(prefix="gradloc-", dir="/tmp") as folder:
        link = Path(folder) / "python"
        # The whole environment: an interpreter finds its packages by the folder it is called in.
        link.symlink_to(Path(python).parent.parent)
        yield str(link / "bin" / Path(python).name)


def run(command: list[str], log: Path, is_brief: bool, tries: int = 3) -> int:
    """Run the command to its end and return its exit code; 130 or 143 if interrupted.

    Args:
        command: what to run, in its own session, so that an interrupt reaches it once.
        log: the file for its whole output.
        is_brief: show only the lines of `Brief`.
        tries: number of attempts if Ray does not start, which on a busy machine gives up too early.
    """
    started = time.monotonic()
    brief, tail, caught = Brief(), deque[str](maxlen=TAIL_LINES), list[int]()
    with log.open("w") as sink:
        child = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)

    def interrupt(number, _frame):
        if not caught:
            threading.Thread(target=stop, args=(child,), daemon=True).start()
        caught.append(number)

    before = {s: signal.signal(s, interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        for line in follow(log, child):
            tail.append(line)
            shown = brief.line(line) if is_brief else line.rstrip("\n")
            if shown is not None and not caught:
                prefix = f"[{time.monotonic() - started:5.0f} s] " if is_brief else ""
                print(prefix + shown, flush=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        end_session(child.pid, GRACE_S)
    code = child.wait()
    if caught:
        print(f"Stopped by {signal.Signals(caught[0]).name}, Ray's processes included.")
        return 128 + caught[0]
    if code and tries > 1 and any(LATE in line for line in tail):
        print("Ray did not start in the time that it allows itself, as on a busy machine. Once more.", flush=True)
        return run(command, log, is_brief, tries - 1)
    if code:
        if is_brief:
            print(f"The trainer failed with exit code {code}. Its last lines:", file=sys.stderr)
            sys.stderr.writelines("    " + line for line in tail)
        print(f"All of its output: {log}", file=sys.stderr)
    return code


def follow(log: Path, child: subprocess.Popen) -> Iterator[str]:
    """Yield the lines that a process writes to its log, until it has ended; what it leaves running may hold the log."""
    with log.open(encoding="utf-8", errors="replace") as file:
        line, has_ended = "", False
        while not has_ended:
            has_ended = child.poll() is not None
            while more := file.readline():
                line += more  # it may still be without its end
                if line.endswith("\n"):
                    yield line
                    line = ""
            time.sleep(0 if has_ended else POLL_S)
        if line:
            yield line + "\n"


def stop(child: subprocess.Popen) -> None:
    """Interrupt the trainer as Ctrl-C would, then terminate it, then kill it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        child.send_signal(number)
        try:
            child.wait(GRACE_S)
            return
        except subprocess.TimeoutExpired:
            continue


def session_members(session: int) -> list[int]:
    """Return the processes of a session. Ray's have different process groups, but one session."""
    proc = Path("/proc")
    if (proc / "self").exists():
        listed = [entry.name for entry in proc.iterdir() if entry.name.isdigit()]
    else:
        command = ["ps", "-A", "-o", "pid="]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    members = []
    for pid in map(int, listed):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == session:
                members.append(pid)
    return members


def end_session(session: int, grace_s: float = 0.0) -> None:
    """Wait until no process of a session runs, and kill those that outlast the grace."""
    deadline = time.monotonic() + grace_s
    while (members := session_members(session)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
