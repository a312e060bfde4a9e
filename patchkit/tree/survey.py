# SPDX-License-Identifier: Apache-2.0
"""Decides a checkout's state from nothing but the bytes of the files that the editions touch."""

import stat
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path

from ..patch.content import blob_id, read_regular
from ..patch.manifest import Base, Edition
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
class FileState:
    """What stands at a path: its content and its blob id, or the kind of thing that is in the way."""

    content: bytes | None
    obstacle: str | None = None
    blob: str | None = None


@dataclass(frozen=True)
class Survey:
    """A checkout measured against the editions for one verl, the wanted one first.

    ``before`` has the base's blob id of each path, None for a file that an edition adds; ``strangers`` are paths of
    unknown content; ``elsewhere`` says of which other verl one is; ``is_at_base`` that commit or version is the base's.
    """

    base: Base
    editions: tuple[Edition, ...]
    files: dict[str, FileState]
    before: dict[str, str | None]
    strangers: tuple[str, ...]
    is_at_base: bool
    elsewhere: dict[str, str]

    @cached_property
    def edition(self) -> Edition | None:
        """The edition that the checkout has, if it has one whole."""
        known = () if self.strangers or self.is_as(None) else self.editions
        return next(filter(self.is_as, known), None)

    @cached_property
    def state(self) -> State:
        """What the checkout is."""
        if self.strangers:
            return State.DRIFTED if self.is_at_base else State.WRONG_BASE
        if self.edition:
            return State.APPLIED if self.edition is self.editions[0] else State.OTHER_VERSION
        return State.PRISTINE if self.is_as(None) else State.PARTIAL

    def holds(self, path: str, blob: str | None) -> bool:
        """True if ``path`` holds a file of this id; of None, if nothing is there."""
        return self.files[path].obstacle is None and self.files[path].blob == blob

    def is_as(self, edition: Edition | None) -> bool:
        """True if every path is as ``goal`` says."""
        return all(self.holds(path, blob) for path, blob in self.goal(edition).items())

    def goal(self, edition: Edition | None) -> dict[str, str | None]:
        """Returns each path's blob id under ``edition``; under None, the base's."""
        return self.before | {path: file.after for path, file in (edition.files if edition else {}).items()}

    @property
    def only_leftovers(self) -> bool:
        """PARTIAL, but verl's own files are the base's: only files that we add are there."""
        verls = (path for path, before in self.before.items() if before is not None)
        return self.state is State.PARTIAL and all(self.holds(path, self.before[path]) for path in verls)


def survey(checkout: Checkout, families: list[tuple[Base, tuple[Edition, ...]]]) -> Survey:
    """Returns what the checkout holds, measured against the verl of ``families`` whose patch fits it best."""
    paths = {path for _, editions in families for edition in editions for path in edition.files}
    files = {path: read_plain(checkout.root, path) for path in sorted(paths)}
    surveys = [_measure(checkout, base, editions, files) for base, editions in families]
    best = min(surveys, key=lambda one: (bool(one.strangers), not one.is_at_base, len(one.strangers)))
    odd = {path for path in best.strangers if files[path].blob}
    places = ((path, one.base.tag) for one in surveys for path in odd.intersection(one.files).difference(one.strangers))
    return replace(best, elsewhere=dict(places))


def _measure(checkout: Checkout, base: Base, editions: tuple[Edition, ...], seen: dict[str, FileState]) -> Survey:
    known: dict[str, set[str | None]] = {}
    for edition in editions:
        for path, file in edition.files.items():
            known.setdefault(path, set()).update((file.before, file.after))
    before = {path: file.before for edition in reversed(editions) for path, file in edition.files.items()}
    files = {path: seen[path] for path in sorted(before)}
    strangers = tuple(path for path, at in files.items() if at.obstacle or at.blob not in known[path])
    at_base = checkout.head == base.commit if checkout.head else base.is_said_by(checkout.version)
    return Survey(base, editions, files, before, strangers, at_base, {})


def read_plain(root: Path, path: str) -> FileState:
    """Returns the content of the plain file ``path``, None if nothing is there, or the obstacle.

    No link is followed, in any folder of the path, and nothing is opened that could block.
    """
    try:
        for parent in reversed([*Path(path).parents][:-1]):
            mode = (root / parent).lstat().st_mode
            if not stat.S_ISDIR(mode):
                return FileState(None, f"{parent} is {_kind(mode)}, not a folder")
        content = read_regular(root / path, MAX_FILE_BYTES)
        return FileState(content, None, blob_id(content))
    except FileNotFoundError:
        return FileState(None)
    except OSError as error:
        return FileState(None, _kind((root / path).lstat().st_mode, error.strerror))


def _kind(mode: int, otherwise: str | None = "a plain file") -> str:
    tests = ((stat.S_ISLNK, "a symbolic link"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"))
    return next((name for test, name in tests if test(mode)), otherwise or "unreadable")
