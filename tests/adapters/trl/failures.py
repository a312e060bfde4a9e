# SPDX-License-Identifier: Apache-2.0
"""Runs in which a replay fails: on one rank or on all, before a collective or inside of one."""

from typing import Any
from unittest import mock

import torch.distributed as dist

from gradloc.adapters.trl.step import TrlStep
from gradloc.core import ranks
from tests.adapters.trl import harness

METHODS = {"between collectives": "token_mask", "inside a forward": "forward", "behind it": "forward"}


def run_failing(who: str, folder: str, **given: Any) -> dict[str, Any]:
    """Train with a search whose first replay fails."""
    whom, _, where = who.partition(", ")
    method = METHODS[where]
    original = getattr(TrlStep, method)

    def failing(self: TrlStep, *args: Any) -> Any:
        if whom.startswith("all") or dist.get_rank() == 1:
            if where == "behind it":  # after the forward, before the backward
                original(self, *args)
            raise RuntimeError("made to fail")
        return original(self, *args)

    with mock.patch.object(TrlStep, method, failing), mock.patch.object(ranks, "_PATIENCE_S", 2.0):
        return harness.run("watched", folder, **given)
