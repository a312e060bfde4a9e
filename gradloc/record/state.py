# SPDX-License-Identifier: Apache-2.0
"""What the driver's parts have learned, in one file beside each checkpoint."""

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from . import SCHEMA_VERSION

logger = logging.getLogger(__name__)

_FILE = "gradloc.json"


def save_states(parts: Mapping[str, Any], folder: str) -> bool:
    """Write the parts' states, by name, into ``global_step_N``; returns whether there is any and it was written.

    Each part's ``state()`` is JSON-ready, and its ``load_state(state)`` takes it over.
    """
    state = {name: part.state() for name, part in parts.items()}
    if not state:
        return False
    path = os.path.join(folder, _FILE)
    try:
        with open(f"{path}.partial", "w", encoding="utf-8") as file:
            json.dump({"schema_version": SCHEMA_VERSION, **state}, file)
        os.replace(f"{path}.partial", path)
    except OSError:
        logger.exception("gradloc: %s could not be written; a resumed run will learn its history again", path)
        return False
    return True


def load_states(parts: Mapping[str, Any], folder: str) -> None:
    """Give the parts what :func:`save_states` wrote; a part whose state is missing or not ours starts anew."""
    path = os.path.join(folder, _FILE)
    if not parts or not os.path.exists(path):
        return
    try:
        with open(path, encoding="utf-8") as file:
            states = dict(json.load(file))
    except (OSError, ValueError, TypeError):
        logger.exception("gradloc: %s could not be read; what it remembered is learned again", path)
        return
    for name, part in parts.items():
        if name not in states:
            continue
        try:
            part.load_state(states[name])
        except (ValueError, KeyError, TypeError, AttributeError):
            logger.exception("gradloc: the state of %s in %s cannot be used; it starts anew", name, path)
