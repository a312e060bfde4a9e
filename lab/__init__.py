# SPDX-License-Identifier: Apache-2.0
"""Run and measure GradLoc: `experiments` for `run_experiment.sh`, `benchmarks` for the figures of the pages."""
