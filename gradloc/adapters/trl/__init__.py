# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer and RLOOTrainer; what a user imports is :mod:`gradloc.trl`."""
