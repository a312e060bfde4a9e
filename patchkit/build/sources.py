# SPDX-License-Identifier: Apache-2.0
"""What ``patches/`` is made of, and the making: pure and byte-stable.

The package ``gradloc/`` becomes ``verl/gradloc/``; ``verl_overrides/<tag>/`` holds, in verl's own folders, files that
are new there and edits (``NAME.patch``, one section, taken word for word). What the first verl has serves the others:
its new files, and its edits where each hunk fits at one place alone. What cannot be applied cannot be built.
"""

import re
import stat
from dataclasses import dataclass
from pathlib import Path

from ..apply.library import MANIFEST_NAME
from ..errors import IntegrityError, quoted
from ..patch.content import ABSENT, blob_id, check_path, hidden_character, sha256_hex, short
from ..patch.language import forward, parse
from ..patch.manifest import Base, Entry, Manifest, render
from .seams import relocate, seam

PACKAGE = "verl/gradloc/"  # where the patch puts the package
LEFT_OUT = ("report/", "adapters/verl09/", "adapters/trl/", "trl.py")  # what a patched verl does not need of it
_VERSION = re.compile(r'^__version__ = "([0-9A-Za-z.+-]{1,40})"$', re.MULTILINE)
_PREAMBLE = """\
Description: GradLoc for verl, {version}
 Names the tokens that spiked a gradient, why, and the step without them.
Origin: built by make_patch.sh from gradloc/ and verl_overrides/; edit there, never here
Forwarded: no
Applies-To: verl {base.tag}, commit {base.commit}

"""
SPDX = "# SPDX-License-Identifier: Apache-2.0\n"
LICENCE_HEAD = (Path(__file__).parent / "licence_head.txt").read_text(encoding="utf-8")
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
                what = f"the seam {path}.patch does not hold exactly the one section for {path}"
                raise IntegrityError("build-seam", what, "It was renamed or edited by hand.", _TAKE_AGAIN, found=named)
            sections[path] = text
        if not sections:
            what, next_ = "there are neither new files nor seams to build from", "bash make_patch.sh --repo CHECKOUT"
            raise IntegrityError("build-nothing", what, "Nothing was taken from a checkout yet.", next_)
        preamble = _PREAMBLE.format(version=self.version or "no version", base=base)
        return (preamble + "".join(sections[path] for path in sorted(sections))).encode()


@dataclass(frozen=True)
class Folders:
    """Where the sources lie: the package, and ``verl_overrides/`` with a folder for each verl."""

    package: Path
    overrides: Path
    shared: str = "v0.7.0"

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
        package = {PACKAGE + name: path for name, path in _files_under(self.package) if not name.startswith(LEFT_OUT)}
        new_files = {name: stamped(read_text(path)) for name, path in package.items()}
        seams, lacking = dict[str, str](), list[str]()
        for folder in dict.fromkeys((self.overrides / self.shared, self.overrides / tag)):
            for name, path in _files_under(folder):
                own, verls = self.overrides / tag / name, name.removesuffix(".patch")
                if verls == name:
                    new_files[name] = read_text(path)
                elif path == own or not own.is_file():
                    text = read_text(path) if path == own else _carried_over(path, tree / verls)
                    seams |= {verls: text} if text else {}
                    lacking += [] if text else [name]
        if new_files.keys() & seams.keys():
            what = f"{', '.join(new_files.keys() & seams.keys())} is both a new file and a seam"
            raise IntegrityError("build-twice", what, "A file that verl has was copied there.", "Keep one of the two.")
        if lacking:
            what = f"verl {tag} has no seam of its own for {len(lacking)} files that differ there, first {lacking[0]}"
            next_ = f"bash make_patch.sh --drift {quoted(tree)}   (says what moved); then port them in a checkout"
            raise IntegrityError("build-seam-lacking", what, f"Only {self.shared} has one.", next_, diff=lacking)
        return Sources(new_files, seams)


def stamped(text: str) -> str:
    """A source of the package as the patch ships it: under the licence head that verl's check wants."""
    return LICENCE_HEAD + text.removeprefix(SPDX) if text.startswith(SPDX) else text


def unstamped(path: str, text: str) -> str:
    """What lies here of a new file at ``path``: the way back from :func:`stamped`."""
    is_stamped = path.startswith(PACKAGE) and text.startswith(LICENCE_HEAD)
    return SPDX + text.removeprefix(LICENCE_HEAD) if is_stamped else text


