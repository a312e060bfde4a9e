# SPDX-License-Identifier: Apache-2.0
"""Run named experiments, one Hydra config each, for `run_experiment.sh`."""
