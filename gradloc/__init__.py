# SPDX-License-Identifier: Apache-2.0
"""GradLoc: which tokens made this gradient spike, why, and what the step would have been without them.

``verl_actor`` is the adapter to verl 0.7, ``verl_engine`` to verl 0.9; every other room knows no trainer.
"""

__version__ = "0.2.0"
"""The one place that names the version: the patch, the installed package and its commands read it here."""
