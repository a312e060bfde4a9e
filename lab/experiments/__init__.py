# SPDX-License-Identifier: Apache-2.0
"""Named experiments: one Hydra config each, and what `run_experiment.sh` needs to run them."""
