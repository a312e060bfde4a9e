# SPDX-License-Identifier: Apache-2.0
"""Runs git with the user's settings out of the way; a checkout's own settings run no program.

Only the builder uses git. Configuration changes what git prints (prefixes, context, colours, external differs) and
can start programs, so all of it is neutralised here.
"""

import os
import subprocess
import tempfile
from pathlib import Path

from ..errors import CheckoutStateError, quoted
from ..patch.content import blob_id
from ..patch.language import parse

_SETTINGS = (
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.attributesFile=/dev/null",
    "core.quotePath=false",
    "core.abbrev=40",
    "protocol.allow=never",
    "safe.directory=*",
)
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "LC_ALL": "C",
}
_PLAIN_DIFF = (
    "--no-index --no-ext-diff --no-textconv --no-color --text --unified=3 --inter-hunk-context=0 "
    "--diff-algorithm=histogram --"
)


def run_git(folder: Path, *arguments: str, allowed: tuple[int, ...] = (0,), **variables: str) -> bytes:
    """Returns git's standard output.

    Args:
        folder: where git runs.
        arguments: the subcommand and what follows.
        allowed: the exit codes that are not errors.
        variables: further environment variables.

    Raises:
        CheckoutStateError: if git is missing or exits with another code.
    """
    command = ["git", *(part for setting in _SETTINGS for part in ("-c", setting)), *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= _ENVIRONMENT | variables
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    except FileNotFoundError as error:
        what = "git is not installed"
        raise CheckoutStateError("git-missing", what, "make_patch.sh needs it.", "Install git.") from error
    if done.returncode not in allowed:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [""]
        what, next_ = f"git {' '.join(arguments[:2])} failed in {folder}", f"git -C {quoted(folder)} status"
        raise CheckoutStateError("git-failed", what, "The checkout is damaged, or not a clone.", next_, found=said[0])
    return done.stdout


def seam(path: str, before: bytes, after: bytes) -> str:
    """Returns the patch section that turns ``before`` into ``after``; git compares two files outside any repository."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        (scratch / "before").write_bytes(before)
        (scratch / "after").write_bytes(after)
        ceiling = {"GIT_CEILING_DIRECTORIES": str(scratch.parent)}
        output = run_git(scratch, "diff", *_PLAIN_DIFF.split(), "before", "after", allowed=(0, 1), **ceiling).decode()
    index = f"index {blob_id(before)}..{blob_id(after)} 100644"
    text = f"diff --git a/{path} b/{path}\n{index}\n--- a/{path}\n+++ b/{path}\n{output[output.find('@@ ') :]}"
    parse(text.encode())
    return text
