# SPDX-License-Identifier: Apache-2.0
"""Types and defaults of the record's fields."""

from dataclasses import field
from typing import Annotated, Any

SCHEMA_VERSION = 1
BUNDLE_VERSION = 2
"""Of a bundle's meta.json and tensors. A bundle of version 1 had no coefficients: a replay ran the trainer's loss."""
VERDICTS = ("explained", "undecided", "not_explained")

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
