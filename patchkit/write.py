# SPDX-License-Identifier: Apache-2.0
"""Swaps several files as one: all of them or none, whatever fails or is killed when; one run at a time.

In the state folder, ``run/then`` gets the files to be and ``run/now`` those that they replace. A journal says what is
about to happen, then each file is moved in. While the journal is there, the next run moves the old ones back. What is
applied stays in ``applied``: the patch, and the files before it.
"""

import contextlib
import fcntl
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .language import VERSION_FILE, is_safe, parse, sha256_hex
from .refusal import DISK, DISK_TWICE, LOCKED, STATE, Refusal, disk_failed, quoted
from .tree import read_plain, read_regular

JOURNAL, _POLL_S = "run/journal.json", 0.05
Files = Mapping[str, bytes | None]  # contents by path; None means that there is no file
Changes = Mapping[str, tuple[bytes | None, bytes | None]]  # contents now and then


def do(call: Callable[..., Any], *arguments: Any) -> Any:
    """Change the disk by ``call``: every change goes through here, so that a test can make any one of them fail."""
    return call(*arguments)


@contextlib.contextmanager
def locked(root: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the tree's lock, which is on verl's version file; wait that long for another run."""
    place, ends = root / VERSION_FILE, time.monotonic() + wait_s
    with open(place, "r+b" if os.access(place, os.W_OK) else "rb") as handle:  # NFS locks what is open for writing
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if not isinstance(error, BlockingIOError):
                    what, cause = f"{root} has no locks", "Its file system is a network's, mounted without (nolock)."
                    raise Refusal(STATE, "no-locks", what, cause, "Patch a copy on a local disk.") from error
                if time.monotonic() >= ends:
                    what, cause = f"another run is at work in {root}", "Its lock goes when it ends."
                    raise Refusal(LOCKED, "locked", what, cause, "Run this again, or with --wait SECONDS.") from error
                time.sleep(_POLL_S)
        yield


def preflight(root: Path, state: Path, changes: Changes) -> None:
    """Refuse what would stop ``changes`` from being written: a folder, a file, the disk."""
    needed = 2**20 + 2 * sum(len(data or b"") for sides in changes.values() for data in sides)
    for folder in {root, *((root / path).parent for path in changes)} if changes else ():
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise _blocked(f"{folder} may not be written to", f"ls -ld {quoted(folder)}")
        if (room := os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize) < needed:
            what, ids = f"{folder} has too little room; nothing was written", {"expected": needed, "found": room}
            raise Refusal(DISK, "disk-too-small", what, "The disk is full.", f"df -h {quoted(folder)}", **ids)
    for place in (state, state / "run", state / "applied"):
        if os.path.lexists(place) and not stat.S_ISDIR(place.lstat().st_mode):
            raise _blocked(f"{place} is not a folder of this tool", "Move it away.")
    for path, (now, _) in changes.items():  # a replacement would succeed, and undo what its owner meant by it
        if now is not None and not (root / path).stat().st_mode & 0o200:
            raise _blocked(f"{root / path} is read-only", f"chmod u+w {quoted(root / path)}")


def _blocked(what: str, next_: str) -> Refusal:
    return Refusal(STATE, "blocked", what, "It is another user's, read-only, missing, or something else.", next_)


def remembered(state: Path) -> tuple[bytes, dict[str, bytes | None]] | None:
    """Return the patch that the state folder remembers, and the files before it; None unless both are whole."""
    with contextlib.suppress(OSError, Refusal):
        patch, before = read_regular(state / "applied/patch"), dict[str, bytes | None]()
        for path, file in parse(patch).items():
            before[path] = None if file.before is None else read_regular(state / "applied/before" / path)
            file.forward(before[path])
        return patch, before
    return None


def remember(root: Path, state: Path, patch: bytes, before: Files) -> None:
    """Have the state folder remember that ``patch`` is on the tree, and the files before it."""
    do(shutil.rmtree, state / "run/applied", True)
    _stage(root, state, {"applied/patch": patch} | {f"applied/before/{path}": data for path, data in before.items()})
    do(shutil.rmtree, state / "applied", True)
    do(os.rename, state / "run/applied", state / "applied")


def swap(root: Path, state: Path, changes: Changes, applied: tuple[bytes, Files] | None) -> None:
    """Make ``changes`` and remember what is ``applied`` now, or raise with everything as it was."""
    digests = {path: [_digest(data) for data in sides] for path, sides in changes.items()}
    try:
        do(shutil.rmtree, state / "run", True)
        staged = {f"{side}/{path}": both[i] for path, both in changes.items() for i, side in enumerate(("now", "then"))}
        _stage(root, state, staged | {"new.json": json.dumps(digests, indent=1).encode()})
        do(os.rename, state / "run/new.json", state / JOURNAL)
        _sync(state / "run")
        for path, (now, then) in digests.items():
            _check(root, path, now)  # once more, just before
            _move(root, state / "run/then", path, then is None)
        for path, (_, then) in digests.items():
            _check(root, path, then)
        if applied is not None:
            remember(root, state, *applied)
        do(os.unlink, state / JOURNAL)
    except BaseException as error:  # an interrupt from the keyboard too
        recover(root, state, False, f"{error}; then ")
        if isinstance(error, OSError):
            raise disk_failed(str(error.filename or "a file").removeprefix(f"{root}/"), error) from error
        raise
    _tidy(state, applied is not None)


def interrupted(root: Path, state: Path, is_strict: bool = True) -> dict[str, tuple[bytes | None, str | None]]:
    """Return what an interrupted run changed: each file's content before it, and the digest after.

    A file that was edited since is refused, or left out where ``is_strict`` is off.
    """
    found = dict[str, tuple[bytes | None, str | None]]()
    try:
        for path, (now, then) in json.loads(read_regular(state / JOURNAL, 2**20)).items():
            if not is_safe(path):  # it may have come with an unpacked archive
                raise ValueError(path)
            there, saved = (read_plain(folder, path).content for folder in (root, state / "run/now"))
            if _digest(there) in (now, then):
                found[path] = (there if _digest(there) == now else saved), then
            elif is_strict:
                what, cause = f"{path} was edited after a run was interrupted there", "It is undone as a whole."
                next_ = (
                    f"Move that edit elsewhere, restore {quoted(root / path)} from {state / 'run/now'}, run this again."
                )
                raise Refusal(STATE, "journal-conflict", what, cause, next_)
            if path in found and _digest(found[path][0]) != now:
                raise ValueError(path)
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        what, cause = f"the journal {state / JOURNAL} of an interrupted run cannot be used", "It is damaged."
        next_ = f"--status names each file's state; restore what it names, then: rm -r {quoted(state)}"
        raise Refusal(DISK_TWICE, "journal-broken", what, cause, next_) from error
    return found


def recover(root: Path, state: Path, is_strict: bool = True, cause: str = "") -> bool:
    """Put back what an interrupted run has changed, if one was."""
    if not (state / "run").is_dir():
        return False
    entries, was_begun = interrupted(root, state, is_strict), (state / JOURNAL).exists()
    try:
        for path, (now, then) in entries.items():
            if then != _digest(now) and then == _digest(read_plain(root, path).content):
                _move(root, state / "run/now", path, now is None)
        if was_begun:
            do(os.unlink, state / JOURNAL)
    except OSError as error:
        what = f"the disk failed, and so did putting things back; the journal is {state / JOURNAL}"
        because, next_ = "It is full, read-only or damaged.", "Repair it, then run this again: that undoes it first."
        found = f"{cause}{error.strerror}"
        raise Refusal(DISK_TWICE, "disk-failed-again", what, because, next_, found=found) from error
    _tidy(state)
    return was_begun


def _move(root: Path, staged: Path, path: str, is_gone: bool) -> None:
    do(os.unlink, root / path) if is_gone else do(os.replace, staged / path, root / path)
    _sync((root / path).parent)


def _tidy(state: Path, is_applied: bool = True) -> None:
    """Remove what a run has left, and the state folder itself where nothing is applied."""
    with contextlib.suppress(OSError):  # the changes are made: the next run removes what cannot be removed now
        do(shutil.rmtree, state / "run" if is_applied and (state / "applied").exists() else state, True)


def _stage(root: Path, state: Path, files: Files) -> None:
    """Write ``files`` below ``run``, durably, each with the mode, attributes and owner of the one that it is for."""
    ignore = {} if (state / ".gitignore").exists() else {"../.gitignore": b"*\n"}
    for name, data in (ignore | {name: data for name, data in files.items() if data is not None}).items():
        place, its_own = state / "run" / name, root / name.partition("/")[2]
        like = its_own if name[0] in "nt" and its_own.is_file() else root / "verl/__init__.py"
        do(os.makedirs, place.parent, 0o777, True)
        with do(open, place, "xb") as stream:
            do(stream.write, data)
            stream.flush()
            _give(place, like)
            shutil.copystat(like, place)
            os.utime(place)
            do(os.fsync, stream.fileno())
    for folder in (state, *(place for place in state.rglob("*") if place.is_dir())):
        _give(folder, root)
        folder.chmod(stat.S_IMODE(root.stat().st_mode) | 0o700)  # no umask: others have to read it, too
        _sync(folder)


def _give(place: Path, like: Path) -> None:
    if os.geteuid() == 0:  # what root makes in a user's checkout is the user's
        os.chown(place, like.stat().st_uid, like.stat().st_gid)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # some file systems sync no folder
        os.fsync(handle)
    os.close(handle)


def _check(root: Path, path: str, digest: str | None) -> None:
    if (there := read_plain(root, path)).obstacle or _digest(there.content) != digest:
        what, cause = f"{path} was changed while this ran; all else was put back", "Another program wrote to it."
        raise Refusal(STATE, "changed-meanwhile", what, cause, "Look at it with --status, then run this again.")


def _digest(data: bytes | None) -> str | None:
    return None if data is None else sha256_hex(data)
