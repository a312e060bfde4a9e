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
"""Types and defaults of the record's fields."""

from dataclasses import field
from typing import Annotated, Any

__all__ = ["SCHEMA_VERSION", "Count", "Interval", "Version", "Weights", "never_null", "optional"]

SCHEMA_VERSION = 1

Version = Annotated[int, ("const", SCHEMA_VERSION)]
Count = Annotated[int, ("minimum", 0)]
Interval = tuple[Count, Count]
Weights = tuple[Count, float, float]


def never_null() -> Any:
    """Default of a field that the writer always knows: None only where a reader found a file without it."""
    return field(default=None, metadata={"null": False})


def optional() -> Any:
    """Default of a field, None, that files of this schema version may lack."""
    return field(default=None, metadata={"required": False})
