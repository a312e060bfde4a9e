# SPDX-License-Identifier: Apache-2.0
"""What two runs on several ranks left."""

from typing import Any

import torch


def are_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Whether each rank has the same weights, bit for bit."""
    pairs = zip(one, other, strict=True)
    return all(
        len(a["weights"]) == len(b["weights"]) and all(map(torch.equal, a["weights"], b["weights"])) for a, b in pairs
    )
