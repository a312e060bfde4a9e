# SPDX-License-Identifier: Apache-2.0
"""The editions of the patch that a run knows, verl by verl.

They come from ``patches/`` (its manifest and its history), from a file or a download that the user names, and from
the copy that the applier left in the checkout. No byte of a patch is read before its digest is known and none is used
before it matches.
"""

from pathlib import Path

from ..errors import GET_AGAIN, RESTORE, IntegrityError, PatchkitError, UsageError
from ..patch import manifest as manifests
from ..patch import sums
from ..patch.content import sha256_hex
from ..patch.edition import Edition, recall
from ..patch.manifest import Base

MANIFEST_NAME, HISTORY_NAME = "manifest.json", "history.json"
PUBLISHED_SHA256 = "9bd7c21f7a95a5b993af36d15166b822dcc7ac0c3fa067d011c1cc61949ba925"
"""The GradLoc patch that was released to the public: it stops every training run."""
PUBLISHED_RESULTS = {
    "verl/trainer/ppo/ray_trainer.py": "fbf2ab2b134437aa817ee939b816d66e7e21599e",
    "verl/utils/reward_score/__init__.py": "f5ed543c899ceb88f5ea0930701fe33f193550c7",
    "verl/utils/reward_score/math_verify.py": "560c26e3b1c8e9109c5a3309e79e804be2318402",
    "verl/workers/actor/dp_actor.py": "8ecaaf3c713c31116d8335e6f21f9f6b18668981",
}
"""What that patch makes of v0.7.0's files: git's ids."""


class Library:
    """Families of editions: for each verl the wanted edition, then the others that a checkout may hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = manifests.parse(_from_patches(folder / MANIFEST_NAME, manifests.MAX_BYTES))
        history = folder / HISTORY_NAME
        released = recall(_from_patches(history, manifests.MAX_BYTES) if history.is_file() else b"")
        self.families: list[tuple[Base, tuple[Edition, ...]]] = []
        for entry in self.manifest.entries:
            listed = _from_patches(folder / f"{entry.name}.sha256", sums.MAX_BYTES)
            if sums.digest_for(entry.name, listed, f"{entry.name}.sha256") != entry.sha256:
                what = f"{entry.name}.sha256 and the manifest disagree about the patch"
                raise IntegrityError("sums-manifest", what, "patches/ was put together from two versions.", RESTORE)
            data = _from_patches(folder / entry.name, entry.size_bytes)
            check_digest(data, entry.sha256, entry.name)
            edition = Edition.of(data, self.manifest.version, entry.base.tag)
            older = (e for e in released if e.base == entry.base.tag and e.sha256 != entry.sha256)
            self.families.append((entry.base, (edition, *older)))

    @property
    def editions(self) -> list[Edition]:
        """Every edition, verl by verl."""
        return [edition for _, editions in self.families for edition in editions]

    def only(self, base: str | None, version: str | None, digest: str | None) -> None:
        """Keeps the verls whose wanted edition is the one that the options name; refuses if there is none."""
        if version and version != self.manifest.version:
            known = {edition.version for edition in self.editions}
            what = f"this tool carries version {self.manifest.version} of the patch, not {version}"
            cause = "It is an older release." if version in known else "It is misspelt, or of another release."
            next_ = f"Get the release {version}, and use its apply_patch.py or name its patch with --patch-file."
            raise UsageError("version-unknown", what, cause, next_, expected=self.manifest.version, found=version)
        tags = ", ".join(b.tag for b, _ in self.families)
        self.families = [(b, e) for b, e in self.families if base in (None, b.tag, b.tag[1:], b.commit)]
        if not self.families:
            what, cause = f"there is no patch for {base}", "It is misspelt, or there is none."
            raise UsageError("base-unknown", what, cause, "Leave --base out: the content decides.", expected=tags)
        found = ", ".join(editions[0].sha256 for _, editions in self.families)
        if digest:
            self.families = [(b, e) for b, e in self.families if e[0].sha256 == digest]
        if not self.families:
            what, cause = "the patch is not the one that --sha256 names", "It was changed, or is another release."
            raise IntegrityError("patch-digest", what, cause, GET_AGAIN, expected=digest, found=found)

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
            same = [edition for edition in editions if edition.sha256 == digest]
            try:
                known = Edition.of(
                    data, same[0].version if same else f"an earlier build (sha256 {digest[:12]})", base.tag
                )
            except PatchkitError:
                return None
            if same and same[0].patch:
                return same[0]
            if same or known.shares_base(editions[0]):
                rest = [edition for edition in editions[1:] if edition.sha256 != digest]
                self.families[place] = (base, (editions[0], known, *rest))
                return known
        return None


def _from_patches(path: Path, limit: int) -> bytes:
    """Returns the bytes of one of our own files."""
    try:
        return read_capped(path, limit, path.name)
    except FileNotFoundError as error:
        what = f"{path.name} is missing in {path.parent}"
        raise IntegrityError("patches-incomplete", what, "The folder patches/ is not complete.", RESTORE) from error


def read_capped(path: Path, limit: int, name: str) -> bytes:
    """Returns a file's bytes (or a pipe's); refuses more than ``limit`` bytes without reading them all."""
    try:
        with path.open("rb") as stream:
            data = stream.read(limit + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        what, cause = f"{name} cannot be read", "It is a folder, or there is no permission."
        raise IntegrityError("patch-unreadable", what, cause, "Check it.", found=error.strerror) from error
    if len(data) > limit:
        what = f"{name} is too large"
        raise IntegrityError(
            "patch-too-large", what, "It is another file.", GET_AGAIN, expected=f"at most {limit} bytes"
        )
    return data


def check_digest(data: bytes, expected: str | None, name: str) -> None:
    """Raises IntegrityError unless ``data`` has the sha256 ``expected``; names the public patch."""
    found = sha256_hex(data)
    if found == PUBLISHED_SHA256:
        raise IntegrityError(
            "patch-published",
            f"{name} is the publicly released GradLoc patch, which this tool does not apply",
            "With it every training run stops at its first update: it reads options that verl's config does not have "
            "(AttributeError: 'FSDPActorConfig' object has no attribute 'spike_detection'). It also names files by "
            "abbreviated ids and leaves one without a final newline, so its result cannot be verified.",
            "Leave out --patch-file and --patch-url: the patch of this tool has the same options, and trains.",
            found=f"sha256 {found}",
        )
    if expected is None:
        what, cause = f"no checksum for {name}", "A patch is only applied when something says what it should be."
        next_ = "Add --sha256 HEX with the sha256 that its author published (or --sha256-file, or a file beside it)."
        raise IntegrityError("sums-missing", what, cause, next_)
    if found != expected:
        what, cause = f"the sha256 of {name} is not the expected one", "The file was changed, or is another version."
        raise IntegrityError("patch-digest", what, cause, GET_AGAIN, expected=expected, found=found)
