# SPDX-License-Identifier: Apache-2.0
"""Reads training logs, whoever wrote them, and separates the runs in them."""

from .formats import files_of, read
from .segments import LoggedRun, Segment

__all__ = ["LoggedRun", "Segment", "files_of", "read"]
