# SPDX-License-Identifier: Apache-2.0
"""One suite for every trainer; marks of tests/trainers.py skip what a trainer does not have."""

from tests.trainers import TRAINER

collect_ignore_glob = ["test_actions.py", "test_layouts.py", "test_trigger.py", "layouts/*"] if TRAINER == "TRL" else []
"""TRL's own rooms have these."""