def _carried_over(path: Path, place: Path) -> str | None:
    """The seam at ``path`` for the file at ``place`` of another verl, as it is or moved; None where it does not fit."""
    text = read_text(path)
    file, data = parse(text.encode())[0], place.read_bytes() if place.is_file() else b""
    result = None if blob_id(data) == file.before else relocate(file, data)
    return text if blob_id(data) == file.before else seam(file.path, data, result) if result else None


def _files_under(folder: Path) -> list[tuple[str, Path]]:
    """Every entry that is no folder, by name; caches (hidden or ``__pycache__``) are not sources."""
    entries = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    all_ = ((path.relative_to(folder), path) for path in entries)
    return [(n.as_posix(), p) for n, p in all_ if not any(part.startswith(("__pycache__", ".")) for part in n.parts)]


def read_text(path: Path) -> str:
    """Returns the text of ``path``, which must be what ``check_text`` allows and a plain file."""
    mode = path.lstat().st_mode
    plain = "100755" if mode & 0o111 else "100644"
    git_mode = plain if stat.S_ISREG(mode) else "120000" if stat.S_ISLNK(mode) else "0"
    check_mode(str(path), git_mode)
    return check_text(path.read_bytes(), str(path))


def check_mode(path: str, found: str, expected: str = "100644") -> None:
    """Raises IntegrityError unless ``path`` has the git mode that a patch of ours leaves alone."""
    if found not in ("100644", "100755"):
        what = f"{path} is {'a symbolic link' if found == '120000' else 'no plain file'}"
        raise IntegrityError("build-not-plain", what, "A patch carries plain files only.", "Put the file itself there.")
    if found != expected:
        what, next_ = f"{path} has another mode than {expected[-3:]}", f"chmod {expected[-3:]} {quoted(path)}"
        raise IntegrityError("build-mode", what, "A patch of ours sets no modes.", next_, found=found[-3:])


def check_text(data: bytes, path: str) -> str:
    """Returns ``data`` as text; raises IntegrityError for what a patch must not carry."""
    text, name = data.decode("utf-8", "replace"), quoted(path)
    hidden = [(number, found) for number, line in enumerate(text.split("\n"), 1) if (found := hidden_character(line))]
    line, found = hidden[0] if hidden else (0, "")
    unseen, no_text = "Such characters make code read other than it runs.", b"\0" in data or text.encode() != data
    for is_so, reason, what, cause, next_ in (
        (no_text, "build-binary", "is not UTF-8 text", "A patch carries text.", "Keep it out of the tree."),
        (not data, "build-empty", "is empty", "GNU patch cannot make it.", "Give it its licence header."),
        (b"\r" in data, "build-crlf", "has a carriage return", "An editor wrote it.", f"sed -i 's/\\r$//' {name}"),
        (data[-1:] != b"\n", "build-newline", "does not end in a newline", "An editor did it.", f"echo >> {name}"),
        (hidden, "build-hidden", f"holds {found}, which is not seen, in line {line}", unseen, "Write it as an escape."),
    ):
        if is_so:
            raise IntegrityError(reason, f"{path} {what}", cause, next_)
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
            raise IntegrityError("build-base-differs", what, cause, _TAKE_AGAIN, **ids)
        forward(file, place.read_bytes() if found else b"")


def compose(folders: Folders, trees: dict[Base, Path]) -> dict[str, bytes]:
    """Returns what ``patches/`` must hold, by name; ``trees`` are the pristine verls, the first one first."""
    files, entries, version = dict[str, bytes](), list[Entry](), ""
    for base, tree in trees.items():
        sources = folders.read(base.tag, tree)
        patch, name = sources.patch(base), f"gradloc-{base.tag}.patch" if entries else "gradloc.patch"
        check_fits(patch, tree)
        version = sources.version or ""
        if not version:
            what, cause = f"{PACKAGE}__init__.py names no version", "Its line __version__ = ... is gone."
            raise IntegrityError("build-no-version", what, cause, "Put it back: it is the one place that names it.")
        entries.append(Entry(base.tag, base.commit, name, sha256_hex(patch), len(patch)))
        files |= {name: patch, f"{name}.sha256": f"{sha256_hex(patch)}  {name}\n".encode()}
    return files | {MANIFEST_NAME: render(Manifest(version, tuple(entries)))}
