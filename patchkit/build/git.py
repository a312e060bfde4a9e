# SPDX-License-Identifier: Apache-2.0
"""Runs git with the user's settings out of the way; a checkout's own settings run no program.

Only the regenerator uses git. Configuration changes what git prints (prefixes, context, colours,
external differs) and can start programs, so all of it is neutralised here.
"""

import os
import subprocess
from pathlib import Path

from ..errors import CheckoutStateError

_SETTINGS = (
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.attributesFile=/dev/null",
    "core.quotePath=false",
    "core.abbrev=40",
    "protocol.allow=never",
    "safe.directory=*",
)


def environment() -> dict[str, str]:
    """Returns the environment for git: no inherited GIT_*, no user or system configuration."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return kept | {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "LC_ALL": "C",
    }


def run_git(
    folder: Path,
    *arguments: str,
    allowed: tuple[int, ...] = (0,),
    stdin: bytes = b"",
    **variables: str,
) -> bytes:
    """Returns git's standard output.

    Args:
        folder: where git runs.
        arguments: the subcommand and what follows.
        allowed: the exit codes that are not errors.
        stdin: what git reads.
        variables: further environment variables.

    Raises:
        CheckoutStateError: if git is missing or exits with another code.
    """
    command = ["git", *(part for setting in _SETTINGS for part in ("-c", setting)), *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            input=stdin,
            capture_output=True,
            env=environment() | variables,
            check=False,
        )
    except FileNotFoundError as error:
        raise CheckoutStateError("git-missing") from error
    if done.returncode not in allowed:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise CheckoutStateError(
            "git-failed",
            command=" ".join(arguments[:2]),
            found=said[0] if said else "",
            path=folder,
        )
    return done.stdout


def changed_hunks(before: bytes, after: bytes, scratch: Path) -> str:
    """Returns the hunks that turn ``before`` into ``after``, three lines of context, LF.

    ``scratch`` is an empty folder; git compares two files there, outside any repository.
    """
    (scratch / "before").write_bytes(before)
    (scratch / "after").write_bytes(after)
    output = run_git(
        scratch,
        "diff",
        "--no-index",
        "--no-ext-diff",
        "--no-textconv",
        "--no-color",
        "--text",
        "--unified=3",
        "--inter-hunk-context=0",
        "--diff-algorithm=histogram",
        "--",
        "before",
        "after",
        allowed=(0, 1),
        GIT_CEILING_DIRECTORIES=str(scratch.parent),
    ).decode("utf-8")
    start = output.find("\n@@ ")
    return output[start + 1 :] if start >= 0 else ""
