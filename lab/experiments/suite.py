# SPDX-License-Identifier: Apache-2.0
"""Runs an experiment that has arms: every arm, with every seed, one after the other.

Each run has a folder of its own, `SUITE_DIR/ARM` or `SUITE_DIR/ARM-seedN`, and is what a single
experiment's run is. `SUITE_DIR/suite.json` says which there are and what became of them; the
experiment's summary reads it. Standard library only, but for figures.
"""

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.experiments.catalog import Experiment
from lab.experiments.errors import ExperimentError, UsageError

RECORD = "suite.json"


Cell = dict[str, Any]
"""One run of a suite, as `suite.json` has it: `exit_code` and `seconds` are None until it has ended."""


def plan(experiment: Experiment, arms: str | None, seeds: str | None, given: list[str]) -> list[Cell]:
    """The cells to run, in order: arm by arm, and within an arm seed by seed.

    A cell's overrides are the arm's, the seed, and then the user's, which win.

    Args:
        experiment: what was chosen; without arms it has no cells.
        arms: names with commas between them; None for all.
        seeds: whole numbers with commas between them; None for the experiment's own.
        given: the user's overrides.

    Raises:
        UsageError: if an arm or a seed is none, or the seed is set twice.
    """
    if not experiment.arms:
        for option, value in (("--arms", arms), ("--seeds", seeds)):
            if value is not None:
                raise UsageError(f"{experiment.name} is one run and has no arms: leave {option} out.")
        return []
    known = {arm.name: arm for arm in experiment.arms}
    names = list(known) if arms is None else arms.split(",")
    wrong = [name for name in names if name not in known]
    if wrong:
        raise UsageError(f"{experiment.name} has no arm {wrong[0]!r}: there are {', '.join(known)}.")
    chosen = experiment.seeds if seeds is None else seeds.split(",")
    if not all(str(seed).isdecimal() for seed in chosen):
        raise UsageError(f"--seeds {seeds} is not a list of whole numbers: write --seeds 1,2,3.")
    if chosen and any(text.lstrip("+").startswith("seed=") for text in given):
        raise UsageError("every arm runs with its own seeds: write --seeds N instead of seed=N.")
    numbers = list(dict.fromkeys(map(int, chosen))) or [None]
    return [
        {
            "arm": arm.name,
            "meaning": arm.meaning,
            "seed": seed,
            "folder": arm.name if seed is None else f"{arm.name}-seed{seed}",
            # with no seed the config's own stands
            "overrides": [*arm.overrides, *([] if seed is None else [f"seed={seed}"]), *given],
            "exit_code": None,
            "seconds": None,
        }
        for arm in (known[name] for name in dict.fromkeys(names))
        for seed in numbers
    ]


def run(
    experiment: Experiment, cells: list[Cell], folder: Path, run_one: Callable[[list[str], Path], int], python: str
) -> int:
    """Runs the cells, goes on after one that fails, and ends with the summary.

    A suite that was cut off goes on where it stopped: a run that ended well with the same overrides is kept. What is
    left of another is renamed `NAME.cut`.

    Args:
        experiment: whose cells they are.
        cells: what `plan` gave.
        folder: the suite's folder, which exists.
        run_one: runs one experiment with overrides into a folder and returns its exit code; from
            128 on it was interrupted, which ends the suite.
        python: the interpreter that runs the summary.

    Returns:
        0 if every cell and the summary went well, 1 if not, or the code of the interrupt.
    """
    started = time.monotonic()
    suite = {"experiment": experiment.name, "cells": [*cells, *keep_ended(folder, experiment.name, cells)]}
    to_run = [cell for cell in cells if cell["exit_code"] != 0]
    if len(to_run) < len(cells):
        say(f"{len(cells) - len(to_run)} of {len(cells)} runs have ended well already")
    for number, cell in enumerate(to_run):
        write(folder, suite)
        gone = time.monotonic() - started
        left = f", about {clock(gone / number * (len(to_run) - number))} to go" if number else ""
        say(f"\nrun {number + 1} of {len(to_run)}: {cell['folder']} ({cell['meaning']})")
        say(f"{clock(gone)} gone{left}")
        begun = time.monotonic()
        code = run_one(cell["overrides"], folder / cell["folder"])
        cell.update(exit_code=code, seconds=round(time.monotonic() - begun, 1))
        if code >= 128:
            write(folder, suite)
            return code
        if code:
            say(f"{cell['folder']} FAILED with exit code {code}; the others go on.")
    write(folder, suite)
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
    """Takes over the runs of this folder that ended well, and renames the folders of others.

    Returns:
        Those that are not to be run this time.

    Raises:
        ExperimentError: if the folder is another experiment's.
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
    """The folder, or, where that is taken, the first of `NAME-2`, `NAME-3` ... that is not."""
    others = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([folder], others) if not path.exists())


def read(folder: Path) -> dict:
    """What `suite.json` says: `experiment`, and `cells` as `run` writes them.

    Raises:
        ExperimentError: if the folder has none, or it is not JSON.
    """
    path = folder / RECORD
    if not path.is_file():
        raise ExperimentError(f"{folder} has no {RECORD}: name the results folder of a suite.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ExperimentError(f"{path} is not JSON: the suite was cut off while writing.") from None


def write(folder: Path, suite: dict) -> None:
    """Replaces `suite.json` at once: a reader sees the old one or the new one."""
    part = folder / f"{RECORD}.part"
    part.write_text(json.dumps(suite, indent=2) + "\n", encoding="utf-8")
    os.replace(part, folder / RECORD)


def clock(seconds: float) -> str:
    """Minutes and seconds.

    >>> clock(65.4)
    '1:05'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def say(text: str) -> None:
    print(text, flush=True)


# ---- the summary

Table = list[list[str]]
"""Its lines, the names of the columns first."""
Run = tuple[Path, Cell]
"""A run's folder, and its entry in `suite.json`."""


def print_summary(doc: str, legend: str, make: Callable[[list[Run], Path], list[Table]], argv: list[str] | None) -> int:
    """Runs a summary's command line, `python -m MODULE SUITE_DIR [SUITE_DIR ...]`; returns the exit code.

    Args:
        doc: the module's docstring; its first line describes the command.
        legend: what is printed below the tables.
        make: makes of the runs that ended well the tables, and writes what else there is into a folder.
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
    (folders[0] / "summary.md").write_text("\n\n".join(map(as_markdown, tables)) + "\n", encoding="utf-8")
    return 0


def read_steps(folder: Path, name: str) -> dict[int, dict]:
    """A run's metrics by step, of the steps that have this one.

    Raises:
        ExperimentError: if they are missing or cut off, or no step has it.
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
    """Of rows by column, at least one."""
    return [list(rows[0]), *(list(row.values()) for row in rows)]


def as_text(table: Table) -> str:
    """For a terminal."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in table)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def as_markdown(table: Table) -> str:
    """For a page."""
    head, *body = table
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *body])


@contextlib.contextmanager
def figure(path: Path, width: float, num_plots: int):
    """Yields a figure and its plots, side by side; what is drawn on them goes to a PNG."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, 4.2), layout="constrained")
    yield made, made.subplots(1, num_plots)
    # Without metadata two drawings of the same runs are the same bytes.
    made.savefig(path, dpi=100, metadata={"Software": None})
