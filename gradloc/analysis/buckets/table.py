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
"""The group table in Weights & Biases; other trackers have the CSV file."""

from collections.abc import Mapping
from typing import Any

from ...record.analysis import GradientAnalysis

__all__ = ["log_group_table"]

_COLUMNS = ["bucket", "group_id", "reward_std"]


def log_group_table(trackers: Mapping[str, Any], record: GradientAnalysis) -> None:
    """Log ``grad_norm/<bucket>/group_rv_table`` for each bucket to the run that verl has opened.

    Args:
        trackers: verl's open clients by name; nothing happens unless wandb's is among them.
        record: the analysis.
    """
    rows: dict[str, list[list[Any]]] = {}
    for group in record.groups:
        rows.setdefault(group.bucket, []).append([getattr(group, column) for column in _COLUMNS])
    for client in (trackers[name] for name in ("wandb", "vemlp_wandb") if name in trackers):
        if client.run is None:
            continue
        tables = {
            f"grad_norm/{bucket}/group_rv_table": client.Table(columns=_COLUMNS, data=data)
            for bucket, data in rows.items()
        }
        # the step stays open: verl logs its scalars under the same one
        client.log(tables, step=record.global_step, commit=False)
