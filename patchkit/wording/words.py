# SPDX-License-Identifier: Apache-2.0
"""The parts of a refusal's text."""

from typing import NamedTuple


class Words(NamedTuple):
    """One refusal's text; the parts are ``str.format`` templates over the error's data."""

    what: str
    cause: str
    next: str
    next_without_git: str = ""
    """What to say instead of ``next`` where the target is no clone."""
