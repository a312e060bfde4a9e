# SPDX-License-Identifier: Apache-2.0
"""Says of a file with unknown content what was expected, what is there, and why that may be."""

from dataclasses import asdict, dataclass

from ..errors import IntegrityError
from ..patch import splice
from ..patch.digest import Digest
from ..patch.manifest import Edition
from ..tree.survey import Survey
from .library import Library

CRLF = "its line ends were turned into CRLF (core.autocrlf); its text is right"
MISSING = "the file is missing"
NEW_FILE = "another file stands where the patch adds one"
EDITED = "it was edited after the patch was applied"
ELSEWHERE = "it was edited, but not where the patch edits it"


@dataclass(frozen=True)
class Stranger:
    """One file whose content is neither the base's nor the patch's."""

    path: str
    expected: str
    found: str
    why: str

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def strangers(survey: Survey, library: Library) -> list[Stranger]:
    """Returns an explanation for each path of the survey whose content nobody knows."""
    applied = _edition_around(survey, library) if survey.strangers else None
    return [_explain(path, survey, library, applied) for path in survey.strangers]


def _edition_around(survey: Survey, library: Library) -> Edition | None:
    """The edition that some other file holds the result of, if any: then the tree is patched."""
    for edition in library.editions:
        if any(survey.holds(file.path, file.after) for file in edition.files):
            return edition
    return None


def _explain(path: str, survey: Survey, library: Library, applied: Edition | None) -> Stranger:
    found, base = survey.found[path], survey.base[path]
    wanted = {file.path: file.after for file in applied.files}.get(path) if applied else base
    expected = wanted.short() if wanted else "no file"
    if found.obstacle is not None:
        return Stranger(path, expected, found.obstacle, f"{found.obstacle} is in the way")
    if found.content is None:
        return Stranger(path, expected, "no file", MISSING)
    actual = Digest.of(found.content)
    shown = f"git blob {actual.blob[:12]}" if wanted and not wanted.sha256 else actual.short()
    return Stranger(path, expected, shown, _why(path, found.content, survey, library, applied))


def _why(path: str, content: bytes, survey: Survey, library: Library, applied: Edition | None) -> str:
    base = survey.base[path]
    plain = content.replace(b"\r\n", b"\n")
    known = [base] + [f.after for e in library.editions for f in e.files if f.path == path]
    if plain != content and any(digest and digest.admits(plain) for digest in known):
        return CRLF
    section = library.sections(applied or library.wanted).get(path)
    if base is None:
        return EDITED if applied and section else NEW_FILE
    if section is None:
        return "it was edited"
    try:
        (splice.backward if applied else splice.forward)(section, content)
    except IntegrityError as error:
        if error.reason == "hunk-mismatch":
            return _where(error, applied)
    return EDITED if applied else ELSEWHERE


def _where(error: IntegrityError, applied: Edition | None) -> str:
    data = error.data
    place = f"hunk {data['hunk']} does not fit at line {data['line']}"
    lines = f"the patch expects {data['expected'].strip()[:60]!r}, there is {data['found'].strip()[:60]!r}"
    return f"{EDITED}: {place}: {lines}" if applied else f"{place}: {lines}"
