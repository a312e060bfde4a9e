# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Under which names things travel between trainer and actor beside verl's own."""

__all__ = [
    "COEFFICIENT_KEY",
    "EVENTS_KEY",
    "HANDLED_KEY",
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
HANDLED_KEY = "gradloc_handled"
"""Meta info of an update's output: all spikes and what was done, from rank 0."""
ROW_KEY = "gradloc_row"
"""int (R,) in a batch: each row's number in the driver's batch."""
SEQUENCE_KEY = "sequence_id"
"""str (R,) among a batch's labels: ``<uid>:<rollout index>``."""
