# SPDX-License-Identifier: Apache-2.0
"""The editions of the patch that a run knows, verl by verl.

They come from ``patches/``, from a file or a download that the user names, and from the copy that the applier left in
the checkout. No byte of a patch is used before its digest matches.
"""

import argparse
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import GET_AGAIN, RESTORE, IntegrityError, PatchkitError, UsageError
from ..patch import manifest as manifests
from ..patch.content import sha256_hex
from ..patch.language import MAX_BYTES
from ..patch.manifest import Base, Edition
from . import download

MANIFEST_NAME, RELEASED = "manifest.json", "released"
PUBLISHED_SHA256 = "9bd7c21f7a95a5b993af36d15166b822dcc7ac0c3fa067d011c1cc61949ba925"
PUBLISHED_RESULTS = {  # of the GradLoc patch that was released to the public, on v0.7.0: git's ids
    "verl/trainer/ppo/ray_trainer.py": "fbf2ab2b134437aa817ee939b816d66e7e21599e",
    "verl/utils/reward_score/__init__.py": "f5ed543c899ceb88f5ea0930701fe33f193550c7",
    "verl/utils/reward_score/math_verify.py": "560c26e3b1c8e9109c5a3309e79e804be2318402",
    "verl/workers/actor/dp_actor.py": "8ecaaf3c713c31116d8335e6f21f9f6b18668981",
}


class Library:
    """Families of editions: for each verl the wanted edition, then the others that a checkout may hold."""

    def __init__(self, folder: Path) -> None:
        def read(name: str, limit: int) -> bytes:
            return read_capped(folder / name, limit, name, "patches/ is not complete.", RESTORE)

        self.manifest = manifests.parse(read(MANIFEST_NAME, manifests.MAX_BYTES))
        past = (f"{RELEASED}/{path.name}" for path in sorted((folder / RELEASED).glob("*.patch")))
        released = [Edition.released(read(name, MAX_BYTES), name) for name in past]
        self.families: list[tuple[Base, tuple[Edition, ...]]] = []
        for entry in self.manifest.entries:
            listed = f"{entry.name}.sha256"
            if manifests.digest_for(entry.name, read(listed, manifests.MAX_LIST_BYTES), listed) != entry.sha256:
                what, cause = f"{listed} and the manifest disagree about the patch", "patches/ is of two versions."
                raise IntegrityError("sums-manifest", what, cause, RESTORE)
            data = read(entry.name, entry.size_bytes)
            check_digest(data, entry.sha256, entry.name)
            edition = Edition.of(data, self.manifest.version, entry.base)
            older = (e for e in released if e.base == entry.base and e.sha256 != entry.sha256)
            self.families.append((Base(entry.base, entry.commit), (edition, *older)))

    def only(self, base: str | None, version: str | None, digest: str | None) -> None:
        """Keeps the verls whose wanted edition is the one that the options name; refuses if there is none."""
        if version and version != (carried := self.manifest.version):
            is_older = version in {edition.version for _, editions in self.families for edition in editions}
            what = f"this tool carries version {carried} of the patch, not {version}"
            cause = "It is an older release." if is_older else "It is misspelt, or of another release."
            next_ = f"Get the release {version}, and use its apply_patch.py or name its patch with --patch-file."
            raise UsageError("version-unknown", what, cause, next_, expected=carried, found=version)
        tags = ", ".join(b.tag for b, _ in self.families)
        self.families = [(b, e) for b, e in self.families if base in (None, b.tag, b.tag[1:], b.commit)]
        if not self.families:
            what, next_ = f"there is no patch for {base}", "Leave --base out: the content decides."
            raise UsageError("base-unknown", what, "It is misspelt, or there is none.", next_, expected=tags)
        found = ", ".join(editions[0].sha256 for _, editions in self.families)
        self.families = [(b, e) for b, e in self.families if digest in (None, e[0].sha256)]
        if not self.families:
            what, cause = "the patch is not the one that --sha256 names", "It was changed, or is another release."
            raise IntegrityError("patch-pinned", what, cause, GET_AGAIN, expected=digest, found=found)

    def want_patch(self, data: bytes, label: str) -> None:
        """Puts the edition with the verified patch ``data`` first, known to the manifest or not."""
        digest = sha256_hex(data)
        self.families = [(b, e) for b, e in self.families if e[0].sha256 == digest] or self.families
        if self.families[0][1][0].sha256 != digest:
            foreign = Edition.of(data, f"{label} (sha256 {digest[:12]})", "")
            shared = [(b, (foreign, *e)) for b, e in self.families if foreign.shares_base(e[0])]
            self.families = shared or [(Base("of that patch", ""), (foreign,))]

    def know_patch(self, data: bytes) -> Edition | None:
        """Adds the edition with the patch ``data``, which lay in a checkout; returns it, or None if it is of no use."""
        digest = sha256_hex(data)
        for place, (base, editions) in enumerate(self.families):
            same = next((edition for edition in editions if edition.sha256 == digest), None)
            if same and same.patch:
                return same
            try:
                known = Edition.of(data, same.version if same else f"an earlier build (sha256 {digest[:12]})", base.tag)
            except PatchkitError:
                return None
            if same or known.shares_base(editions[0]):
                rest = (edition for edition in editions[1:] if edition.sha256 != digest)
                self.families[place] = (base, (editions[0], known, *rest))
                return known
        return None


