# SPDX-License-Identifier: Apache-2.0
"""Run an experiment that has arms, every arm with every seed, and summarize the runs.

Each run has its own folder, `SUITE_DIR/ARM` or `SUITE_DIR/ARM-seedN`, with the same files as a single experiment's run.
`SUITE_DIR/suite.json` lists the runs and how each ended; the experiment's summary reads it. Standard library only,
except for figures.
"""

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.experiments.catalog import Arm, Experiment
from lab.experiments.errors import ExperimentError, UsageError
from lab.output import table, write_json

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
    summary = subprocess.run([python, "-m", experiment.summary_module, str(folder)], check=False)
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


# ---- the summary

Table = list[list[str]]
"""Rows of cells; the first row holds the column names."""
Run = tuple[Path, Cell]
"""A run's folder, and its entry in `suite.json`."""


def print_summary(doc: str, legend: str, make: Callable[[list[Run], Path], list[Table]], argv: list[str] | None) -> int:
    """Run a summary's command line, `python -m MODULE SUITE_DIR [SUITE_DIR ...]`, and return the exit code.

    Args:
        doc: the module's docstring; its first line describes the command.
        legend: printed below the tables.
        make: turns the successful runs into tables, and writes its other files into the given folder.
        argv: the arguments; None for the process's.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("suite_dirs", type=Path, nargs="+", metavar="SUITE_DIR")
    folders = parser.parse_args(argv).suite_dirs
    try:
        runs = [(folder / cell["folder"], cell) for folder in folders for cell in read(folder)["cells"]]
        well = [run for run in runs if run[1]["exit_code"] == 0]
        if not well:
            raise ExperimentError(f"no run in {folders[0]} ended well: there is nothing to compare.")
        tables = make(well, folders[0])
    except ExperimentError as error:
        print(f"summary: {error}", file=sys.stderr)
        return error.exit_code
    print("", *map(as_text, tables), legend, sep="\n\n")
    if len(well) < len(runs):
        failed = [cell["folder"] for _, cell in runs if cell["exit_code"] != 0]
        print(f"without {', '.join(failed)}, which did not end well")
    (folders[0] / "summary.md").write_text("\n\n".join(map(table, tables)) + "\n", encoding="utf-8")
    return 0


def read_steps(folder: Path, name: str) -> dict[int, dict]:
    """Return the metrics of each step that logged the metric `name`, by step.

    Raises:
        ExperimentError: if the file is missing or truncated, or no step has the metric.
    """
    path = folder / "metrics.jsonl"
    steps: dict[int, dict] = {}
    try:
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            steps.setdefault(line["step"], {}).update(line["data"])
    except (OSError, ValueError, KeyError) as error:
        raise ExperimentError(f"{path} cannot be read: {error}.") from None
    found = {step: data for step, data in steps.items() if name in data}
    if not found:
        raise ExperimentError(f"{path} has no step: the run was cut off.")
    return found


def table_of(rows: list[dict[str, str]]) -> Table:
    """Return a table of rows that map a column's name to its cell; an empty one of none."""
    return [list(rows[0] if rows else ()), *(list(row.values()) for row in rows)]


def as_text(table: Table) -> str:
    """Format a table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in table)
    return "\n".join("  ".join(line).rstrip() for line in padded)


@contextlib.contextmanager
def figure(path: Path, width: float, num_plots: int):
    """Yield a figure and its plots, side by side; save them as a PNG on exit."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, 4.2), layout="constrained")
    yield made, made.subplots(1, num_plots)
    # Without metadata, two drawings of the same runs are the same bytes.
    made.savefig(path, dpi=100, metadata={"Software": None})
