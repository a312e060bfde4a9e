# SPDX-License-Identifier: Apache-2.0
"""What the command lines share: every error ends as a printed refusal and an exit code."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from .errors import PatchkitError, TransactionError
from .wording import parts_of, render_error

INTERRUPTED = 130


def guarded(work: Callable[[], int], debug: bool = False, as_json: bool = False, target: str = "VERL") -> int:
    """Runs ``work`` and returns its exit code, or that of the refusal that it ended in.

    Args:
        work: what the command does; returns an exit code.
        debug: let errors through, with their traceback.
        as_json: print a refusal as one JSON object on standard output.
        target: what to call the target in a refusal that does not say.
    """
    for stream in (sys.stdout, sys.stderr):  # a path need not be printable
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        return work()
    except KeyboardInterrupt:
        say("interrupted: all is as before, or all is done; --status says which", sys.stderr)
        return INTERRUPTED
    except PatchkitError as error:
        shown = error
    except OSError as error:
        shown = TransactionError("disk-failed", path=error.filename or "?", found=error.strerror)
        shown.__cause__ = error
    except Exception as error:
        shown = TransactionError("internal", found=f"{type(error).__name__}: {error}")
        shown.__cause__ = error
    if debug:
        raise shown
    shown.data.setdefault("target", target)
    if as_json:
        say_json(
            {
                "exit_code": shown.exit_code,
                "state": shown.data.get("state"),
                "error": parts_of(shown),
                "files": shown.data.get("files", []),
            }
        )
    else:
        say(render_error(shown), sys.stderr)
    return shown.exit_code


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints ``text``; a reader that has gone away is no reason to fail."""
    try:
        print(text, file=stream or sys.stdout, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else Python complains at its end


def say_json(document: dict[str, Any]) -> None:
    """Prints one JSON object."""
    say(json.dumps(document, indent=1, sort_keys=True, default=os.fspath))
