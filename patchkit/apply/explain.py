# SPDX-License-Identifier: Apache-2.0
"""Says of files with unknown content what was expected, what is there, why that may be, and what to do."""

import re
from dataclasses import asdict, dataclass

from ..errors import CheckoutStateError, IntegrityError, quoted
from ..patch.content import blob_id, short
from ..patch.edition import Edition
from ..patch.splice import apply_hunks, inverse
from ..tree.checkout import Checkout
from ..tree.survey import State, Survey
from .library import PUBLISHED_RESULTS

CRLF = "its line ends were turned into CRLF (core.autocrlf); its text is right"
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


def strangers(survey: Survey, given: Edition | None) -> list[Stranger]:
    """Returns an explanation for each path of the survey whose content nobody knows.

    ``given`` is the edition that the tree was given, where its copy in the tree says so.
    """
    explained = []
    for path in survey.strangers:
        found = survey.found[path]
        section = given.files.get(path) if given else None
        wanted = section.after if section else survey.before[path]
        shown = found.obstacle or short(found.blob)
        explained.append(Stranger(path, short(wanted), shown, _why(path, survey, given)))
    return explained


def _why(path: str, survey: Survey, given: Edition | None) -> str:
    found = survey.found[path]
    if found.obstacle:
        return f"{found.obstacle} is in the way"
    if found.content is None:
        return "the file is missing"
    known = {survey.before[path], *(e.files[path].after for e in survey.editions if path in e.files)}
    plain = found.content.replace(b"\r\n", b"\n")
    if plain != found.content and blob_id(plain) in known:
        return CRLF
    section = (given or survey.editions[0]).files.get(path)
    if survey.before[path] is None:
        return EDITED if given and section else NEW_FILE
    if section is None or not section.hunks:
        return "it was edited"
    edited = EDITED if given else ""
    try:
        apply_hunks(path, inverse(section) if given else section.hunks, found.content)
    except IntegrityError as error:
        if error.reason == "hunk-mismatch":
            data = error.data
            lines = f"the patch expects {data['expected'].strip()[:60]!r}, there is {data['found'].strip()[:60]!r}"
            place = f"hunk {data['hunk']} does not fit at line {data['line']}: {lines}"
            return f"{edited}: {place}" if edited else place
    return edited or ELSEWHERE


def refusal(survey: Survey, checkout: Checkout, given: Edition | None, force: bool) -> CheckoutStateError:
    """Returns the refusal of a checkout that has strangers: what they are, and the way out that fits."""
    listed = strangers(survey, given)
    first, count, root = listed[0], len(listed), quoted(checkout.root)
    is_clone = checkout.git_dir is not None
    also = " --force never overwrites such files." if force else ""
    files = f"{count} of the files that the patch touches"
    version = re.match(r"(\d+)\.(\d+)", checkout.version)
    minor = (int(version[1]), int(version[2])) if version and not survey.is_at_base else None
    anew = f"Unpack verl {survey.base.tag.removeprefix('v')} again"
    published = [path for path, blob in PUBLISHED_RESULTS.items() if path in survey.found and survey.holds(path, blob)]
    if published:
        reason, what = (
            "state-published",
            f"DRIFTED: the publicly released GradLoc patch is on this tree, first {published[0]}",
        )
        cause = "It stops every training run at its first update, and cannot be verified."
        next_ = f"git -C {root} apply -R PUBLISHED/gradloc.patch   (with the released file)"
        next_ += f"; or git -C {root} checkout -- {' '.join(published)}" if is_clone else f"; or: {anew}"
    elif all(stranger.why == CRLF for stranger in listed):
        reason, what = "state-crlf", f"DRIFTED: {files} have CRLF line ends, first {first.path}"
        cause = "The checkout was made with core.autocrlf, or through Windows; only the line ends differ."
        next_ = (
            f"git clone -c core.autocrlf=false {root} DIR   (and use DIR)"
            if is_clone
            else f"{anew}, line ends as they are."
        )
    elif given and all(stranger.why.startswith(EDITED) for stranger in listed):
        reason, what = (
            "state-edited",
            f"DRIFTED: {count} of the patch's files were edited after it was applied, first {first.path}",
        )
        cause = "Work on the patch in this checkout."
        next_ = f"bash make_patch.sh --repo {root}   (takes the edits into the sources; then this runs)"
    elif minor and minor >= (0, 9):
        reason, what = "verl-needs-none", f"WRONG_BASE: this is verl {checkout.version}, which needs no patch"
        cause = "From 0.9 on, verl loads GradLoc as a plug-in."
        next_ = "pip install gradloc-verl   (this repository), then add to the training command: +gradloc=on"
    elif minor == (0, 8):
        reason, what = "verl-without-patch", f"WRONG_BASE: this is verl {checkout.version}, for which there is no patch"
        cause = "0.8 moved the actor, and its plug-ins came with 0.9: nothing fits it."
        next_ = "Use verl 0.7.0 or 0.7.1 with the patch, or verl 0.9 with: pip install gradloc-verl, +gradloc=on"
    elif not given and _looks_patched(survey):
        reason, what = (
            "state-unknown-build",
            f"DRIFTED: a build of the patch that is not known here is on this tree: {files} differ, first {first.path}",
        )
        cause = "It is another build, or was edited, and the copy that would say which one is gone."
        next_ = f"git -C {root} stash push --include-untracked -- verl   (keeps all of it aside; then this runs)"
        next_ = next_ if is_clone else f"{anew}, and take your edits there by hand."
    elif all(survey.before[stranger.path] is None for stranger in listed):
        reason, what = (
            "state-in-the-way",
            f"DRIFTED: something else stands where the patch adds {count} files, first {first.path}",
        )
        cause, next_ = "Files of yours have the same name.", "Move away what the lines below name, then run this again."
    elif survey.state is State.WRONG_BASE:
        here = f"verl {checkout.version}" + (f" at {checkout.head[:12]}" if checkout.head else "")
        base = f"{survey.base.tag} ({survey.base.commit[:12]})"
        reason, what = (
            "state-wrong-base",
            f"WRONG_BASE: this is {here}, the nearest patch is for {base}, and {files} differ, first {first.path}",
        )
        cause = "Another version of verl is here, or commits of your own changed these files."
        next_ = f"git -C {root} worktree add DIR {survey.base.commit}   (a second checkout, at the right commit)"
        next_ = next_ if is_clone else f"Use verl {survey.base.tag.removeprefix('v')}."
    else:
        reason, what = (
            "state-drifted",
            f"DRIFTED: {files} hold neither verl's content nor the patch's, first {first.path}",
        )
        cause, place = f"{first.why}.", quoted(checkout.root / first.path)
        next_ = f"git -C {root} stash push -- {quoted(first.path)}   (keeps your edit, restores the file)"
        next_ = (
            next_ if is_clone else f"mv {place} ELSEWHERE   (and take the file from verl {survey.base.tag[1:]} again)"
        )
    error = CheckoutStateError(
        reason, what, cause + also, next_, expected=first.expected, found=first.found, path=first.path
    )
    error.data |= {"state": survey.state.name, "files": [asdict(stranger) for stranger in listed]}
    error.data["diff"] = [f"{stranger.path}: {stranger.why}" for stranger in listed]
    return error


def _looks_patched(survey: Survey) -> bool:
    """True if some file of ours is there: one that an edition adds, or any edition's result."""
    held = (survey.holds(path, file.after) for edition in survey.editions for path, file in edition.files.items())
    package = (path for path, before in survey.before.items() if before is None and path.startswith("verl/gradloc/"))
    return any(held) or any(survey.found[path].content is not None for path in package)
