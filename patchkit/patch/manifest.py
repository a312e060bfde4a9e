# SPDX-License-Identifier: Apache-2.0
"""What says what a patch must be: ``manifest.json``, checksum lists, and what is kept of the releases of the past.

The readers of our own files take exactly what the writers write. A tree that has an old release is known by the ids of
all its files, and taken back to verl by that release's edits of verl's files; the text of its own files is not kept.
"""

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import GET_AGAIN, RESTORE, IntegrityError, quoted
from .content import sha256_hex
from .language import MAX_BYTES as PATCH_BYTES
from .language import FilePatch
from .language import parse as parse_patch

SCHEMA_VERSION = 2
MAX_BYTES = 2**20
VERSION = re.compile(r"[0-9A-Za-z.+-]{1,40}\Z")
ENTRY: dict[str, Any] = {
    "base": re.compile(r"v\d+\.\d+\.\d+[a-z0-9.]*\Z"),
    "commit": re.compile(r"[0-9a-f]{40}\Z"),
    "name": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z"),
    "sha256": re.compile(r"[0-9a-f]{64}\Z"),
    "size_bytes": int,
}
MAX_LIST_BYTES = 64 * 1024
_LINE = re.compile(r"([0-9A-Fa-f]{64}) [ *](\S.*)\Z")
_RELEASE = re.compile(rb"Release: ([0-9A-Za-z.+-]{1,40}) for (v[0-9a-z.]+), sha256 ([0-9a-f]{64})\n")
_NEW_TEXT = re.compile(rb"(new file mode 100644\nindex .*\n)--- .*\n\+\+\+ .*\n@@ .*\n(?:\+.*\n)+")
_EDITED = "It was cut off or edited by hand; it is generated."


@dataclass(frozen=True)
class Base:
    """A verl that there is a patch for."""

    tag: str
    commit: str

    def is_said_by(self, version: str) -> bool:
        """True if ``verl/version/version`` says ``version`` in this verl: a tag's commit may still say ``.dev``."""
        return version.removesuffix(".dev") == self.tag.removeprefix("v")


@dataclass(frozen=True)
class Entry:
    """The patch for the verl with the tag ``base``."""

    base: str
    commit: str
    name: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Manifest:
    """One version of the patch, for each verl; the first is the one that everything else is made from."""

    version: str
    entries: tuple[Entry, ...]


def render(manifest: Manifest) -> bytes:
    """Returns the manifest as JSON: sorted keys, LF, the same bytes for the same content."""
    entries = [asdict(entry) for entry in manifest.entries]
    document = {"schema_version": SCHEMA_VERSION, "version": manifest.version, "patches": entries}
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode("ascii")


def parse(data: bytes, name: str = "manifest.json") -> Manifest:
    """Returns the manifest that ``data`` holds; ``name`` is for messages."""
    document = _read_json(data, name)
    version = document.get("schema_version") if isinstance(document, dict) else None
    if type(version) is int and version > SCHEMA_VERSION:
        what, cause = f"{name} has a schema that is newer than this tool", "patches/ and the tool are of two versions."
        raise IntegrityError("manifest-future", what, cause, "git pull", expected=SCHEMA_VERSION, found=version)
    top = _fields(document, "$", name, schema_version=int, version=VERSION, patches=list)
    if version != SCHEMA_VERSION or not top["patches"]:
        where = "$.schema_version" if top["patches"] else "$.patches"
        raise _wrong(name, where, f"schema {SCHEMA_VERSION} with patches", version)
    entries = []
    for index, item in enumerate(top["patches"]):
        entries.append(Entry(**_fields(item, f"$.patches[{index}]", name, **ENTRY)))
        if not 0 < (size := entries[-1].size_bytes) <= PATCH_BYTES:
            raise _wrong(name, f"$.patches[{index}].size_bytes", f"1 to {PATCH_BYTES}", size)
    manifest = Manifest(top["version"], tuple(entries))
    if render(manifest) != data:  # a key twice, another order, other white space
        raise IntegrityError("manifest-spelling", f"{name} is not as make_patch.sh writes it", _EDITED, RESTORE)
    return manifest


def _wrong(name: str, where: str, expected: str, found: Any) -> IntegrityError:
    what, shown = f"{name} is wrong at {where[:120]}", found if isinstance(found, str) else json.dumps(found)
    return IntegrityError("manifest-schema", what, _EDITED, RESTORE, expected=expected, found=shown[:80])


