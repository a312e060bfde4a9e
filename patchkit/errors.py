# SPDX-License-Identifier: Apache-2.0
"""The ways in which this package refuses, one class per exit code.

An error carries a reason (a key of ``wording.WORDS``) and data, never a sentence: the sentences
are all in ``wording``, so that they read alike and can be tested.
"""

import shlex
import sys
from pathlib import Path
from typing import Any


def program() -> str:
    """How the user started the applier, so that the next command can be typed as it is shown."""
    started = Path(sys.argv[0])
    if started.name == "apply_patch.py":
        return f"python {shlex.quote(str(started))}"
    return started.name if started.name == "gradloc-patch" else "python apply_patch.py"


class PatchkitError(Exception):
    """A refusal. Subclasses fix the exit code; ``reason`` and ``data`` say what happened."""

    exit_code = 3

    def __init__(self, reason: str, **data: Any) -> None:
        super().__init__(reason)
        self.reason = reason
        self.data = data

    def __str__(self) -> str:
        details = ", ".join(f"{key}={value!r}" for key, value in self.data.items())
        return f"{self.reason} ({details})"


class CheckoutStateError(PatchkitError):
    """The target is not in a state that allows the command."""

    exit_code = 1


class UsageError(PatchkitError):
    """The command line asks for something that makes no sense."""

    exit_code = 2


class IntegrityError(PatchkitError):
    """Bytes are not what a digest, a schema or the patch language demands."""

    exit_code = 3


class TransactionError(PatchkitError):
    """The disk failed and everything was put back."""

    exit_code = 4


class RollbackError(PatchkitError):
    """The disk failed and something could not be put back yet; the journal stays."""

    exit_code = 5


class LockedError(PatchkitError):
    """Another run holds the lock."""

    exit_code = 6


class DownloadError(PatchkitError):
    """A download failed or was refused."""

    exit_code = 7
