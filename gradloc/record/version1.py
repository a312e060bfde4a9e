# SPDX-License-Identifier: Apache-2.0
"""Events and sequences of file version 1, where a token's numbers were fields each, as version 2 has them."""

from collections.abc import Mapping
from typing import Any

from .columns import OF_A_TOKEN, STORED

_NAMES = {"old_log_prob_stored": "old_log_prob"} | {name: name for name in STORED if name in OF_A_TOKEN}
"""The columns by a culprit's fields."""
_COEFFICIENTS = {"log_prob": "coefficient", "kl": "kl_coefficient", "entropy": "entropy_coefficient"}


def event(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event's record; what is not as version 1 had it is left to the reader to refuse."""
    return _with_each(raw, "culprits", culprit)


def culprit(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a culprit's record: the numbers of its largest token become a row of the table."""
    values = {_NAMES[name]: value for name, value in raw.items() if name in _NAMES}
    values |= {_COEFFICIENTS[name]: value for name, value in (raw.get("coefficients") or {}).items()}
    known = {name: value for name, value in (raw.get("values", {}) | values).items() if value is not None}
    kept = {name: value for name, value in raw.items() if name not in ("coefficients", "ratios", *_NAMES)}
    ratio = (raw.get("ratios") or {}).get("sequence_geometric_mean", raw.get("sequence_ratio"))
    return kept | {"sequence_ratio": ratio, "values": known}


def sequences(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file of sequences: their lists become columns of the table."""
    return _with_each(raw, "sequences", _sequence)


def _sequence(raw: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in raw.items() if name not in STORED}
    return kept | {"columns": {name: raw[name] for name in STORED if raw.get(name) is not None}}


def _with_each(raw: Mapping[str, Any], name: str, change: Any) -> dict[str, Any]:
    changed: dict[str, Any] = {"schema_version": 2} if "schema_version" in raw else {}
    if isinstance(raw.get(name), list):
        changed[name] = [change(each) if isinstance(each, Mapping) else each for each in raw[name]]
    return {**raw, **changed}
