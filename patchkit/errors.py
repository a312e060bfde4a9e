# SPDX-License-Identifier: Apache-2.0
"""The ways in which this package refuses, one class per exit code.

A refusal is worded where it is raised: its reason (a name for programs and tests), what and where, the likely cause,
and the next command; ``expected``, ``found`` and ``diff`` go with it.
"""

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAX_LISTED = 20  # lines of detail that a refusal shows
BUILT = "Use the patch as built: patches/gradloc.patch."
DO_NOT_USE = "Do not use this patch."
GET_AGAIN = "Get the file again, whole and unchanged."
NOT_OURS = "The patch was not written by make_patch.sh, or was changed afterwards."
RESTORE = "git checkout -- patches/   (or unpack the release again)"


def program() -> str:
    """How the user started the applier, so that the next command can be typed as it is shown."""
    started = Path(sys.argv[0])
    if started.name == "apply_patch.py":
        return f"python {shlex.quote(str(started))}"
    return started.name if started.name == "gradloc-patch" else "python apply_patch.py"


def quoted(path: Any) -> str:
    """Returns a path as a shell takes it."""
    return shlex.quote(str(path))


def capped(lines: Iterable[str]) -> list[str]:
    """Returns at most ``MAX_LISTED`` lines, with the number of those left out."""
    lines = list(lines)
    more = len(lines) - MAX_LISTED
    return lines if more <= 0 else [*lines[:MAX_LISTED], f"... and {more} more"]


class PatchkitError(Exception):
    """A refusal. Subclasses fix the exit code."""

    exit_code = 3

    def __init__(self, reason: str, what: str, cause: str, next_: str, **data: Any) -> None:
        super().__init__(f"{reason}: {what}")
        self.reason, self.what, self.cause, self.next, self.data = reason, what, cause, next_, data

    def parts(self) -> dict[str, str]:
        """Returns the refusal's parts in the order in which they are shown."""
        between = {key: str(self.data[key]) for key in ("expected", "found") if self.data.get(key) is not None}
        return {"reason": self.reason, "what": self.what, **between, "cause": self.cause, "next": self.next}

    def text(self) -> str:
        """Returns the refusal as it is printed, without a final newline."""
        parts = self.parts()
        lines = [f"  {key + ':':<9} {parts[key]}" for key in ("expected", "found", "cause", "next") if parts.get(key)]
        return "\n".join([f"refused: {self.what}", *lines, *(f"  {one}" for one in capped(self.data.get("diff", ())))])


class CheckoutStateError(PatchkitError):
    exit_code = 1  # the target is not in a state that allows the command


class UsageError(PatchkitError):
    exit_code = 2  # the command line asks for something that makes no sense


class IntegrityError(PatchkitError):
    exit_code = 3  # bytes are not what a digest, a schema or the patch language demands


class TransactionError(PatchkitError):
    exit_code = 4  # the disk failed and everything was put back


class RollbackError(PatchkitError):
    exit_code = 5  # the disk failed and something could not be put back yet; the journal stays


class LockedError(PatchkitError):
    exit_code = 6  # another run holds the lock


class DownloadError(PatchkitError):
    exit_code = 7  # a download failed or was refused
