# SPDX-License-Identifier: Apache-2.0
"""Experiments as a user runs them, with the real trainer, to their end."""

import os
import subprocess
import sys
from pathlib import Path

from tests.experiments.conftest import REPO


def run_to_the_end(*arguments: str, run_dir: Path, seconds: float = 900, **variables: str) -> str:
    """What run_experiment.sh prints with these arguments, called from beside the run's folder; it has to succeed."""
    done = subprocess.run(
        [str(REPO / "run_experiment.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "RUN_DIR": str(run_dir), **variables},
        cwd=run_dir.parent,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