def read_capped(path: Path, limit: int, name: str, cause: str = "It is misspelt.", next_: str = "Check it.") -> bytes:
    """Returns a file's bytes (or a pipe's); refuses more than ``limit`` bytes without reading them all."""
    try:
        with path.open("rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        what = f"{name} cannot be read"
        raise IntegrityError("file-unreadable", what, cause, next_, found=error.strerror) from error
    if len(data) > limit:
        what, expected = f"{name} is too large", f"at most {limit} bytes"
        raise IntegrityError("patch-too-large", what, "It is another file.", GET_AGAIN, expected=expected)
    return data


def check_digest(data: bytes, expected: str | None, name: str) -> None:
    """Raises IntegrityError unless ``data`` has the sha256 ``expected``; names the public patch."""
    found = sha256_hex(data)
    if found == PUBLISHED_SHA256:
        what = f"{name} is the publicly released GradLoc patch, which this tool does not apply"
        stops = "With it every training run stops at its first update: it reads options that verl's config lacks"
        cause = f"{stops}; and with abbreviated ids, and a file without a final newline, it cannot be verified."
        next_ = "Leave out --patch-file and --patch-url: the patch of this tool has the same options, and trains."
        raise IntegrityError("patch-published", what, cause, next_, found=f"sha256 {found}")
    if expected is None:
        what, cause = f"no checksum for {name}", "A patch is only applied when something says what it should be."
        next_ = "Add --sha256 HEX with the sha256 that its author published (or --sha256-file, or a file beside it)."
        raise IntegrityError("sums-missing", what, cause, next_)
    if found != expected:
        what, cause = f"the sha256 of {name} is not the expected one", "The file was changed, or is another version."
        raise IntegrityError("patch-digest", what, cause, GET_AGAIN, expected=expected, found=found)


def expected_digest(options: argparse.Namespace, name: str) -> tuple[str | None, list[str]]:
    """Returns what ``--sha256`` or ``--sha256-file`` says of the patch ``name``, and notes on how far to trust it."""
    place, notes = options.sha256_file, []
    if not place:
        return options.sha256 and options.sha256.lower(), []
    is_url = "://" in place
    limit = manifests.MAX_LIST_BYTES
    listed = download.fetch(place, limit) if is_url else read_capped(Path(place), limit, place)
    if is_url and options.patch_url and urlsplit(options.patch_url).hostname == urlsplit(place).hostname:
        note = "the checksum came from the server that sent the patch: it proves that it arrived whole, not who made it"
        notes.append(f"{note}; --sha256 with a digest known otherwise does")
    return manifests.digest_for(name, listed, place), notes


def named_patch(library: Library, options: argparse.Namespace) -> tuple[bytes, str, list[str]]:
    """Returns the verified patch of ``--patch-file`` or ``--patch-url``, its name, and notes on how far to trust it."""
    file, url = options.patch_file, options.patch_url
    name = urlsplit(url).path.rsplit("/", 1)[-1] if url else Path(file).name
    expected, notes = expected_digest(options, name)
    beside = Path(f"{file}.sha256")
    if file and not expected and beside.is_file():
        expected = manifests.digest_for(name, read_capped(beside, manifests.MAX_LIST_BYTES, str(beside)), str(beside))
    ours = {entry.sha256: entry.size_bytes for entry in library.manifest.entries}
    if url:
        expected = expected or next((e.sha256 for e in library.manifest.entries if e.name == name), next(iter(ours)))
        data = download.fetch(url, limit=ours.get(expected, MAX_BYTES), size=ours.get(expected))
    else:
        data = read_capped(Path(file), MAX_BYTES, file)
    if expected is None and sha256_hex(data) in ours:
        expected = sha256_hex(data)
    check_digest(data, expected, file or url)
    return data, name, notes
