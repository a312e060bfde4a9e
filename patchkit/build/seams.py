# SPDX-License-Identifier: Apache-2.0
"""Makes seams with git, whose settings cannot change or start anything, and says where they fit another verl.

Only the builder uses git. Configuration changes what it prints (prefixes, context, colours, external differs) and can
start programs, so all of it, the user's and the checkout's, is neutralised here.
"""

import os
import subprocess
import tempfile
from pathlib import Path

from ..errors import CheckoutStateError, quoted
from ..patch.content import blob_id
from ..patch.language import FilePatch, Hunk, parse, split

_SETTINGS = "core.fsmonitor=false core.hooksPath=/dev/null core.attributesFile=/dev/null core.quotePath=false"
_SETTINGS += " core.abbrev=40 protocol.allow=never safe.directory=*"
_ENVIRONMENT = "GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1 GIT_OPTIONAL_LOCKS=0"
_ENVIRONMENT += " GIT_TERMINAL_PROMPT=0 GIT_NO_REPLACE_OBJECTS=1 LC_ALL=C"
_DIFF = "--no-index --no-ext-diff --no-textconv --no-color --text --unified=3 --inter-hunk-context=0"
_DIFF += " --diff-algorithm=histogram -- before after"


def run_git(folder: Path, *arguments: str, allowed: tuple[int, ...] = (0,), **variables: str) -> bytes:
    """Returns the standard output of git in ``folder``; CheckoutStateError if its exit code is not ``allowed``."""
    command = ["git", *(part for setting in _SETTINGS.split() for part in ("-c", setting)), *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= dict(pair.split("=") for pair in _ENVIRONMENT.split()) | variables
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise CheckoutStateError("git-missing", "there is no git", "This needs it.", "Install git.") from error
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
        output = run_git(scratch, "diff", *_DIFF.split(), allowed=(0, 1), **ceiling).decode()
    index = f"index {blob_id(before)}..{blob_id(after)} 100644"
    text = f"diff --git a/{path} b/{path}\n{index}\n--- a/{path}\n+++ b/{path}\n{output[output.find('@@ ') :]}"
    parse(text.encode())
    return text


def relocate(file: FilePatch, data: bytes) -> bytes | None:
    """Returns the result of ``file`` on ``data``, not its base; None unless each hunk fits at just one place."""
    lines, done, at = split(data.decode("utf-8")), [], 0
    for hunk in file.hunks:
        places = _places(hunk, lines)
        if len(places) != 1 or places[0] < at:
            return None
        done += [*lines[at : places[0]], *hunk.new]
        at = places[0] + len(hunk.old)
    return "".join(done + lines[at:]).encode("utf-8")


def judge(file: FilePatch, place: Path) -> tuple[str, str]:
    """Returns ``same``, ``fits``, ``moved``, ``conflict`` or ``missing`` for the file at ``place``, and where."""
    if not place.is_file():
        return "missing", "verl has no such file there"
    data = place.read_bytes()
    if blob_id(data) in (file.before, file.after):
        return "same", "" if blob_id(data) == file.before else "and the patch is on"
    lines, shift, moved, said = split(data.decode("utf-8", "replace")), 0, [], []
    for number, hunk in enumerate(file.hunks, start=1):
        start, places = hunk.old_start - 1, _places(hunk, lines)
        if places:
            shift = min((at - start for at in places), key=lambda by: abs(by - shift))
            if shift:
                moved.append(f"hunk {number} by {shift:+d} lines" + (f" ({len(places)} places)" if places[1:] else ""))
        else:
            said.append(f"hunk {number}, at about line {start + shift + 1}")
    return ("conflict", "; ".join(said + moved)) if said else ("moved", ", ".join(moved)) if moved else ("fits", "")


def _places(hunk: Hunk, lines: list[str]) -> list[int]:
    """Where the hunk's old lines stand, all of them, counted from 0."""
    count, old = len(hunk.old), list(hunk.old)
    return [at for at in range(len(lines) - count + 1) if lines[at] == old[0] and lines[at : at + count] == old]
