# SPDX-License-Identifier: Apache-2.0
"""What ``patches/`` is made of, and the making: pure and byte-stable.

The package ``gradloc/`` becomes ``verl/gradloc/``; ``verl_overrides/<tag>/`` holds, in verl's own folders, the edits
of verl's files (``NAME.patch``, one section each, taken over word for word) and files that are new there. What the
first verl has serves the others too: its new files, and its edits of files that are the same in both. Every section
is applied to the base here, so what cannot be applied cannot be built.
"""

import re
import stat
from dataclasses import dataclass
from pathlib import Path

from ..apply.library import HISTORY_NAME, MANIFEST_NAME
from ..errors import IntegrityError, quoted
from ..patch.content import ABSENT, blob_id, hidden_character, sha256_hex, short
from ..patch.edition import recall
from ..patch.language import parse
from ..patch.manifest import Base, Entry, Manifest, render
from ..patch.paths import check_path
from ..patch.splice import forward
from .drift import relocate
from .git import seam

PACKAGE = "verl/gradloc/"
"""Where the patch puts the package."""
LEFT_OUT = ("report/", "verl_engine/")
"""Folders of the package that a patched verl does not need."""
_VERSION = re.compile(r'^__version__ = "([0-9A-Za-z.+-]{1,40})"$', re.MULTILINE)
_PREAMBLE = """\
Description: GradLoc for verl, {version}
 Names the tokens that spiked a gradient, why, and the step without them.
Origin: built by make_patch.sh from gradloc/ and verl_overrides/; edit there, never here
Forwarded: no
Applies-To: verl {base.tag}, commit {base.commit}

"""
_TAKE_AGAIN = "Take it from a checkout again: bash make_patch.sh --repo CHECKOUT"


@dataclass(frozen=True)
class Sources:
    """What a patch is made of: the text of each new file and of each seam, by verl path."""

    new_files: dict[str, str]
    seams: dict[str, str]

    @property
    def version(self) -> str | None:
        """The version that the package names, if it is among the sources."""
        found = _VERSION.search(self.new_files.get(PACKAGE + "__init__.py", ""))
        return found[1] if found else None

    def patch(self, base: Base) -> bytes:
        """Returns the patch for ``base``: the preamble, then every section in the order of the paths."""
        sections = {path: new_file_section(path, text) for path, text in self.new_files.items()}
        for path, text in self.seams.items():
            check_path(path)
            named = [file.path for file in parse(text.encode())]
            if named != [path] or not text.startswith("diff --git "):
                what, found = (
                    f"the seam {path}.patch does not hold exactly the one section for {path}",
                    ", ".join(named),
                )
                cause = "It was renamed or edited by hand."
                raise IntegrityError("build-seam", what, cause, _TAKE_AGAIN, expected=path, found=found)
            sections[path] = text
        if not sections:
            what, cause = (
                "there are neither new files nor seams to build from",
                "Nothing was taken from a checkout yet.",
            )
            raise IntegrityError("build-nothing", what, cause, "bash make_patch.sh --repo CHECKOUT")
        preamble = _PREAMBLE.format(version=self.version or "no version", base=base)
        return (preamble + "".join(sections[path] for path in sorted(sections))).encode()


