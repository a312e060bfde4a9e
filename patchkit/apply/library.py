# SPDX-License-Identifier: Apache-2.0
"""The editions of the patch that a run knows, and their verified sections.

They come from ``patches/`` (with its manifest), from a file or a download that the user names, and
from the copy that the applier left in the checkout. No byte of a patch is read before its digest
is known and none is used before it matches.
"""

from dataclasses import replace
from pathlib import Path

from ..build.compose import MANIFEST_NAME, PATCH_NAME, SUMS_NAME
from ..errors import IntegrityError, PatchkitError, UsageError
from ..patch import language, sums
from ..patch.digest import sha256_hex
from ..patch.language import FilePatch
from ..patch.manifest import Edition, FileChange, Manifest, load

PUBLISHED_SHA256 = "9bd7c21f7a95a5b993af36d15166b822dcc7ac0c3fa067d011c1cc61949ba925"
"""The GradLoc patch that was released to the public: it stops every training run."""


class Library:
    """Editions in order, the wanted one first, each with its sections on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = load(folder / MANIFEST_NAME)
        self.editions: tuple[Edition, ...] = self.manifest.editions
        self._patches: dict[str, bytes] = {}
        self._sections: dict[str, dict[str, FilePatch]] = {}
        self._verify_current()

    @property
    def wanted(self) -> Edition:
        return self.editions[0]

    def want(self, version: str) -> None:
        """Puts the edition ``version`` first; raises UsageError if there is none."""
        chosen = [edition for edition in self.editions if edition.version == version]
        if not chosen:
            known = ", ".join(edition.version for edition in self.editions)
            raise UsageError("version-unknown", expected=known, found=version)
        self.editions = tuple(chosen + [e for e in self.editions if e is not chosen[0]])

    def want_patch(self, data: bytes, label: str) -> None:
        """Puts the edition with the verified patch ``data`` first, known to the manifest or not."""
        digest = sha256_hex(data)
        known = [edition for edition in self.editions if edition.patch_sha256 == digest]
        chosen = known[0] if known else self._foreign(data, f"{label} (sha256 {digest[:12]})")
        rest = [e for e in self.editions if e is not chosen and self._shares_base(e, chosen)]
        self.editions = (chosen, *rest)

    def know_patch(self, data: bytes, label: str) -> bool:
        """Adds the edition with the patch ``data`` as a known one; False if it is of no use."""
        digest = sha256_hex(data)
        if any(edition.patch_sha256 == digest for edition in self.editions):
            return True
        try:
            edition = self._foreign(data, f"{label} (sha256 {digest[:12]})")
        except PatchkitError:
            return False
        if not self._shares_base(edition, self.wanted):
            return False
        self.editions += (edition,)
        return True

    def patch(self, edition: Edition) -> bytes:
        """Returns the edition's patch, verified."""
        digest = edition.patch_sha256
        if digest not in self._patches:
            path = self.folder / edition.patch_name
            data = read_capped(path, edition.patch_size, edition.patch_name)
            check_digest(data, digest, edition.patch_name)
            self._patches[digest] = data
        return self._patches[digest]

    def sections(self, edition: Edition) -> dict[str, FilePatch]:
        """Returns the edition's sections by path, compared with what the manifest says of it."""
        digest = edition.patch_sha256
        if digest not in self._sections:
            sections = {file.path: file for file in language.parse(self.patch(edition))}
            _compare(edition, sections)
            self._sections[digest] = sections
        return self._sections[digest]

    def _verify_current(self) -> None:
        """The checksum list, the manifest and the patch agree, or nothing is done."""
        current = self.manifest.current
        name = SUMS_NAME
        try:
            data = read_capped(self.folder / name, sums.MAX_BYTES, name)
        except IntegrityError as error:
            raise IntegrityError("sums-missing", path=PATCH_NAME, name=PATCH_NAME) from error
        listed = sums.digest_for(PATCH_NAME, data, name)
        if listed != current.patch_sha256:
            raise IntegrityError("sums-manifest", path=name, expected=current.patch_sha256, found=listed)
        self.sections(current)

    def _foreign(self, data: bytes, label: str) -> Edition:
        sections = language.parse(data)
        digest = sha256_hex(data)
        self._patches[digest] = data
        self._sections[digest] = {file.path: file for file in sections}
        changes = tuple(FileChange(file.path, file.before, file.after) for file in sections)
        # Where the manifest knows a base file, its sha256 is checked beside the blob id.
        known = {file.path: file.before for e in self.manifest.editions for file in e.files}
        changes = tuple(
            replace(change, before=known[change.path])
            if change.before and known.get(change.path) and _same_blob(change, known[change.path])
            else change
            for change in changes
        )
        return Edition(label, "", digest, len(data), changes)

    def _shares_base(self, one: Edition, other: Edition) -> bool:
        bases = {file.path: file.before for file in other.files}
        return all(
            file.path not in bases or (file.before and file.before.blob) == (bases[file.path] and bases[file.path].blob)
            for file in one.files
        )


def _same_blob(change: FileChange, known) -> bool:
    return change.before.blob == known.blob


def _compare(edition: Edition, sections: dict[str, FilePatch]) -> None:
    listed = {file.path: file for file in edition.files}
    for path in sorted(listed.keys() ^ sections.keys()):
        raise IntegrityError("manifest-disagrees", path=path)
    for path, file in listed.items():
        section = sections[path]
        before = file.before.blob if file.before else None
        if (section.before.blob if section.before else None) != before or (section.after.blob != file.after.blob):
            raise IntegrityError("manifest-disagrees", path=path)


def read_capped(path: Path, limit: int, name: str) -> bytes:
    """Returns a file's bytes; refuses one of more than ``limit`` bytes without reading it all."""
    try:
        with path.open("rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise IntegrityError("patch-unreadable", path=name, found=error.strerror) from error
    if len(data) > limit:
        raise IntegrityError("patch-too-large", path=name, expected=f"at most {limit} bytes")
    return data


def check_digest(data: bytes, expected: str, name: str) -> None:
    """Raises IntegrityError unless ``data`` has the sha256 ``expected``; names the known patch."""
    found = sha256_hex(data)
    if found == PUBLISHED_SHA256:
        raise IntegrityError("patch-published", path=name, found=f"sha256 {found}")
    if found != expected:
        raise IntegrityError("patch-digest", path=name, expected=expected, found=found)