def _read_json(data: bytes, name: str) -> Any:
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError:
        raise IntegrityError("manifest-json", f"{name} is nested too deeply", _EDITED, RESTORE) from None
    except ValueError as error:  # of JSON and of UTF-8
        where = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(error)[-60:]
        what = f"{name} is not JSON at {where}"
        raise IntegrityError("manifest-json", what, _EDITED, RESTORE, found=str(error)[:80]) from error


def _fields(value: Any, where: str, name: str, /, **kinds: Any) -> dict[str, Any]:
    """Returns the object ``value``, whose keys must be those of ``kinds``: a type, or a pattern for a string."""
    if not isinstance(value, dict):
        raise _wrong(name, where, "an object", value)
    for key in value.keys() ^ kinds.keys():
        raise _wrong(name, f"{where}.{key}", "this key" if key in kinds else "no such key", value.get(key, "nothing"))
    for key, kind in kinds.items():
        is_type = isinstance(kind, type)
        if type(value[key]) is not (kind if is_type else str) or not (is_type or kind.match(value[key])):
            expected = kind.__name__ if is_type else f"text like {kind.pattern}"
            raise _wrong(name, f"{where}.{key}", expected, value[key])
    return value


def digest_for(name: str, data: bytes, path: str) -> str:
    """Returns the sha256 that the list ``data`` (from ``path``) gives for the file ``name``, which has no folder."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    if not text.strip():
        raise IntegrityError("sums-empty", f"the checksum file {path} is empty", "It was cut off.", GET_AGAIN)
    digests: dict[str, str] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        match = _LINE.match(line)
        at = f"line {number} of the checksum file {path}"
        if not match or len(data) > MAX_LIST_BYTES:
            what, cause = f"{at} is not '<64 hex digits>  <name>'", "It is not a list that sha256sum wrote."
            raise IntegrityError("sums-line", what, cause, GET_AGAIN, found=line[:80])
        listed = match[2]
        if "/" in listed or "\\" in listed or listed in (".", ".."):
            cause = "The list was made from another folder, or by someone who means harm."
            next_ = f"Make it again beside the patch: sha256sum {quoted(name)} > {quoted(name)}.sha256"
            raise IntegrityError("sums-path", f"{at} names a path outside its folder", cause, next_, found=listed)
        if listed in digests:
            what = f"the checksum file {path} names {listed} twice"
            raise IntegrityError("sums-duplicate", what, "Two lists were joined.", "Keep the author's line.")
        digests[listed] = match[1].lower()
    if name not in digests:
        what, next_ = f"the checksum file {path} has no line for {name}", "Name the right list, or --sha256 HEX."
        raise IntegrityError("sums-unnamed", what, "It belongs to another file.", next_, found=", ".join(digests)[:80])
    return digests[name]


@dataclass(frozen=True)
class Edition:
    """What one version does to which files of the verl with the tag ``base``.

    ``patch`` is None for a release of the past, which is known without the text of the files that it adds.
    """

    version: str
    base: str
    sha256: str
    files: dict[str, FilePatch]
    patch: bytes | None = None

    @classmethod
    def of(cls, patch: bytes, version: str, base: str) -> "Edition":
        """Returns the edition with the patch ``patch``; raises IntegrityError if it is outside the language."""
        return cls(version, base, sha256_hex(patch), {file.path: file for file in parse_patch(patch)}, patch)

    @classmethod
    def released(cls, data: bytes, name: str) -> "Edition":
        """Returns the release of the past that :func:`remembered` wrote."""
        head = _RELEASE.match(data)
        if not head:
            what = f"the first line of {name} does not say which release it is"
            raise IntegrityError("release-unnamed", what, _EDITED, RESTORE)
        version, base, digest = (part.decode() for part in head.groups())
        return cls(version, base, digest, {file.path: file for file in parse_patch(data, is_hollow=True)})

    def shares_base(self, other: "Edition") -> bool:
        """True if no file says that the two are for different verls."""
        pairs = ((file.before, other.files[path].before) for path, file in self.files.items() if path in other.files)
        return all(mine == theirs for mine, theirs in pairs)


def remembered(patch: bytes, version: str, base: str) -> bytes:
    """Returns what is kept of a release: its patch without the text of new files, below a line that names it."""
    head = f"Release: {version} for {base}, sha256 {sha256_hex(patch)}\n"
    return head.encode() + _NEW_TEXT.sub(rb"\1", patch)