@dataclass(frozen=True)
class Folders:
    """Where the sources lie: the package, and ``verl_overrides/`` with a folder for each verl."""

    package: Path
    overrides: Path
    shared: str = "v0.7.0"

    def bases(self, pinned: list[Base]) -> list[Base]:
        """Returns the verls that have sources."""
        return [base for base in pinned if (self.overrides / base.tag).is_dir()]

    def place(self, tag: str, path: str, base_blob: str | None = None) -> Path:
        """Where the source of ``path`` lies: of a new file, or of the edits of verl's file of id ``base_blob``."""
        if path.startswith(PACKAGE):
            return self.package / path.removeprefix(PACKAGE)
        name = f"{path}.patch" if base_blob else path
        own, shared = self.overrides / tag / name, self.overrides / self.shared / name
        serves = not base_blob or (shared.is_file() and parse(shared.read_bytes())[0].before == base_blob)
        return shared if serves and not own.is_file() else own

    def read(self, tag: str, tree: Path) -> Sources:
        """Returns the sources of the patch for the verl ``tree`` of a tag; refuses what a patch must not carry."""
        new_files, seams, lacking = {}, {}, []
        for path in _files_under(self.package):
            name = path.relative_to(self.package).as_posix()
            if not name.startswith(LEFT_OUT):
                new_files[PACKAGE + name] = read_text(path)
        for folder in dict.fromkeys((self.overrides / self.shared, self.overrides / tag)):
            for path in _files_under(folder):
                name = path.relative_to(folder).as_posix()
                own = self.overrides / tag / name
                if not name.endswith(".patch"):
                    new_files[name] = read_text(path)
                elif path == own:
                    seams[name.removesuffix(".patch")] = read_text(path)
                elif not own.is_file():
                    text = _carried_over(path, tree / name.removesuffix(".patch"))
                    seams |= {name.removesuffix(".patch"): text} if text else {}
                    lacking += [] if text else [name]
        for twice in new_files.keys() & seams.keys():
            cause = "A file that verl has was copied to verl_overrides/."
            raise IntegrityError("build-twice", f"{twice} is both a new file and a seam", cause, "Keep one of the two.")
        if lacking:
            what = f"verl {tag} has no seam of its own for {len(lacking)} files that differ there, first {lacking[0]}"
            next_ = (
                f"bash make_patch.sh --drift {quoted(tree)}   (says what moved), then port them in a checkout of {tag}"
            )
            raise IntegrityError("build-seam-lacking", what, f"Only {self.shared} has one.", next_, diff=lacking)
        return Sources(new_files, seams)


def _carried_over(path: Path, place: Path) -> str | None:
    """The seam at ``path`` for the file at ``place`` of another verl, as it is or moved; None where it does not fit."""
    text = read_text(path)
    file, data = parse(text.encode())[0], place.read_bytes() if place.is_file() else b""
    if blob_id(data) == file.before:
        return text
    result = relocate(file, data)
    return seam(file.path, data, result) if result else None


def _files_under(folder: Path) -> list[Path]:
    """Every entry that is no folder; caches (hidden or ``__pycache__``) are not sources."""
    entries = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    hidden = ("__pycache__", ".")
    return [path for path in entries if not any(part.startswith(hidden) for part in path.relative_to(folder).parts)]


def read_text(path: Path) -> str:
    """Returns the text of ``path``, which must be what ``check_text`` allows and a plain file."""
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        raise not_plain(str(path), "a symbolic link" if stat.S_ISLNK(mode) else "no plain file")
    if mode & 0o111:
        raise wrong_mode(str(path), "644", f"{mode & 0o777:o}")
    return check_text(path.read_bytes(), str(path))


def not_plain(path: str, kind: str) -> IntegrityError:
    """Returns the refusal of a link or the like."""
    return IntegrityError(
        "build-not-plain", f"{path} is {kind}", "A patch carries plain files only.", "Put the file itself."
    )


def wrong_mode(path: str, expected: str, found: str) -> IntegrityError:
    """Returns the refusal of a file with a mode of its own."""
    what, next_ = f"{path} is executable or has another special mode", f"chmod 644 {quoted(path)}"
    return IntegrityError("build-mode", what, "A patch of ours sets no modes.", next_, expected=expected, found=found)


