# SPDX-License-Identifier: Apache-2.0
"""Composes the patch, its checksum and the manifest from their sources: pure, byte-stable.

The package ``gradloc/`` becomes ``verl/gradloc/``; ``verl_overrides/<base>/`` holds, in verl's own
folders, the edits of verl's files (``NAME.patch``, one section each, taken over word for word) and
files that are new there. Every section is applied to the base here, so what cannot be applied
cannot be built.
"""

import re
import stat
from dataclasses import dataclass
from pathlib import Path

from .. import BASE_COMMIT
from ..errors import IntegrityError
from ..patch.digest import ABSENT_BLOB, Digest, sha256_hex
from ..patch.language import FilePatch, parse
from ..patch.manifest import Edition, FileChange, Manifest, render
from ..patch.paths import check_path
from ..patch.splice import forward
from ..patch.text import hidden_character

PATCH_NAME = "gradloc.patch"
SUMS_NAME = PATCH_NAME + ".sha256"
MANIFEST_NAME = "manifest.json"
BASE_TAG = "v0.7.0"
PREAMBLE = f"""\
Description: GradLoc for verl, VERSION
 Names the tokens that spiked a gradient, why, and the step without them.
Origin: built by make_patch.sh from gradloc/ and verl_overrides/; edit there, never here
Forwarded: no
Applies-To: verl {BASE_TAG}, commit {BASE_COMMIT}

"""


PACKAGE = "verl/gradloc/"
"""Where the patch puts the package."""
_VERSION = re.compile(r'^__version__ = "([0-9A-Za-z.+-]{1,40})"$', re.MULTILINE)
LEFT_OUT = ("report/", "verl_engine/")
"""Folders of the package that a patched verl does not need."""


@dataclass(frozen=True)
class Sources:
    """What a patch is made of: the text of each new file and of each seam, by verl path."""

    new_files: dict[str, str]
    seams: dict[str, str]


@dataclass(frozen=True)
class Folders:
    """Where the sources of one base's patch lie."""

    package: Path
    overrides: Path
    """``verl_overrides/<base>``."""

    def place(self, path: str) -> Path:
        """Where the new file ``path`` of verl has its source."""
        if path.startswith(PACKAGE):
            return self.package / path.removeprefix(PACKAGE)
        return self.overrides / path

    def seam(self, path: str) -> Path:
        """Where the edits of verl's own file ``path`` lie."""
        return self.overrides / f"{path}.patch"


def read_sources(folders: Folders) -> Sources:
    """Returns the sources in ``folders``; refuses what a patch must not carry."""
    new_files, seams = {}, {}
    for path in _files_under(folders.package):
        name = path.relative_to(folders.package).as_posix()
        if not name.startswith(LEFT_OUT):
            new_files[PACKAGE + name] = read_text(path)
    for path in _files_under(folders.overrides):
        name = path.relative_to(folders.overrides).as_posix()
        if name.endswith(".patch"):
            seams[name.removesuffix(".patch")] = read_text(path)
        else:
            new_files[name] = read_text(path)
    for path in new_files.keys() & seams.keys():
        raise IntegrityError("build-twice", path=path)
    return Sources(new_files, seams)


def _files_under(folder: Path) -> list[Path]:
    """Every entry that is no folder; caches (hidden or ``__pycache__``) are not sources."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.rglob("*")
        if not (path.is_dir() and not path.is_symlink())
        and not any(part == "__pycache__" or part.startswith(".") for part in path.relative_to(folder).parts)
    )


def read_text(path: Path) -> str:
    """Returns the text of ``path``, which must be what ``check_text`` allows and a plain file."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise IntegrityError("build-symlink", path=str(path))
    if not stat.S_ISREG(mode):
        raise IntegrityError("build-not-a-file", path=str(path))
    if mode & 0o111:
        raise IntegrityError("build-mode", path=str(path), expected="644", found=f"{mode & 0o777:o}")
    return check_text(path.read_bytes(), str(path))


