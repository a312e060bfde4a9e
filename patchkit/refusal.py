# SPDX-License-Identifier: Apache-2.0
"""Turn every error into a refusal, worded in refusals.txt: what and where, the probable cause, the next command."""

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
_TABLE = Path(__file__).with_name("refusals.txt").read_text(encoding="utf-8")
REFUSALS = {row[0]: row[1:] for line in _TABLE.splitlines() if line[0] != "#" for row in [line.split(" | ")]}


class Refusal(Exception):
    """An error that ends a command with an exit code; ``data`` fills its row: ``expected``, ``found``, ``lines``."""

    def __init__(self, reason: str, **data: Any) -> None:
        code, what, cause, next_ = REFUSALS[reason]
        self.reason, self.code, self.data = reason, int(code), data
        self.what, self.cause = what.format(**data), cause.format(**data)
        self.next = next_.format(**{k: quoted(v) if isinstance(v, Path) else v for k, v in data.items()})
        super().__init__(f"{reason}: {self.what}")

    def parts(self) -> dict[str, str]:
        """Return the refusal's parts in the order in which they are shown."""
        ids = {key: str(self.data[key]) for key in ("expected", "found") if self.data.get(key) is not None}
        return {"reason": self.reason, "what": self.what, **ids, "cause": self.cause, "next": self.next}


class Parser(argparse.ArgumentParser):
    """A parser of the command line whose errors are refusals."""

    def error(self, message: str) -> NoReturn:
        raise Refusal("usage", message=message, prog=self.prog)


def capped(lines: Iterable[str]) -> list[str]:
    """Return at most ``MAX_LISTED`` lines, with the number of those left out."""
    lines = list(lines)
    more = len(lines) - MAX_LISTED
    return lines if more <= 0 else [*lines[:MAX_LISTED], f"... and {more} more"]


def quoted(path: Any) -> str:
    """Return a path quoted for a shell."""
    return shlex.quote(str(path))


def program() -> str:
    """Return how the user started the applier, for the next command to show."""
    started = Path(sys.argv[0])
    if started.name in ("gradloc", "gradloc-patch"):
        return "gradloc patch"
    return f"python {quoted(started) if started.name == 'apply_patch.py' else 'apply_patch.py'}"


def guarded(work: Callable[[], int | None], arguments: list[str]) -> int:
    """Run ``work`` and return its exit code; print a refusal and return its code."""
    for stream in (sys.stdout, sys.stderr):  # a path need not be printable
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        return work() or 0
    except Refusal as error:
        shown = error
    except KeyboardInterrupt:
        shown = Refusal("interrupted")
    except OSError as error:
        shown = disk_failed(error)
    except Exception as error:
        shown = Refusal("internal", error=error)
        shown.__cause__ = error
    if "--debug" in arguments:
        raise shown
    if "--json" in arguments:
        detail = {"state": shown.data.get("state"), "files": shown.data.get("files", [])}
        say(json.dumps({"exit_code": shown.code, "error": shown.parts()} | detail, indent=1))
    else:
        lines = [f"{key + ':':<9} {value}" for key, value in shown.parts().items() if key not in ("reason", "what")]
        say("\n  ".join([f"refused: {shown.what}", *lines, *capped(shown.data.get("lines", ()))]), is_error=True)
    return shown.code


def disk_failed(error: OSError) -> Refusal:
    """Make the refusal for a disk that failed before any change, or with all changes undone."""
    where = f" at {error.filename}" if error.filename else ""
    return Refusal("disk-failed", where=where, found=error.strerror)


def say(text: str, is_error: bool = False) -> None:
    """Print ``text``; a closed pipe or a full disk is not a failure, since the work is done."""
    stream = sys.stderr if is_error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        with contextlib.suppress(OSError, ValueError):  # else Python tries again at its end, and complains
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
