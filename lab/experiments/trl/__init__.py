# SPDX-License-Identifier: Apache-2.0
"""The demo on TRL: `./run_experiment.sh demo trainer=trl`."""
