# SPDX-License-Identifier: Apache-2.0
"""The first session on a GPU, in the order of what would end a run soonest: `python -m benchmarks.gpu --first`.

Each step is a run of ``benchmarks.gpu`` in a process and a folder of its own, so that one that runs out of memory costs
the others nothing. A step that has its whole record is not run again: an interrupted session goes on.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.run import REPO

LIMIT = 45 * 60
"""Seconds in all."""
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
STEPS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("short answers", "--parts first --tokens 1024", {}),
    ("long answers", "--parts first --tokens 32768", {}),
    ("head, two ranks on one card, waits", "--parts head two syncs --tokens 4096", {}),
    ("room", "--parts room mask --size 1.5B --tokens 32768", {}),
    ("room, expandable segments", "--parts room mask --size 1.5B --tokens 32768", EXPANDABLE),
    ("16k", "--parts cells --tokens 16384", {}),
    ("32k", "--parts cells --tokens 32768", {}),
)
"""What each is called, its arguments, its environment."""


def session(out: Path, given: Sequence[str] = (), limit: float = LIMIT) -> int:
    """Run all steps; 1 if one said NO, failed, or found no time.

    Args:
        out: a folder for each step is made in it, named by its number.
        given: arguments for every step, which win over its own.
        limit: seconds for all of them together.
    """
    started, codes = time.monotonic(), []
    for number, (name, arguments, variables) in enumerate(STEPS, 1):
        folder = out / f"{number}"
        left = limit - (time.monotonic() - started)
        command = ["-m", "benchmarks.gpu", *shlex.split(arguments), *given, "--out", str(folder)]
        print(f"[{number}/{len(STEPS)}] {name}, {left / 60:.0f} minutes left: python {shlex.join(command)}", flush=True)
        code = _code_of(folder)
        if code is None:
            try:
                environment = {**os.environ, **variables}
                done = subprocess.run([sys.executable, *command], cwd=REPO, env=environment, timeout=max(left, 0))
                code = done.returncode
            except subprocess.TimeoutExpired:
                print("  no time was left for all of it; the same command goes on here", flush=True)
                code = 1
        codes.append(code)
    return int(any(codes))


def _code_of(folder: Path) -> int | None:
    """How a step ended that was run to its end before; None if there was none."""
    try:
        run = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return int(any(cell["is_ok"] is False for cell in run["cells"])) if run.get("is_complete") else None
