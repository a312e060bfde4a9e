# SPDX-License-Identifier: Apache-2.0
"""`python /path/to/lab/experiments ...`: what run_experiment.sh runs, from any folder."""

import sys
from pathlib import Path

# Run by path and not with -m: nothing in the current folder can stand in for a module here.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from lab.experiments import cli  # noqa: E402

sys.exit(cli.main())
