# SPDX-License-Identifier: Apache-2.0
"""Ends every error as one refusal: what and where, expected against found, why probably, the next command."""

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

MAX_LISTED = 20  # lines of detail that a refusal shows
STATE, USAGE, INTEGRITY, DISK, DISK_TWICE, LOCKED, NETWORK = range(1, 8)  # docs/applier.md explains them


class Refusal(Exception):
    """Ends a command with an exit code; ``data`` has ``expected``, ``found``, ``lines`` of detail, more for --json."""

    def __init__(self, code: int, reason: str, what: str, cause: str, next_: str, **data: Any) -> None:
        super().__init__(f"{reason}: {what}")
        self.code, self.reason, self.what, self.cause, self.next, self.data = code, reason, what, cause, next_, data

    def parts(self) -> dict[str, str]:
        """Return the refusal's parts in the order in which they are shown."""
        ids = {key: str(self.data[key]) for key in ("expected", "found") if self.data.get(key) is not None}
        return {"reason": self.reason, "what": self.what, **ids, "cause": self.cause, "next": self.next}


class Parser(argparse.ArgumentParser):
    """Parses a command line; its errors are refusals."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(USAGE, "usage", message, "The command line is misspelt or incomplete.", f"{self.prog} --help")


def capped(lines: Iterable[str]) -> list[str]:
    """Return at most ``MAX_LISTED`` lines, with the number of those left out."""
    lines = list(lines)
    more = len(lines) - MAX_LISTED
    return lines if more <= 0 else [*lines[:MAX_LISTED], f"... and {more} more"]


def quoted(path: Any) -> str:
    """Return a path as a shell takes it."""
    return shlex.quote(str(path))


def program() -> str:
    """Return how the user started the applier, so that the next command can be typed as it is shown."""
    started = Path(sys.argv[0])
    if started.name == "gradloc-patch":
        return started.name
    return f"python {quoted(started) if started.name == 'apply_patch.py' else 'apply_patch.py'}"


def guarded(work: Callable[[], int | None], arguments: list[str]) -> int:
    """Run ``work`` and return its exit code, or print the refusal that it ended in and return its code."""
    for stream in (sys.stdout, sys.stderr):  # a path need not be printable
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        return work() or 0
    except Refusal as error:
        shown = error
    except KeyboardInterrupt:
        shown = Refusal(130, "interrupted", "interrupted", "The keyboard.", "--status says whether it was done.")
    except OSError as error:
        shown = disk_failed(error)
    except Exception as error:
        what = f"an error in this tool ({type(error).__name__}: {error}); what had begun was put back"
        shown = Refusal(DISK, "internal", what, "A bug.", "Run the same with --debug and report what it prints.")
        shown.__cause__ = error
    if "--debug" in arguments:
        raise shown
    if "--json" in arguments:
        detail = {"state": shown.data.get("state"), "files": shown.data.get("files", [])}
        say(json.dumps({"exit_code": shown.code, "error": shown.parts()} | detail, indent=1))
    else:
        lines = [f"  {key + ':':<9} {value}" for key, value in shown.parts().items() if key not in ("reason", "what")]
        lines += [f"  {line}" for line in capped(shown.data.get("lines", ()))]
        say("\n".join([f"refused: {shown.what}", *lines]), is_error=True)
    return shown.code


def disk_failed(error: OSError) -> Refusal:
    """Make the refusal for a disk that failed before anything was changed, or with all of it put back."""
    what, next_ = (
        f"the disk failed at {error.filename or '?'}; everything is as before",
        "df -h and lsattr; then again.",
    )
    return Refusal(DISK, "disk-failed", what, "It is full, damaged, or another user's.", next_, found=error.strerror)


def say(text: str, is_error: bool = False) -> None:
    """Print ``text``. What was done is done: a reader that has gone or a full disk behind it is no failure."""
    stream = sys.stderr if is_error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        with contextlib.suppress(OSError, ValueError):  # else Python tries again at its end, and complains
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
