# SPDX-License-Identifier: Apache-2.0
"""Says of a file with unknown content what was expected, what is there, and why that may be."""

from dataclasses import asdict, dataclass

from patchkit.digest import Digest
from patchkit.errors import IntegrityError
from patchkit.library import Library
from patchkit.splice import forward
from patchkit.survey import Survey

CRLF = "its line ends were turned into CRLF (core.autocrlf); its text is right"
MISSING = "the file is missing"
NEW_FILE = "another file stands where the patch adds one"
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
    return [_explain(path, survey, library) for path in survey.strangers]


def _explain(path: str, survey: Survey, library: Library) -> Stranger:
    found, base = survey.found[path], survey.base[path]
    expected = base.short() if base else "no file"
    if found.obstacle is not None:
        return Stranger(path, expected, found.obstacle, f"{found.obstacle} is in the way")
    if found.content is None:
        return Stranger(path, expected, "no file", MISSING)
    actual = Digest.of(found.content)
    shown = actual.short() if base and base.sha256 else f"git blob {actual.blob[:12]}"
    return Stranger(path, expected, shown, _why(path, found.content, base, library))


def _why(path: str, content: bytes, base: Digest | None, library: Library) -> str:
    plain = content.replace(b"\r\n", b"\n")
    known = [base] + [f.after for e in library.editions for f in e.files if f.path == path]
    if plain != content and any(digest and digest.admits(plain) for digest in known):
        return CRLF
    if base is None:
        return NEW_FILE
    section = library.sections(library.wanted).get(path)
    if section is None:
        return "it was edited"
    try:
        forward(section, content)
    except IntegrityError as error:
        if error.reason == "hunk-mismatch":
            data = error.data
            return (
                f"hunk {data['hunk']} does not fit at line {data['line']}: the patch expects "
                f"{data['expected'].strip()[:60]!r}, there is {data['found'].strip()[:60]!r}"
            )
    return ELSEWHERE
