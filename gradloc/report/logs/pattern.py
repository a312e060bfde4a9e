# SPDX-License-Identifier: Apache-2.0
"""A log of a form that nobody knows, read by a regular expression with names for its groups."""

import re
from pathlib import Path

from ..errors import ReportError
from .names import number
from .recording import Recording
from .source import Source
from .wrappers import unwrapped


def read_by_pattern(path: Path, pattern: str) -> Recording:
    """The rows of a file by a pattern.

    Args:
        path: an existing file.
        pattern: its group ``value`` is the gradient norm, ``step`` the step (else lines are counted), any other group
            a metric of that name.

    Raises:
        ReportError: when the pattern cannot be read, has no group ``value``, or finds no line.
    """
    try:
        known = re.compile(pattern)
    except re.error as error:
        raise ReportError(f"--pattern {pattern!r} is no regular expression: {error}.") from None
    if "value" not in known.groupindex:
        raise ReportError(f"--pattern {pattern!r} has no group for the norm: write it as 'grad_norm=(?P<value>\\S+)'.")
    if not path.is_file():
        raise ReportError(f"{path} is no file: --pattern reads lines of one.")
    made = Recording(path.name, "lines by --pattern", folder=path.parent)
    source = Source(path)
    num_lines = 0
    for line in unwrapped(source.lines()):
        num_lines += 1
        found = known.search(line)
        if found is None:
            continue
        values = {name: number((text or "").strip(" ,;|")) for name, text in found.groupdict().items()}
        norm, step = values.pop("value"), values.pop("step", None)
        if norm is None or ("step" in known.groupindex and step is None):
            continue
        metrics = {name: value for name, value in values.items() if value is not None}
        made.rows.append((len(made.rows) + 1 if step is None else int(step), {"grad_norm": norm, **metrics}))
    if not made.rows:
        raise ReportError(f"{path.name}: --pattern {pattern!r} finds no number in its {num_lines:,} lines.")
    made.receipt = f"{len(made.rows):,} of {num_lines:,} lines read"
    made.notes = list(source.notes)
    made.is_counted = "step" not in known.groupindex
    if made.is_counted:
        made.notes.append("--pattern has no group `step`: each line that it finds was counted as one.")
    return made
