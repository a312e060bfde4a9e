# SPDX-License-Identifier: Apache-2.0
"""Measure the figures of the pages again, into lab/benchmarks/results/: `make figures`.

    python -m lab.benchmarks.figures             # records of other sources: hours on two cores
    python -m lab.benchmarks.figures --list      # list the records and whether they are current

A record of the present core and search is kept, so an interrupted run resumes. Nothing else should use the machine.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.benchmarks.run import REPO, Progress, digest

RESULTS = REPO / "lab" / "benchmarks" / "results"
COMMANDS: dict[str, tuple[str, ...]] = {
    "trigger": ("trigger",),
    "unrepeatable": ("unrepeatable", "--seeds", "2"),
    "driver": ("driver",),
    "healthy": ("healthy", "--pairs", "600"),
}
"""Record name -> the module of this folder that makes it, and its arguments."""


def is_present(name: str) -> bool:
    """Return whether a record is of the present sources."""
    path = RESULTS / f"{name}.json"
    return path.is_file() and json.loads(path.read_text()).get("core_sha256") == digest()


def measure(name: str) -> None:
    """Measure one record again; the old one is kept until then.

    Raises:
        CalledProcessError: if a benchmark reports a problem.
    """
    module, *arguments = COMMANDS[name]
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", f"lab.benchmarks.{module}", *arguments, "--out", out]
        subprocess.run(command, cwd=REPO, check=True)
        shutil.copyfile(Path(out) / f"{module}.json", RESULTS / f"{name}.json")


def main(arguments: list[str] | None = None) -> int:
    """Measure the missing records; the exit code is 1 if a benchmark reported a problem."""
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.figures", description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="list which records are of the present sources")
    parsed = parser.parse_args(arguments)
    missing = [name for name in COMMANDS if not is_present(name)]
    if parsed.list:
        print("\n".join(f"{name}: {'to be measured' if name in missing else 'present'}" for name in COMMANDS))
        return 0
    progress, failed = Progress(len(missing)), []
    for name in missing:
        try:
            measure(name)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"{name} is not replaced: {error}", file=sys.stderr)
        progress.step(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
