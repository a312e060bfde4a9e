# SPDX-License-Identifier: Apache-2.0
"""One version of the patch for one verl, and ``history.json``: what is known of the released ones.

A tree that has an old release is recognised by its files' ids and can be taken back to verl, without that release's
patch: of each new file the history has the id, of each edited file the ids and the base's lines that the release
replaced.
"""

import json
import re
from dataclasses import dataclass

from .content import sha256_hex
from .language import FilePatch, parse
from .manifest import ENTRY, VERSION, fields, read_json, wrong
from .paths import check_path_set, problem_with
from .splice import cuts

_BLOB = re.compile(r"[0-9a-f]{40}\Z")


@dataclass(frozen=True)
class Edition:
    """What one version does to which files of the verl with the tag ``base``.

    ``patch`` is None for a release of which only the way back is known.
    """

    version: str
    base: str
    sha256: str
    files: dict[str, FilePatch]
    patch: bytes | None = None

    @classmethod
    def of(cls, patch: bytes, version: str, base: str) -> "Edition":
        """Returns the edition with the patch ``patch``; raises IntegrityError if it is outside the language."""
        return cls(version, base, sha256_hex(patch), {file.path: file for file in parse(patch)}, patch)

    def shares_base(self, other: "Edition") -> bool:
        """True if no file says that the two are for different verls."""
        pairs = ((file.before, other.files[path].before) for path, file in self.files.items() if path in other.files)
        return all(mine == theirs for mine, theirs in pairs)


def remember(edition: Edition, history: bytes) -> bytes:
    """Returns ``history`` (``history.json``, or nothing) with the release ``edition`` in it."""
    known = [one for one in recall(history) if (one.version, one.base) != (edition.version, edition.base)]
    releases = [
        {
            "version": release.version,
            "base": release.base,
            "sha256": release.sha256,
            "added": {path: file.after for path, file in release.files.items() if file.before is None},
            "edited": {
                path: {"before": file.before, "after": file.after, "back": file.cuts or cuts(file)}
                for path, file in release.files.items()
                if file.before is not None
            },
        }
        for release in [*known, edition]
    ]
    return (json.dumps({"releases": releases}, indent=0, sort_keys=True) + "\n").encode("ascii")


def recall(history: bytes) -> list[Edition]:
    """Returns the releases that ``history.json`` knows; raises IntegrityError where it is not what it should be."""
    name, editions = "history.json", []
    listed = fields(read_json(history, name), "$", name, releases=list)["releases"] if history else []
    for index, item in enumerate(listed):
        where = f"$.releases[{index}]"
        fields(item, where, name, version=VERSION, base=ENTRY["base"], sha256=ENTRY["sha256"], added=dict, edited=dict)
        files = {path: FilePatch(path, None, after) for path, after in item["added"].items()}
        for path, change in item["edited"].items():
            change = fields(change, f"{where}.{path}", name, before=str, after=str, back=list)
            try:
                back = tuple((int(at), int(count), tuple(base)) for at, count, base in change["back"])
            except (TypeError, ValueError):
                raise wrong(name, f"{where}.{path}.back", "lines of the base", change["back"]) from None
            files[path] = FilePatch(path, change["before"], change["after"], cuts=back)
        for path, file in files.items():
            if problem_with(path) or not all(
                _BLOB.match(str(blob)) for blob in (file.before or file.after, file.after)
            ):
                raise wrong(name, f"{where}.{path}", "ids of a file under verl/", file.after)
        check_path_set(files)
        editions.append(Edition(item["version"], item["base"], item["sha256"], files))
    return editions
