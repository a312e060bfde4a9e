# SPDX-License-Identifier: Apache-2.0
"""Settings of a loop of one's own, from the arguments of ``gradloc.Watch``."""

import os
from collections.abc import Mapping
from typing import Any

from ..checks import require
from ..config import GradLocConfig, settings_without_verl
from ..record import ACTIONS


def loop_settings(action: Any, blocks: dict[str, Any], folder: str) -> GradLocConfig | None:
    """Return the effective settings of a run in this folder; None: off.

    ``action`` is a mode by its name, the block ``action``, or effective settings, as a trainer's adapter gives them.

    Raises:
        ValueError: one sentence, for a wrong name or value. A loop has no checkpoint format, and no replay knows it.
    """
    if isinstance(action, GradLocConfig):
        return action
    mode = {"mode": action} if isinstance(action, str) else action
    given = {"action": mode, **blocks, "evidence": {"bundle": "off", **blocks.get("evidence", {})}}
    named = mode.get("mode") if isinstance(mode, Mapping) else None
    kinds = "observe, mask, skip, abort or off in a loop, of whose loss no other setting is known"
    require(named in (None, *(each for each in ACTIONS if each != "heal")), "gradloc.action.mode", kinds, named)
    settings = settings_without_verl(given, os.path.join(folder, "gradloc"), "a loop, which has none")
    evidence = None if settings is None else settings.evidence
    for name in () if evidence is None else ("bundle", "checkpoint"):
        value = getattr(evidence, name)
        require(value == "off", f"gradloc.evidence.{name}", "off in a loop of one's own, which no replay knows", value)
    return settings
