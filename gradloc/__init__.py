# SPDX-License-Identifier: Apache-2.0
"""GradLoc: which tokens made this gradient spike, why, and what the step would have been without them.

``adapters`` holds one for each trainer; every other room knows none.
"""

import logging
import os

__version__ = "0.4.0"
"""The one place that names the version: the patch, the installed package and its commands read it here."""

logging.getLogger(__name__).setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))  # of all loggers in here, as verl's own
