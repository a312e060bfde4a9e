# SPDX-License-Identifier: Apache-2.0
"""Under which names things travel between trainer and actor beside verl's own."""

__all__ = [
    "COEFFICIENT_KEY",
    "EVENTS_KEY",
    "OUTCOMES_KEY",
    "HEAD_KEY",
    "POLICY_KEY",
    "ROW_KEY",
    "SEQUENCE_KEY",
    "SETTINGS_KEY",
]

COEFFICIENT_KEY = "gradloc/median_coefficient"
"""A metric of each rank: median |d loss / d log_prob| of its tokens."""
HEAD_KEY = "gradloc/head_squares"
"""A metric of each rank, until the driver adds them up: of every optimizer step its part of the head's squared norm."""
POLICY_KEY = "gradloc"
"""Meta info of a batch on its way to the actor: the step's policy."""
SETTINGS_KEY = "gradloc_settings"
"""Likewise, on its way to the critic, whose own config has none: the settings that hold."""
EVENTS_KEY = "gradloc_events"
"""Meta info of an update's output: what rank 0 gathered."""
OUTCOMES_KEY = "gradloc_outcomes"
"""Meta info of an update's output: all spikes and what was done, from rank 0."""
ROW_KEY = "gradloc_row"
"""int (R,) in a batch: each row's number in the driver's batch."""
SEQUENCE_KEY = "sequence_id"
"""str (R,) among a batch's labels: ``<uid>:<rollout index>``."""
