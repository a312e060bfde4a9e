# SPDX-License-Identifier: Apache-2.0
"""What the command lines share: every error ends as a printed refusal and an exit code."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from .errors import MAX_LISTED, PatchkitError, TransactionError, UsageError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are refusals like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError("usage", message, "The command line is misspelt or incomplete.", f"{self.prog} --help")


def guarded(work: Callable[[], int | None], debug: bool = False, as_json: bool = False) -> int:
    """Runs ``work`` and returns its exit code, or that of the refusal that it ended in, printed or as a JSON object.

    With ``debug`` errors come through with their traceback.
    """
    for stream in (sys.stdout, sys.stderr):  # a path need not be printable
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    shown: PatchkitError
    try:
        return work() or 0
    except KeyboardInterrupt:
        shown = PatchkitError("interrupted", "interrupted", "The keyboard.", "--status says whether it was done.")
        shown.exit_code = 130
    except PatchkitError as error:
        shown = error
    except OSError as error:
        shown = disk_failed(error.filename or "?", error)
    except Exception as error:
        what = f"an error in this tool ({type(error).__name__}: {error}); what had begun was put back"
        shown = TransactionError("internal", what, "A bug.", "Run the same with --debug and report what it prints.")
        shown.__cause__ = error
    if debug:
        raise shown
    if as_json:
        document = {"exit_code": shown.exit_code, "state": shown.data.get("state"), "error": shown.parts()}
        say_json(document | {"files": shown.data.get("files", [])[:MAX_LISTED]})
    else:
        say(shown.text(), sys.stderr)
    return shown.exit_code


def disk_failed(path: Any, error: OSError) -> TransactionError:
    """Returns the refusal for a disk that failed before or while anything was changed, and put back."""
    what = f"the disk failed at {path}; everything is as it was before"
    cause, next_ = "It is full, read-only or damaged, or a limit was hit.", "Make room (df -h), then run this again."
    if isinstance(error, PermissionError):
        cause, next_ = "It is another user's, or immutable.", "See ls -ld and lsattr, then run this again."
    failed = TransactionError("disk-failed", what, cause, next_, found=error.strerror)
    failed.__cause__ = error
    return failed


def say(text: str, stream: TextIO | None = None, is_result: bool = False) -> None:
    """Prints ``text``. What was done stands, so a disk that is full or a reader that has gone is no failure.

    Raises TransactionError all the same where ``is_result``: the text is all that the command was for.
    """
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # else Python tries again at its end, and complains
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if is_result and not isinstance(error, BrokenPipeError):
            what = f"the answer could not be written: {error.strerror}"
            raise TransactionError("output-lost", what, "The disk is full.", "Make room: df -h") from error
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            say(f"note: this was done, but not said: {error.strerror}", sys.stderr)


def say_json(document: dict[str, Any], is_result: bool = False) -> None:
    """Prints one JSON object."""
    say(json.dumps(document, indent=1, sort_keys=True, default=os.fspath), is_result=is_result)
