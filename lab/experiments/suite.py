# SPDX-License-Identifier: Apache-2.0
"""Run an experiment that has arms, every arm with every seed, and summarize the runs.

Each run has its own folder, `SUITE_DIR/ARM` or `SUITE_DIR/ARM-seedN`, with the same files as a single experiment's run.
`SUITE_DIR/suite.json` lists the runs and how each ended; `summaries` reads it. Standard library only.
"""

import itertools
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.experiments.catalog import Arm, Experiment
from lab.experiments.errors import ExperimentError, UsageError
from lab.output import write_json

RECORD = "suite.json"

Cell = dict[str, Any]
"""One run, as in `suite.json`; `exit_code` and `seconds` are None until it has ended."""


def plan(experiment: Experiment, arms: str | None, seeds: str | None, given: list[str]) -> list[Cell]:
    """Return the runs in order, arm by arm and seed by seed; one for an experiment without arms.

    The overrides of a run are the arm's, the seed, and then the user's, which win.

    Args:
        experiment: the chosen one.
        arms: comma-separated names; None for all.
        seeds: comma-separated integers; None for the experiment's own.
        given: the user's overrides.

    Raises:
        UsageError: if an arm or a seed does not exist, or the seed is set twice.
    """
    if not experiment.arms:
        for option, value in (("--arms", arms), ("--seeds", seeds)):
            if value is not None:
                raise UsageError(f"{experiment.name} is one run and has no arms: leave {option} out.")
    known = {arm.name: arm for arm in experiment.arms or [Arm("", experiment.summary)]}
    names = list(known) if arms is None else arms.split(",")
    wrong = [name for name in names if name not in known]
    if wrong:
        raise UsageError(f"{experiment.name} has no arm {wrong[0]!r}: there are {', '.join(known)}.")
    chosen = experiment.seeds if seeds is None else seeds.split(",")
    if not all(str(seed).isdecimal() for seed in chosen):
        raise UsageError(f"--seeds {seeds} is not a list of whole numbers: write --seeds 1,2,3.")
    if chosen and any(text.lstrip("+").startswith("seed=") for text in given):
        raise UsageError("every arm runs with its own seeds: write --seeds N instead of seed=N.")
    return [
        {
            "arm": arm.name,
            "meaning": arm.meaning,
            "seed": seed,
            "folder": arm.name if seed is None else f"{arm.name}-seed{seed}",
            "overrides": [*arm.overrides, *([] if seed is None else [f"seed={seed}"]), *given],
            "exit_code": None,
            "seconds": None,
        }
        for arm in (known[name] for name in dict.fromkeys(names))
        for seed in list(dict.fromkeys(map(int, chosen))) or [None]
    ]


def run(
    experiment: Experiment, cells: list[Cell], folder: Path, run_one: Callable[[list[str], Path], int], python: str
) -> int:
    """Run the cells, continue after one that fails, and print the summary.

    A suite that was interrupted resumes: a run that succeeded with the same overrides is kept, the folder of any other
    is renamed `NAME.cut`.

    Args:
        experiment: the cells' experiment.
        cells: from `plan`.
        folder: the suite's folder, which exists.
        run_one: runs one experiment with overrides into a folder and returns its exit code. A code from 128 on means an
            interrupt, which ends the suite.
        python: the interpreter for the summary.

    Returns:
        0 if every cell and the summary succeeded, 1 if not, or the code of the interrupt.
    """
    started = time.monotonic()
    suite = {"experiment": experiment.name, "cells": [*cells, *keep_ended(folder, experiment.name, cells)]}
    to_run = [cell for cell in cells if cell["exit_code"] != 0]
    if len(to_run) < len(cells):
        say(f"{len(cells) - len(to_run)} of {len(cells)} runs have ended well already")
    for number, cell in enumerate(to_run):
        write_json(folder / RECORD, suite)
        gone = time.monotonic() - started
        left = f", about {clock(gone / number * (len(to_run) - number))} to go" if number else ""
        say(f"\nrun {number + 1} of {len(to_run)}: {cell['folder']} ({cell['meaning']})")
        say(f"{clock(gone)} gone{left}")
        begun = time.monotonic()
        code = run_one(cell["overrides"], folder / cell["folder"])
        cell.update(exit_code=code, seconds=round(time.monotonic() - begun, 1))
        if code >= 128:
            write_json(folder / RECORD, suite)
            return code
        if code:
            say(f"{cell['folder']} FAILED with exit code {code}; the others go on.")
    write_json(folder / RECORD, suite)
    failed = [cell["folder"] for cell in cells if cell["exit_code"]]
    took = clock(time.monotonic() - started)
    say(f"\n{len(cells) - len(failed)} of {len(cells)} runs ended well, {took} in all")
    if failed:
        say(f"failed: {', '.join(failed)}")
    if not experiment.summary_module:
        return int(bool(failed))
    command = [python, "-m", "lab.experiments.summaries", experiment.summary_module, str(folder)]
    summary = subprocess.run(command, check=False)
    return int(bool(failed) or summary.returncode != 0)


def keep_ended(folder: Path, name: str, cells: list[Cell]) -> list[Cell]:
    """Copy the results of earlier successful runs into `cells`, and rename the folders of failed ones.

    Returns:
        The earlier successful runs that are not among `cells`.

    Raises:
        ExperimentError: if the folder belongs to another experiment.
    """
    before = read(folder) if (folder / RECORD).is_file() else {"experiment": name, "cells": []}
    if before["experiment"] != name:
        raise ExperimentError(f"{folder} holds runs of {before['experiment']}, not of {name}: name another RUN_DIR.")
    ended = {cell["folder"]: cell for cell in before["cells"] if cell["exit_code"] == 0}
    for cell in cells:
        old, place = ended.pop(cell["folder"], None), folder / cell["folder"]
        if old and old["overrides"] == cell["overrides"]:
            cell.update(old)
        elif place.exists():
            place.rename(free_name(place.with_name(f"{place.name}.cut")))
    return list(ended.values())


def free_name(folder: Path) -> Path:
    """Return the folder, or the first of `NAME-2`, `NAME-3` ... that does not exist."""
    others = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([folder], others) if not path.exists())


def read(folder: Path) -> dict:
    """Return the content of `suite.json`: `experiment` and `cells`.

    Raises:
        ExperimentError: if it does not exist.
    """
    path = folder / RECORD
    if not path.is_file():
        raise ExperimentError(f"{folder} has no {RECORD}: name the results folder of a suite.")
    return json.loads(path.read_text(encoding="utf-8"))


def clock(seconds: float) -> str:
    """Format a duration as minutes and seconds.

    >>> clock(65.4)
    '1:05'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def say(text: str) -> None:
    print(text, flush=True)
