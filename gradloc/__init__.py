# SPDX-License-Identifier: Apache-2.0
"""GradLoc: which tokens made this gradient spike, why, and what the step would have been without them.

``Watch`` looks into any PyTorch loop; ``adapters`` has one package for each trainer; no other package imports a
trainer.
"""

import logging
import os
from typing import Any

__version__ = "0.5.0"
"""The one place that names the version: the patch, the installed package and its commands read it here."""

logging.getLogger(__name__).setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))  # as verl's own loggers

_LAZY_IMPORTS = {
    "Watch": "watch.watch",
    "token_log_probs": "watch.log_probs",
    "TrainerCallback": "adapters.hf.callback",
}
"""The public names and their modules, imported when first used, since they need torch."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY_IMPORTS[name]}"), name)