def check_text(data: bytes, path: str) -> str:
    """Returns ``data`` as text; raises IntegrityError for what a patch must not carry."""
    text = data.decode("utf-8", "replace")
    if b"\0" in data or text.encode() != data:
        what = f"{path} is not UTF-8 text"
        raise IntegrityError("build-binary", what, "A patch carries text only.", "Keep it out of the tree.")
    if not text:
        cause = "GNU patch cannot make an empty file."
        raise IntegrityError("build-empty", f"{path} is empty", cause, "Give it its licence header.")
    if "\r" in text:
        what = f"line {text[: text.index(chr(13))].count(chr(10)) + 1} of {path} has a carriage return"
        cause = "An editor or git's autocrlf wrote the line ends of Windows."
        raise IntegrityError("build-crlf", what, cause, f"sed -i 's/\\r$//' {quoted(path)}")
    if not text.endswith("\n"):
        what, next_ = f"{path} does not end in a newline", f"echo >> {quoted(path)}"
        raise IntegrityError("build-no-final-newline", what, "An editor left it out.", next_)
    for number, line in enumerate(text.split("\n"), start=1):
        found = hidden_character(line)
        if found:
            what = f"line {number} of {path} holds an invisible or reordering character"
            cause, next_ = "Such characters make code read other than it runs.", "Remove it, or write it as an escape."
            raise IntegrityError("build-hidden-character", what, cause, next_, found=found)
    return text


def new_file_section(path: str, text: str) -> str:
    """Returns the patch section that adds ``path``, exactly as git writes it."""
    lines = text.split("\n")[:-1]
    count = "1" if len(lines) == 1 else f"1,{len(lines)}"
    header = f"diff --git a/{path} b/{path}\nnew file mode 100644\nindex {ABSENT}..{blob_id(text.encode())}\n"
    return header + f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +{count} @@\n" + "".join(f"+{line}\n" for line in lines)


def check_fits(patch: bytes, tree: Path) -> None:
    """Raises IntegrityError unless ``patch`` applies to the pristine verl ``tree``."""
    for file in parse(patch):
        place = tree / file.path
        found = blob_id(place.read_bytes()) if place.is_file() else None
        if found != file.before:
            what = f"{file.path} is another file in verl than the one that the sources start from"
            cause = "Its seam was made for another verl, or a new file of ours has the name of one of verl's."
            ids = {"expected": short(file.before), "found": short(found)}
            raise IntegrityError("build-base-differs", what, cause, _TAKE_AGAIN, path=file.path, **ids)
        forward(file, place.read_bytes() if found else b"")


def patch_name(base: Base, is_first: bool) -> str:
    """Returns the file name of the patch for ``base``."""
    return "gradloc.patch" if is_first else f"gradloc-{base.tag}.patch"


def compose(folders: Folders, trees: dict[Base, Path]) -> dict[str, bytes]:
    """Returns what ``patches/`` must hold, by file name; ``trees`` are the pristine verls, the first one first."""
    files: dict[str, bytes] = {}
    entries: list[Entry] = []
    version = None
    for base, tree in trees.items():
        sources = folders.read(base.tag, tree)
        patch, name = sources.patch(base), patch_name(base, not entries)
        check_fits(patch, tree)
        version = sources.version
        if version is None:
            what, cause = f"{PACKAGE}__init__.py names no version", "Its line __version__ = ... is gone."
            raise IntegrityError("build-no-version", what, cause, "Put it back: it is the one place that names it.")
        entries.append(Entry(base, name, sha256_hex(patch), len(patch)))
        files |= {name: patch, f"{name}.sha256": f"{sha256_hex(patch)}  {name}\n".encode()}
    history = folders.overrides / HISTORY_NAME
    if history.is_file():
        files[HISTORY_NAME] = history.read_bytes()
        for release in recall(files[HISTORY_NAME]):
            for file in release.files.values():
                known = next((tree for base, tree in trees.items() if base.tag == release.base), None)
                place = known / file.path if known else None
                if place and (blob_id(place.read_bytes()) if place.is_file() else None) != file.before:
                    what, cause = f"{HISTORY_NAME} is wrong about {file.path} in {release.version}", "It was edited."
                    raise IntegrityError("build-history", what, cause, "git checkout -- verl_overrides/history.json")
    return files | {MANIFEST_NAME: render(Manifest(version or "", tuple(entries)))}
