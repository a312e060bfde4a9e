# SPDX-License-Identifier: Apache-2.0
"""Entry point of run_experiment.sh: `python /path/to/lab/experiments ...`, from any folder."""

import sys
from pathlib import Path

# Run by path and not with -m, so that no module is imported from the current folder.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from lab.experiments import cli  # noqa: E402

sys.exit(cli.main())
