# SPDX-License-Identifier: Apache-2.0
"""Every error of these tools ends as one refusal: what and where, expected against found, why probably, what to do.

A refusal is worded where it is raised. Its reason is a name for programs and tests; its exit code is documented.
"""

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, TextIO

MAX_LISTED = 20  # lines of detail that a refusal shows
STATE, USAGE, INTEGRITY, DISK, DISK_TWICE, LOCKED, NETWORK = range(1, 8)
"""The exit codes: of the target's state, the command line, bytes that are not what they must be, a disk that failed
(everything was put back; not everything), another run at work, and pip's download of a verl."""
RESTORE = "git checkout -- patches/   (or get this release of GradLoc again)"


class Refusal(Exception):
    """What ends a command.

    Args:
        code: one of the exit codes.
        reason: a name.
        what: and where.
        cause: the likely one.
        next_: the next command.
        data: ``expected`` and ``found``; ``lines`` of detail; more for ``--json``.
    """

    def __init__(self, code: int, reason: str, what: str, cause: str, next_: str, **data: Any) -> None:
        super().__init__(f"{reason}: {what}")
        self.code, self.reason, self.what, self.cause, self.next, self.data = code, reason, what, cause, next_, data

    def parts(self) -> dict[str, str]:
        """The refusal's parts in the order in which they are shown."""
        between = {key: str(self.data[key]) for key in ("expected", "found") if self.data.get(key) is not None}
        return {"reason": self.reason, "what": self.what, **between, "cause": self.cause, "next": self.next}

    def text(self) -> str:
        """The refusal as it is printed."""
        shown = [f"  {key + ':':<9} {value}" for key, value in self.parts().items() if key not in ("reason", "what")]
        return "\n".join(
            [f"refused: {self.what}", *shown, *(f"  {line}" for line in capped(self.data.get("lines", ())))]
        )


def capped(lines: Iterable[str]) -> list[str]:
    """At most ``MAX_LISTED`` lines, with the number of those left out."""
    lines = list(lines)
    more = len(lines) - MAX_LISTED
    return lines if more <= 0 else [*lines[:MAX_LISTED], f"... and {more} more"]


def quoted(path: Any) -> str:
    """A path as a shell takes it."""
    return shlex.quote(str(path))


def program() -> str:
    """How the user started the applier, so that the next command can be typed as it is shown."""
    started = Path(sys.argv[0])
    if started.name == "apply_patch.py":
        return f"python {quoted(started)}"
    return started.name if started.name == "gradloc-patch" else "python apply_patch.py"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are refusals like all others."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(USAGE, "usage", message, "The command line is misspelt or incomplete.", f"{self.prog} --help")


def guarded(work: Callable[[], int | None], arguments: list[str]) -> int:
    """Runs ``work`` and returns its exit code, or prints the refusal that it ended in and returns its code.

    With ``--debug`` among the arguments errors come through with their traceback; with ``--json``, as an object.
    """
    for stream in (sys.stdout, sys.stderr):  # a path need not be printable
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        return work() or 0
    except KeyboardInterrupt:
        shown = Refusal(130, "interrupted", "interrupted", "The keyboard.", "--status says whether it was done.")
    except Refusal as error:
        shown = error
    except OSError as error:
        shown = disk_failed(error.filename or "?", error)
    except Exception as error:
        what = f"an error in this tool ({type(error).__name__}: {error}); what had begun was put back"
        shown = Refusal(DISK, "internal", what, "A bug.", "Run the same with --debug and report what it prints.")
        shown.__cause__ = error
    if "--debug" in arguments:
        raise shown
    if "--json" in arguments:
        detail = {key: value for key, value in shown.data.items() if key in ("state", "files")}
        say_json({"exit_code": shown.code, "error": shown.parts(), "state": None, **detail})
    else:
        say(shown.text(), sys.stderr)
    return shown.code


def disk_failed(path: Any, error: OSError) -> Refusal:
    """Of a disk that failed before anything was changed, or with all of it put back."""
    what = f"the disk failed at {path}; everything is as it was before"
    cause, next_ = "It is full, read-only or damaged, or a limit was hit.", "Make room (df -h), then run this again."
    if isinstance(error, PermissionError):
        cause, next_ = "It is another user's, or immutable.", "See ls -ld and lsattr, then run this again."
    return Refusal(DISK, "disk-failed", what, cause, next_, found=error.strerror)


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints ``text``. What was done stands, so a reader that has gone or a full disk behind it is no failure."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        with contextlib.suppress(OSError, ValueError):  # else Python tries again at its end, and complains
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say_json(document: dict[str, Any]) -> None:
    """Prints one JSON object."""
    say(json.dumps(document, indent=1, sort_keys=True, default=os.fspath))
