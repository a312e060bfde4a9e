# SPDX-License-Identifier: Apache-2.0
"""GradLoc: which tokens made this gradient spike, why, and what the step would have been without them.

``Watch`` looks into any PyTorch loop; ``adapters`` holds one for each trainer, and every other room knows none.
"""

import logging
import os
from typing import Any

__version__ = "0.5.0"
"""The one place that names the version: the patch, the installed package and its commands read it here."""

logging.getLogger(__name__).setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))  # of all loggers in here, as verl's own

_FACE = {
    "Watch": "watch.watch",
    "token_log_probs": "watch.log_probs",
    "TrainerCallback": "adapters.hf.callback",
}
"""The public names and their modules, imported when first used, since they need torch."""


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_FACE[name]}"), name)
