# SPDX-License-Identifier: Apache-2.0
"""Says of files with unknown content what was expected, what is there, why that may be, and what to do."""

import re

from ..errors import CheckoutStateError, IntegrityError, quoted
from ..patch.content import blob_id, short
from ..patch.language import apply_hunks
from ..patch.manifest import Edition
from ..tree.checkout import Checkout
from ..tree.survey import State, Survey
from .library import PUBLISHED_RESULTS

CRLF = "its line ends were turned into CRLF (core.autocrlf); its text is right"
EDITED = "it was edited after the patch was applied"


def strangers(survey: Survey, given: Edition | None) -> list[dict[str, str]]:
    """Returns an explanation for each path whose content nobody knows; ``given`` is what the tree's own copy says."""
    explained = []
    for path in survey.strangers:
        file, section = survey.files[path], given.files.get(path) if given else None
        wanted = section.after if section else survey.before[path]
        ids = {"expected": short(wanted), "found": file.obstacle or short(file.blob)}
        explained.append({"path": path, **ids, "why": _why(path, survey, given)})
    return explained


def _why(path: str, survey: Survey, given: Edition | None) -> str:
    file, before = survey.files[path], survey.before[path]
    if file.obstacle or file.content is None:
        return f"{file.obstacle} is in the way" if file.obstacle else "the file is missing"
    if path in survey.elsewhere:
        return f"it is of verl {survey.elsewhere[path]}"
    known = {before, *(e.files[path].after for e in survey.editions if path in e.files)}
    plain = file.content.replace(b"\r\n", b"\n")
    if plain != file.content and blob_id(plain) in known:
        return CRLF
    section = (given or survey.editions[0]).files.get(path)
    if before is None:
        return EDITED if given and section else "another file stands where the patch adds one"
    if section is None or not section.hunks:
        return "it was edited"
    try:
        apply_hunks(path, section.inverse if given else section.hunks, file.content)
    except IntegrityError as error:
        if error.reason == "hunk-mismatch":
            expected, there = (error.data[key].strip()[:60] for key in ("expected", "found"))
            place = f"hunk {error.data['hunk']} does not fit at line {error.data['line']}"
            said = f"{place}: the patch expects {expected!r}, there is {there!r}"
            return f"{EDITED}: {said}" if given else said
    return EDITED if given else "it was edited, but not where the patch edits it"


def half_patched(survey: Survey, checkout: Checkout) -> CheckoutStateError:
    """Returns the refusal of a checkout that is a mix of known contents."""
    wanted = {path: blob for path, blob in survey.goal(survey.editions[0]).items() if blob != survey.before[path]}
    lacking = [path for path, blob in wanted.items() if not survey.holds(path, blob)]
    cause = "Some files were restored by hand, by git checkout or by git stash; all contents are known."
    counts = f"{len(wanted) - len(lacking)} of {len(wanted)} files patched"
    data = {"state": survey.state.name, "found": counts, "diff": [f"not patched: {path}" for path in lacking]}
    next_ = f"{checkout.command} --force   (finishes; with --reverse it undoes)"
    return CheckoutStateError("state-partial", "PARTIAL: the checkout is half patched", cause, next_, **data)


def refusal(survey: Survey, checkout: Checkout, given: Edition | None, force: bool) -> CheckoutStateError:
    """Returns the refusal of a checkout that has strangers: what they are, and the way out that fits."""
    listed = strangers(survey, given)
    reason, what, cause, next_ = _judge(survey, checkout, given, listed)
    cause += " --force never overwrites such files." if force else ""
    data = {"state": survey.state.name, "files": listed, "path": listed[0]["path"]}
    shown = [] if reason.startswith("verl-") else listed  # another verl differs everywhere
    diff = [f"{one['path']}: {one['why']}" for one in shown]
    ids = {key: one[key] for one in shown[:1] for key in ("expected", "found")}
    return CheckoutStateError(reason, f"{survey.state.name}: {what}", cause, next_, diff=diff, **ids, **data)


