# SPDX-License-Identifier: Apache-2.0
"""Computes, from what a checkout holds, the changes that lead to the wanted edition or the base.

Every path goes through the base: what is there is first taken back to the base's content, then
forward. So apply, reverse, upgrade, finish and undo are one computation.
"""

from ..errors import IntegrityError
from ..patch import splice
from ..patch.digest import Digest
from ..patch.manifest import Edition
from ..tree.survey import Survey, wanted
from ..tree.transaction import Change
from .library import Library


def changes_to(goal: Edition | None, survey: Survey, library: Library) -> list[Change]:
    """Returns the changes that make a surveyed checkout hold ``goal``, or the base for None.

    The survey must have no strangers. Files that are right already are not among the changes.
    """
    changes = []
    for path, digest in sorted(wanted(goal, survey.base).items()):
        content = survey.found[path].content
        after = _content(path, digest, goal, survey, library)
        if after != content:
            changes.append(Change(path, content, after))
    return changes


def _content(path: str, digest: Digest | None, goal: Edition | None, survey: Survey, library: Library) -> bytes | None:
    if digest is None:
        return None
    content = survey.found[path].content
    if content is not None and digest.admits(content):
        return content
    base = _base(path, survey, library)
    section = library.sections(goal).get(path) if goal else None
    result = base if section is None else splice.forward(section, base or b"")
    if result is None or not digest.admits(result):
        found = Digest.of(result or b"").short()
        raise IntegrityError("result-digest", path=path, expected=digest.short(), found=found)
    return result


def _base(path: str, survey: Survey, library: Library) -> bytes | None:
    """The base's content of ``path``, recovered from whichever edition's content is there."""
    content, digest = survey.found[path].content, survey.base[path]
    if digest is None:
        return None
    if content is not None and digest.admits(content):
        return content
    for edition in library.editions:
        for file in edition.files:
            if file.path == path and content is not None and file.after.admits(content):
                return splice.backward(library.sections(edition)[path], content)
    raise AssertionError(f"{path} is a stranger")
