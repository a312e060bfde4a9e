# SPDX-License-Identifier: Apache-2.0
"""Runs one experiment's command: keeps its whole output, shows what matters, ends it cleanly.

A brief run shows one line a step instead of everything. Standard library only.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 15
"""How long an interrupted trainer may take to stop Ray before it is ended by force."""
TAIL_LINES = 30
STEP = re.compile(r"step:(\d+) - (.*)")
NUMBER = re.compile(r"(?:np\.\w+\()?([-+0-9.einfa]+)\)?$")
# What is worth a line in a brief run, and what is said then.
MILESTONES = [
    (re.compile(r"Started a local Ray instance"), "Ray has started"),
    (re.compile(r"Total training steps: (\d+)"), "{0} steps to go; the workers load the model"),
]
SHOWN = {
    "actor/grad_norm": "grad norm",
    "critic/score/mean": "score",
    "timing_s/step": "seconds",
}


def parse_step(line: str) -> tuple[int, dict[str, float]] | None:
    """The step and its metrics from a line of verl's console logger, or None.

    >>> parse_step("(TaskRunner pid=1) step:2 - actor/grad_norm:0.5 - x:np.float64(1.0)")
    (2, {'actor/grad_norm': 0.5, 'x': 1.0})
    """
    found = STEP.search(line)
    if not found:
        return None
    metrics = {}
    for item in found.group(2).split(" - "):
        name, _, value = item.rpartition(":")
        number = NUMBER.match(value.strip())
        try:
            metrics[name] = float(number.group(1)) if number else None
        except ValueError:
            metrics[name] = None
    return int(found.group(1)), {k: v for k, v in metrics.items() if v is not None}


def brief(line: str) -> str | None:
    """What a brief run shows for one line of output: a step, a milestone, or nothing."""
    step = parse_step(line)
    if step:
        number, metrics = step
        parts = [f"{text} {metrics[key]:.3g}" for key, text in SHOWN.items() if key in metrics]
        if metrics.get("gradloc/events"):
            parts.append("SPIKE: localized")
        return f"step {number:>2}  " + "  ".join(parts)
    for pattern, text in MILESTONES:
        found = pattern.search(line)
        if found:
            return text.format(*found.groups())
    return None


def run(command: list[str], log: Path, is_brief: bool) -> int:
    """Runs the command to its end and returns its exit code; 130 or 143 when interrupted."""
    started = time.monotonic()
    tail: list[str] = []
    # A session of its own, so that an interrupt reaches the trainer once and in order.
    with (
        log.open("w", encoding="utf-8", errors="replace") as sink,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as child,
    ):
        caught: list[int] = []

        def interrupt(number, _frame):
            caught.append(number)
            stop(child)

        before = {s: signal.signal(s, interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            for line in child.stdout:
                sink.write(line)
                sink.flush()
                tail = [*tail[1 - TAIL_LINES :], line]
                shown = brief(line) if is_brief else line.rstrip("\n")
                if shown is not None:
                    prefix = f"[{time.monotonic() - started:5.0f} s] " if is_brief else ""
                    print(prefix + shown, flush=True)
            code = child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            end_session(child)
    if caught:
        print(f"Stopped by {signal.Signals(caught[0]).name}; Ray and its workers are gone.")
        return 128 + caught[0]
    if code and is_brief:
        print(f"The trainer failed with exit code {code}. Its last lines:", file=sys.stderr)
        sys.stderr.writelines("    " + line for line in tail)
    if code:
        print(f"All of its output: {log}", file=sys.stderr)
    return code


def stop(child: subprocess.Popen) -> None:
    """Asks the trainer to stop as Ctrl-C would, then insists."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            child.send_signal(number)
            try:
                child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                continue


def end_session(child: subprocess.Popen) -> None:
    """Ends what the trainer left behind: Ray's processes live in the same session."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass

