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
"""What a setting may be: the tests, and the one sentence that refuses what fails them."""

from typing import Any

__all__ = ["is_int", "is_number", "require"]


def require(ok: bool, key: str, expected: str, found: Any) -> None:
    """Refuse a setting unless it is as it must be.

    Args:
        ok: whether it is.
        key: the setting's full name.
        expected: what it must be, as it reads after ``must be``.
        found: its value.

    Raises:
        ValueError: one sentence that names the key, what it must be and what was found.
    """
    if not ok:
        raise ValueError(f"{key} must be {expected}, found {found!r}.")


def is_int(value: Any, least: int) -> bool:
    """Whether this is an integer of at least ``least``; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Whether this is a number; NaN, True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