def _judge(survey: Survey, checkout: Checkout, given: Edition | None, listed: list[dict[str, str]]) -> tuple[str, ...]:
    first, is_clone, root = listed[0], checkout.git_dir is not None, quoted(checkout.root)
    files, at, tag = f"{len(listed)} of the files that the patch touches", f"first {first['path']}", survey.base.tag
    number = tag.removeprefix("v")
    version = re.match(r"(\d+)\.(\d+)", "" if survey.is_at_base else checkout.version)
    minor = (int(version[1]), int(version[2])) if version else (0, 0)
    published = [path for path, blob in PUBLISHED_RESULTS.items() if path in survey.files and survey.holds(path, blob)]
    if published:
        reason, what = "state-published", f"the publicly released GradLoc patch is on this tree, first {published[0]}"
        cause = "It stops every training run at its first update, and cannot be verified."
        restore = f"git -C {root} checkout -- {' '.join(published)}" if is_clone else f"unpack verl {number} again"
        next_ = f"git -C {root} apply -R PUBLISHED/gradloc.patch   (with the released file); or: {restore}"
    elif all(stranger["why"] == CRLF for stranger in listed):
        reason, what = "state-crlf", f"{files} have CRLF line ends, {at}"
        cause = "The checkout was made with core.autocrlf, or through Windows; only the line ends differ."
        anew = f"git clone -c core.autocrlf=false {root} DIR   (and use DIR)"
        next_ = anew if is_clone else f"Unpack verl {number} again, with its line ends as they are."
    elif given and all(stranger["why"].startswith(EDITED) for stranger in listed):
        reason, what = "state-edited", f"{len(listed)} of the patch's files were edited after it was applied, {at}"
        cause = "Work on the patch in this checkout."
        next_ = f"bash make_patch.sh --repo {root}   (takes the edits into the sources; then this runs)"
    elif minor >= (0, 9):
        reason, what = "verl-needs-none", f"this is verl {checkout.version}, which needs no patch"
        cause = "From 0.9 on, verl loads GradLoc as a plug-in."
        next_ = "pip install this package where verl is (in its folder: pip install .), then train with +gradloc=on"
    elif minor == (0, 8):
        reason, what = "verl-without-patch", f"this is verl {checkout.version}, for which there is no patch"
        cause = "0.8 moved the actor, and its plug-ins came with 0.9: nothing fits it."
        next_ = "Use verl 0.7.0 or 0.7.1 with the patch, or verl 0.9, which needs none (pip install ., +gradloc=on)."
    elif not given and survey.base.is_said_by(checkout.version) and _looks_patched(survey):
        reason, what = "state-unknown-build", f"a build of the patch that is not known here is on this tree, {at}"
        cause = "It is another build, or was edited, and the copy that would say which one is gone."
        next_ = f"Unpack verl {number} again, and take your edits there by hand."
        stash = f"git -C {root} stash push --include-untracked -- verl   (keeps all of it aside; then this runs)"
        next_ = stash if is_clone else next_
    elif all(survey.before[stranger["path"]] is None for stranger in listed):
        reason, what = "state-in-the-way", f"something else stands where the patch adds {len(listed)} files, {at}"
        cause, next_ = "Files of yours have the same name.", "Move away what the lines below name, then run this again."
    elif survey.state is State.WRONG_BASE:
        here = f"verl {checkout.version}" + (f" at {checkout.head[:12]}" if checkout.head else "")
        base = f"the nearest patch is for {tag} ({survey.base.commit[:12]})"
        reason, what = "state-wrong-base", f"this is {here}, {base}, and {files} differ, {at}"
        cause = "Another version of verl is here, or commits of your own changed these files."
        next_ = f"git -C {root} worktree add DIR {survey.base.commit}   (a second checkout, at the right commit)"
        next_ = next_ if is_clone else f"Use verl {number}."
    else:
        reason, what = "state-drifted", f"{files} hold neither verl's content nor the patch's, {at}"
        cause, place = f"{first['why']}.", quoted(checkout.root / first["path"])
        next_ = f"git -C {root} stash push -- {quoted(first['path'])}   (keeps your edit, restores the file)"
        next_ = next_ if is_clone else f"mv {place} ELSEWHERE   (and take the file from verl {number} again)"
    return reason, what, cause, next_


def _looks_patched(survey: Survey) -> bool:
    """True if some file of ours is there: one that an edition adds, or any edition's result."""
    ours = ((path, file) for edition in survey.editions for path, file in edition.files.items())
    package = (path for path, before in survey.before.items() if before is None and path.startswith("verl/gradloc/"))
    return any(survey.holds(p, f.after) for p, f in ours) or any(survey.files[p].content is not None for p in package)
