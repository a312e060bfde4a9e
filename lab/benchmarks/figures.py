# SPDX-License-Identifier: Apache-2.0
"""Measures again what the pages state, into lab/benchmarks/results/: `make figures`.

    python -m lab.benchmarks.figures             # what is of other sources than the present ones: hours on two cores
    python -m lab.benchmarks.figures --list      # which records there are, and of which sources

A record that is of the present core and search is kept, so a run that was stopped goes on where it was. Nothing else
should use the machine.
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
_LOCALIZE = ("localize", "--strategy", "auto", "--full", "--sweep", "battery", "--sweep", "masters")
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "trigger": (("trigger",),),
    "mixtures": (("mixtures",),),
    "unrepeatable": (("unrepeatable", "--seeds", "2"),),
    "cost": (_LOCALIZE, ("localization.cost", "{out}/localize.json")),
    "smollm2": (("localize", "--model", "smollm2", "--tokens", "128", "--ranks", "1"),),
    "driver": (("driver",),),
    "healthy": (("healthy", "--pairs", "600"),),
    "spiking": (("spiking", "--dtype", "float32"),),
    "spiking-bfloat16": (("spiking", "--dtype", "bfloat16"),),
}
"""By record: the modules of this folder that make it, with their arguments."""


def is_present(name: str) -> bool:
    """Whether a record is of the present sources."""
    path = RESULTS / f"{name}.json"
    return path.is_file() and json.loads(path.read_text()).get("core_sha256") == digest()


def measure(name: str) -> None:
    """Make one record anew; the old one stays until it is there.

    Raises:
        CalledProcessError: where a benchmark says that something does not hold.
    """
    with tempfile.TemporaryDirectory() as out:
        for module, *arguments in COMMANDS[name]:
            given = [argument.format(out=out) for argument in arguments]
            command = [sys.executable, "-m", f"lab.benchmarks.{module}", *given, "--out", out]
            subprocess.run(command, cwd=REPO, check=True)
        made = f"{module.rpartition('.')[2]}.json"  # the last one's
        shutil.copyfile(Path(out) / made, RESULTS / f"{name}.json")


def main(arguments: list[str] | None = None) -> int:
    """Measure what is missing; the exit code is 1 where something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.figures", description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="say which records are of the present sources")
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
            print(f"{name} is as it was: {error}", file=sys.stderr)
        progress.step(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