def check_text(data: bytes, path: str) -> str:
    """Returns ``data`` as text; raises IntegrityError for what a patch must not carry."""
    if b"\0" in data:
        raise IntegrityError("build-binary", path=path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise IntegrityError("build-binary", path=path) from error
    if not text:
        raise IntegrityError("build-empty", path=path)
    if "\r" in text:
        raise IntegrityError("build-crlf", path=path, line=text[: text.index("\r")].count("\n") + 1)
    if not text.endswith("\n"):
        raise IntegrityError("build-no-final-newline", path=path)
    for number, line in enumerate(text.split("\n"), start=1):
        found = hidden_character(line)
        if found:
            raise IntegrityError("build-hidden-character", path=path, line=number, found=found)
    return text


def new_file_section(path: str, text: str) -> str:
    """Returns the patch section that adds ``path``, exactly as git writes it."""
    lines = text.split("\n")[:-1]
    count = "1" if len(lines) == 1 else f"1,{len(lines)}"
    return "".join(
        [
            f"diff --git a/{path} b/{path}\n",
            "new file mode 100644\n",
            f"index {ABSENT_BLOB}..{Digest.of(text.encode()).blob}\n",
            "--- /dev/null\n",
            f"+++ b/{path}\n",
            f"@@ -0,0 +{count} @@\n",
            *(f"+{line}\n" for line in lines),
        ]
    )


def version_of(sources: Sources) -> str | None:
    """Returns the version that the package among the sources names, if it is there."""
    found = _VERSION.search(sources.new_files.get(PACKAGE + "__init__.py", ""))
    return found[1] if found else None


def compose_patch(sources: Sources) -> bytes:
    """Returns the patch: the preamble, then every section in the order of the paths."""
    sections = {path: new_file_section(path, text) for path, text in sources.new_files.items()}
    for path, text in sources.seams.items():
        check_path(path)
        files = parse(text.encode())
        if [file.path for file in files] != [path]:
            named = ", ".join(file.path for file in files)
            raise IntegrityError("build-seam-path", path=path, expected=path, found=named)
        if not text.startswith("diff --git "):
            raise IntegrityError("build-seam-preamble", path=path)
        sections[path] = text
    if not sections:
        raise IntegrityError("build-nothing")
    return (
        PREAMBLE.replace("VERSION", version_of(sources) or "no version")
        + "".join(sections[path] for path in sorted(sections))
    ).encode()


def describe(version: str, patch_name: str, patch: bytes, base: Path) -> Edition:
    """Returns the manifest's entry for ``patch``, having applied it to the tree ``base``."""
    return Edition(
        version,
        patch_name,
        sha256_hex(patch),
        len(patch),
        tuple(_describe_file(file, base) for file in parse(patch)),
    )


def _describe_file(file: FilePatch, base: Path) -> FileChange:
    path = base / file.path
    if file.before is None:
        if path.exists():
            raise IntegrityError("build-base-has", path=file.path)
        return FileChange(file.path, None, Digest.of(forward(file, b"")))
    if not path.is_file():
        raise IntegrityError("build-base-lacks", path=file.path)
    content = path.read_bytes()
    if not file.before.admits(content):
        found = f"git blob {Digest.of(content).blob[:12]}"
        raise IntegrityError("build-base-differs", path=file.path, expected=file.before.short(), found=found)
    return FileChange(file.path, Digest.of(content), Digest.of(forward(file, content)))


def compose(sources: Sources, base: Path, older: Path | None = None) -> dict[str, bytes]:
    """Returns what ``patches/`` must hold, by file name.

    Args:
        sources: the new files and seams.
        base: a pristine tree of the pinned verl.
        older: a folder of earlier editions, ``gradloc-<version>.patch`` each; they stay in the
            manifest, so that a checkout that has one of them is known and can be upgraded.
    """
    patch = compose_patch(sources)
    version = version_of(sources)
    if version is None:
        raise IntegrityError("build-no-version", path=PACKAGE + "__init__.py")
    editions = [describe(version, PATCH_NAME, patch, base)]
    for path in sorted(older.glob("*.patch")) if older and older.is_dir() else ():
        version = path.stem.removeprefix("gradloc-")
        editions.append(describe(version, f"older/{path.name}", path.read_bytes(), base))
    manifest = render(Manifest(BASE_COMMIT, BASE_TAG, tuple(editions)))
    sums = f"{sha256_hex(patch)}  {PATCH_NAME}\n".encode()
    return {PATCH_NAME: patch, SUMS_NAME: sums, MANIFEST_NAME: manifest}
