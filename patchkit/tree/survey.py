# SPDX-License-Identifier: Apache-2.0
"""Decides a checkout's state from nothing but the bytes of the files that the editions touch."""

import os
import stat
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from .. import BASE_VERSIONS
from ..patch.digest import Digest
from ..patch.manifest import Edition, FileChange
from .checkout import Checkout

MAX_FILE_BYTES = 16 * 2**20


class State(Enum):
    """What a checkout is, judged by content."""

    PRISTINE = "every touched file is the base's"
    APPLIED = "every touched file is the patch's"
    OTHER_VERSION = "every touched file is that of another known version of the patch"
    PARTIAL = "a mix of known contents: some files are patched and some are not"
    DRIFTED = "some touched file is neither the base's nor the patch's"
    WRONG_BASE = "another commit of verl, and touched files differ"


@dataclass(frozen=True)
class Found:
    """What stands at a path: its content, or the kind of thing that is in the way."""

    content: bytes | None
    obstacle: str | None = None


@dataclass(frozen=True)
class Survey:
    """The state, and for every path that any edition touches what was found there."""

    state: State
    edition: Edition | None
    """The edition that is applied (APPLIED, OTHER_VERSION), else None."""
    found: dict[str, Found]
    base: dict[str, Digest | None]
    """The base's digest of each path; None for a file that an edition adds."""
    strangers: tuple[str, ...]
    """Paths whose content is in no edition and not the base's."""

    def is_base(self, path: str) -> bool:
        """True if ``path`` holds what the base has there."""
        return _is(self.found[path], self.base[path])

    def holds(self, path: str, digest: Digest) -> bool:
        """True if ``path`` holds a file of this digest."""
        return _is(self.found[path], digest)

    @property
    def only_leftovers(self) -> bool:
        """PARTIAL, but verl's own files are the base's: only files that we add are there."""
        return self.state is State.PARTIAL and all(
            self.is_base(path) for path, before in self.base.items() if before is not None
        )


def survey(checkout: Checkout, editions: tuple[Edition, ...], base_commit: str) -> Survey:
    """Returns what the checkout holds, measured against ``editions`` (the current one first)."""
    changes = [file for edition in editions for file in edition.files]
    base = {file.path: file.before for file in reversed(changes)}
    found = {path: read_plain(checkout.root, path) for path in sorted(base)}
    known: dict[str, list[Digest | None]] = {path: [before] for path, before in base.items()}
    for file in changes:
        known[file.path].append(file.after)
    strangers = tuple(path for path in found if not any(_is(found[path], digest) for digest in known[path]))
    state, edition = _judge(found, base, editions)
    if strangers:
        if checkout.head is not None:
            elsewhere = checkout.head != base_commit
        else:
            elsewhere = checkout.version not in BASE_VERSIONS
        state = State.WRONG_BASE if elsewhere else State.DRIFTED
    return Survey(state, edition, found, base, strangers)


def _judge(
    found: dict[str, Found], base: dict[str, Digest | None], editions: tuple[Edition, ...]
) -> tuple[State, Edition | None]:
    if all(_is(found[path], digest) for path, digest in base.items()):
        return State.PRISTINE, None
    for edition in editions:
        if all(_is(found[path], digest) for path, digest in wanted(edition, base).items()):
            is_current = edition is editions[0]
            return (State.APPLIED if is_current else State.OTHER_VERSION), edition
    return State.PARTIAL, None


def wanted(edition: Edition | None, base: dict[str, Digest | None]) -> dict[str, Digest | None]:
    """Returns each path's digest under ``edition``; under None, the base's."""
    after: dict[str, Digest | None] = dict(base)
    files: tuple[FileChange, ...] = edition.files if edition else ()
    return after | {file.path: file.after for file in files}


def _is(found: Found, digest: Digest | None) -> bool:
    if found.obstacle is not None:
        return False
    if found.content is None or digest is None:
        return found.content is None and digest is None
    return digest.admits(found.content)


def read_plain(root: Path, path: str) -> Found:
    """Returns the content of the plain file ``path``, None if nothing is there, or the obstacle.

    No link is followed, in any folder of the path, and nothing is opened that could block.
    """
    place = root
    for part in path.split("/")[:-1]:
        place = place / part
        try:
            mode = place.lstat().st_mode
        except FileNotFoundError:
            return Found(None)
        if not stat.S_ISDIR(mode):
            return Found(None, f"{place.relative_to(root)} is {_kind(mode)}, not a folder")
    try:
        handle = os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return Found(None)
    except OSError as error:
        try:
            return Found(None, _kind((root / path).lstat().st_mode, error.strerror))
        except OSError:
            return Found(None, error.strerror)
    info = os.fstat(handle)
    if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_FILE_BYTES:
        os.close(handle)
        return Found(None, _kind(info.st_mode, f"a file of {info.st_size} bytes"))
    with os.fdopen(handle, "rb") as stream:
        return Found(stream.read())


def _kind(mode: int, otherwise: str | None = None) -> str:
    for test, name in (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a named pipe"),
    ):
        if test(mode):
            return name
    return (otherwise or "a plain file") if stat.S_ISREG(mode) else "no plain file"
