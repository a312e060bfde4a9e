# SPDX-License-Identifier: Apache-2.0
"""Text as the report shows it: the functions of ``words.text``, and the command that shows an event."""

import shlex

from ..words.text import one_line, plural, span, spoken, times, visible

__all__ = ["one_line", "plural", "show_command", "span", "spoken", "times", "visible"]


def show_command(run: str, event_id: str) -> str:
    """The command that shows one event of a run with every token."""
    return f"gradloc-report show {shlex.quote(run)} --event {shlex.quote(event_id)}"
