# SPDX-License-Identifier: Apache-2.0
"""What GradLoc writes to disk about a spike, and nothing else: the one definition of these files.

``events.jsonl`` holds one :class:`Event` a line; an event's folder holds ``sequences.json`` (:class:`SequenceFile`) and
the replay bundle's ``meta.json`` (:class:`BundleMeta`). The writer fills these classes, the report and the replay read
them, and the JSON Schemas in ``schema/`` are made from them (``scripts/make_schemas.py``).

Standard library only. On disk, numbers that JSON cannot spell are the strings ``"NaN"``, ``"Infinity"`` and
``"-Infinity"``. A reader passes over fields that it does not know, and takes a field's default where a file lacks it;
so a name that a later version adds to an ``enum`` is no reason to refuse a file.

``Annotated`` carries what the schema says beyond the type: pairs of a JSON Schema keyword and its value.
"""

from .bundle import BundleEntry, BundleMeta, Fingerprint, Sequence, SequenceFile
from .culprit import CAUSES, Cause, Coefficients, Culprit, Ratios, Sibling, Turn, turns_in
from .event import (
    ACTIONS,
    Action,
    BatchStatistics,
    Certificate,
    Consequence,
    Cured,
    Event,
    FirstNotFinite,
    LayerHistory,
    Mismatch,
    PartShare,
    Rerun,
    Shares,
    StepCause,
)
from .fields import BUNDLE_VERSION, SCHEMA_VERSION, Weights
from .spike import History, PathEntry, Run, Search, Step, Trigger

__all__ = [
    "ACTIONS",
    "CAUSES",
    "BUNDLE_VERSION",
    "SCHEMA_VERSION",
    "Action",
    "BatchStatistics",
    "BundleEntry",
    "BundleMeta",
    "Cause",
    "Certificate",
    "Coefficients",
    "Consequence",
    "Culprit",
    "Cured",
    "Event",
    "Fingerprint",
    "FirstNotFinite",
    "History",
    "LayerHistory",
    "PathEntry",
    "Ratios",
    "Rerun",
    "Run",
    "Search",
    "Sequence",
    "SequenceFile",
    "Mismatch",
    "PartShare",
    "Shares",
    "Sibling",
    "Step",
    "StepCause",
    "Trigger",
    "Turn",
    "Weights",
    "turns_in",
]
