# SPDX-License-Identifier: Apache-2.0
"""What two runs on several ranks left."""

import json
from pathlib import Path
from typing import Any

import torch


def events_in(folder: Path) -> list[dict[str, Any]]:
    path = folder / "gradloc" / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def are_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Whether each rank has the same weights, bit for bit."""
    pairs = zip(one, other, strict=True)
    return all(
        len(a["weights"]) == len(b["weights"]) and all(map(torch.equal, a["weights"], b["weights"])) for a, b in pairs
    )
