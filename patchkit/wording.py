# SPDX-License-Identifier: Apache-2.0
"""Every sentence with which this package refuses, in one place.

A refusal reads: what and where; expected against found; the likely cause; the next command. The
errors carry a reason and data; ``render_error`` makes the text.
"""

from typing import Any, NamedTuple

from patchkit.errors import PatchkitError

_GET_AGAIN = "Get the file again, whole and unchanged."
_BUILT = "Use the patch as built: patches/gradloc.patch."
_NOT_OURS = "The patch was not written by make_patch.sh, or was changed afterwards."
_RESTORE = "git checkout -- patches/   (or unpack the release again)"
_REBUILD = "bash make_patch.sh"


class Words(NamedTuple):
    """One refusal's text; the parts are ``str.format`` templates over the error's data."""

    what: str
    cause: str
    next: str


WORDS: dict[str, Words] = {
    # The checksum.
    "sums-missing": Words(
        "no checksum for {path}",
        "A patch is only applied when something says what it should be, and neither "
        "--patch-sha256, --sha256-file, a file {name}.sha256 beside it nor the manifest does.",
        "Add --patch-sha256 HEX with the sha256 that its author published.",
    ),
    "sums-empty": Words(
        "the checksum file {path} is empty", "It was cut off or never written.", _GET_AGAIN
    ),
    "sums-line": Words(
        "line {line} of the checksum file {path} is not '<64 hex digits>  <name>'",
        "It is not a list that sha256sum wrote.",
        _GET_AGAIN,
    ),
    "sums-duplicate": Words(
        "the checksum file {path} names {name} twice",
        "Two lists were joined.",
        "Keep the line that the author published.",
    ),
    "sums-path": Words(
        "line {line} of the checksum file {path} names a path outside its folder",
        "The list was made from another folder, or by someone who means harm.",
        "Make it again beside the patch: sha256sum {name} > {name}.sha256",
    ),
    "sums-unnamed": Words(
        "the checksum file {path} has no line for {name}",
        "It belongs to another file.",
        "Name the right list with --sha256-file, or the digest with --patch-sha256.",
    ),
    "sums-hex": Words(
        "--patch-sha256 is not 64 hex digits",
        "It was cut when copied.",
        "Copy all 64 digits.",
    ),
    "patch-digest": Words(
        "the sha256 of {path} is not the expected one",
        "The file was changed, or is another version.",
        _GET_AGAIN,
    ),
    "patch-published": Words(
        "{path} is the publicly released GradLoc patch, which this tool does not apply",
        "With it every training run stops at its first update: it reads options that verl's config "
        "does not have (AttributeError: 'FSDPActorConfig' object has no attribute "
        "'spike_detection'). It also names files by abbreviated ids and leaves one without a "
        "final newline, so its result cannot be verified.",
        "Leave out --patch-file and --patch-url: the patch that comes with this tool has the same "
        "options and trains.",
    ),
    # The manifest.
    "manifest-unreadable": Words(
        "the manifest {path} cannot be read", "The folder patches/ is not complete.", _RESTORE
    ),
    "manifest-too-large": Words(
        "the manifest {path} is too large to be ours", "It is another file.", _RESTORE
    ),
    "manifest-json": Words(
        "the manifest {path} is not JSON at {where}",
        "It was cut off or edited by hand; it is generated.",
        _RESTORE,
    ),
    "manifest-number": Words(
        "the manifest {path} holds a number that is no plain integer",
        "It was edited by hand; it is generated.",
        _RESTORE,
    ),
    "manifest-repeated-key": Words(
        "the manifest {path} has a key twice", "It was edited by hand; it is generated.", _RESTORE
    ),
    "manifest-nesting": Words(
        "the manifest {path} is nested too deeply", "It is not our manifest.", _RESTORE
    ),
    "manifest-schema": Words(
        "the manifest {path} is wrong at {where}",
        "It was edited by hand; it is generated.",
        _RESTORE,
    ),
    "manifest-future": Words(
        "the manifest {path} has a schema that is newer than this tool",
        "patches/ and the tool come from different versions.",
        "Update the tool: git pull",
    ),
    "manifest-disagrees": Words(
        "the patch and the manifest do not name the same changes ({path})",
        "One of the two was changed after the build.",
        _RESTORE,
    ),
    # The patch's bytes.
    "patch-unreadable": Words(
        "the patch {path} cannot be read", "There is no such file, or no permission.", "Check it."
    ),
    "patch-too-large": Words("the patch {path} is too large", "It is another file.", _GET_AGAIN),
    "patch-empty": Words("the patch is empty", "A download failed unnoticed.", _GET_AGAIN),
    "patch-html": Words(
        "the patch is a web page, not a patch",
        "A server sent an error page or the page that shows the file.",
        "Get it from the address of the raw file.",
    ),
    "patch-compressed": Words(
        "the patch is {kind}-compressed", "An archive was saved under its name.", "Unpack it."
    ),
    "patch-utf16": Words("the patch is UTF-16", "A shell redirection re-encoded it.", _GET_AGAIN),
    "patch-bom": Words(
        "the patch begins with a byte order mark", "An editor saved it again.", _GET_AGAIN
    ),
    "patch-crlf": Words(
        "line {line} of the patch ends in CRLF",
        "git or an editor turned its line ends into those of Windows.",
        "Get it again with '*.patch -text' in .gitattributes.",
    ),
    "patch-nul": Words("line {line} of the patch holds a NUL", _NOT_OURS, _GET_AGAIN),
    "patch-not-utf8": Words("line {line} of the patch is not UTF-8", _NOT_OURS, _GET_AGAIN),
    "patch-no-final-newline": Words(
        "the patch's last line {line} has no line end", "The file was cut off.", _GET_AGAIN
    ),
    # The patch's language.
    "patch-no-files": Words(
        "the patch names no file ('diff --git' never occurs)", "It is another file.", _BUILT
    ),
    "patch-dialect": Words(
        "line {line}: only git's own form of a diff is read",
        "It is a context, ed or plain diff.",
        _BUILT,
    ),
    "patch-unknown-line": Words(
        "line {line} of the patch is not a part of the patch language", _NOT_OURS, _BUILT
    ),
    "patch-names-disagree": Words(
        "line {line} of the patch names another file than its section", _NOT_OURS, _BUILT
    ),
    "patch-abbreviated": Words(
        "line {line} of the patch names {path} by an abbreviated id",
        "It was made by git diff without --full-index, so its base and its result cannot be "
        "verified.",
        "Make it again with: bash make_patch.sh --repo CHECKOUT --output FILE",
    ),
    "patch-index": Words(
        "line {line}: the ids of {path} do not agree with what its section does", _NOT_OURS, _BUILT
    ),
    "patch-no-hunks": Words(
        "the patch's section for {path} changes nothing (line {line})", _NOT_OURS, _BUILT
    ),
    "patch-new-file": Words(
        "line {line}: the new file {path} is not one whole hunk", _NOT_OURS, _BUILT
    ),
    "patch-hunk-order": Words(
        "line {line}: the hunks of {path} overlap, descend or disagree on line numbers",
        _NOT_OURS,
        _BUILT,
    ),
    "patch-context": Words(
        "line {line}: a hunk of {path} has less than three lines of context",
        "It was made with -U0 or the like, so its place cannot be verified.",
        _BUILT,
    ),
    "patch-count": Words(
        "line {line}: a hunk of {path} is longer or shorter than its header says",
        "The patch was edited by hand.",
        _BUILT,
    ),
    "patch-truncated": Words(
        "the patch ends in the middle, at line {line}", "The file was cut off.", _GET_AGAIN
    ),
    "patch-result-newline": Words(
        "line {line}: the patch would leave {path} without a final newline", _NOT_OURS, _BUILT
    ),
    "patch-hidden-character": Words(
        "line {line}: the patch adds an invisible or reordering character to {path}",
        "Such characters make code read other than it runs.",
        "Do not use this patch.",
    ),
    "patch-unsorted": Words(
        "the patch's sections are not in order: {path} after {other}", _NOT_OURS, _BUILT
    ),
    "patch-deletes": Words(
        "line {line}: the patch deletes {path}", "Our patches never delete verl's files.", _BUILT
    ),
    "patch-renames": Words("line {line}: the patch renames or copies {path}", _NOT_OURS, _BUILT),
    "patch-binary": Words("line {line}: the patch holds binary data for {path}", _NOT_OURS, _BUILT),
    "type-symlink": Words(
        "line {line}: the patch makes {path} a symbolic link",
        "Links lead a writer out of the tree.",
        "Do not use this patch.",
    ),
    "type-gitlink": Words(
        "line {line}: the patch makes {path} a submodule", _NOT_OURS, "Do not use this patch."
    ),
    "mode-refused": Words(
        "line {line}: the patch sets a file mode for {path}",
        "Only new files of mode 100644 are allowed.",
        _BUILT,
    ),
    "path-unsafe": Words(
        "the path {path!r} may not stand in a patch: {problem}",
        "The patch was made for another tree, or by someone who means harm.",
        "Do not use this patch.",
    ),
    "path-twice": Words("{path} occurs twice", _NOT_OURS, _BUILT),
    "path-case": Words(
        "{path} and {other} differ in case only", "On some disks they are one file.", _BUILT
    ),
    "path-file-and-folder": Words(
        "{path} is both a file and the folder of {other}", _NOT_OURS, _BUILT
    ),
    # Application.
    "hunk-mismatch": Words(
        "hunk {hunk} of {path} does not fit at line {line}",
        "The file is not the one that the patch was made for.",
        "Restore it: git -C {target} checkout -- {path}",
    ),
    "result-digest": Words(
        "{path} would not become what the patch promises",
        "The patch and its index lines or the manifest disagree.",
        _RESTORE,
    ),
    "result-not-utf8": Words(
        "{path} is not UTF-8", "It is not verl's file.", "Restore it from verl."
    ),
    # The base.
    "base-named-missing": Words(
        "VERL_BASE_SDIST names {path}, which is no file",
        "The variable is left over or misspelt.",
        "unset VERL_BASE_SDIST   (then pip fetches it)",
    ),
    "base-pip": Words(
        "pip could not fetch the source archive of {requirement}",
        "No network, or an index that lacks it.",
        "VERL_BASE_SDIST=PATH/verl-0.7.0.tar.gz, with a copy fetched elsewhere",
    ),
    "base-digest": Words(
        "the archive {path} is not verl's released one",
        "The file was changed, or is another version.",
        "Delete it and fetch it again.",
    ),
    "base-entry": Words(
        "the archive holds an entry that verl's does not have: {path}",
        "It is not the released archive.",
        "Delete it and fetch it again.",
    ),
    # The target.
    "target-empty": Words(
        "the target is an empty string",
        "A shell variable was unset.",
        "python apply_patch.py --repo VERL",
    ),
    "target-missing": Words(
        "there is no folder {target}", "It is misspelt, or relative to another folder.", "Check it."
    ),
    "target-unreadable": Words(
        "the folder {target} cannot be read",
        "It belongs to another user.",
        "Run as its owner.",
    ),
    "target-not-a-folder": Words(
        "{target} is a file", "An archive was named, not the folder it unpacks to.", "Unpack it."
    ),
    "target-not-verl": Words(
        "NOT_VERL: {target} is not the top of a verl tree",
        "Another folder was named.",
        "git clone verl, or name the folder that has verl/__init__.py in it",
    ),
    "target-inside": Words(
        "NOT_VERL: {target} lies inside a verl tree",
        "Its parent was meant.",
        "python apply_patch.py --repo {parent}",
    ),
    "target-bare": Words(
        "NOT_VERL: {target} is a bare repository or a .git folder",
        "It has no files to patch.",
        "git clone {target} VERL",
    ),
    "target-installed": Words(
        "{target} is an environment's package folder",
        "Patching an environment changes every program that runs in it, so it is asked for by "
        "name.",
        "python apply_patch.py --installed   (with the Python of that environment)",
    ),
    "target-not-installed": Words(
        "NOT_VERL: this Python has no verl",
        "apply_patch.py was started with another Python than the one that trains.",
        "ENVIRONMENT/bin/python apply_patch.py --installed",
    ),
    # Taking edits from a checkout.
    "git-missing": Words("git is not installed", "make_patch.sh needs it.", "Install git."),
    "git-failed": Words(
        "git {command} failed in {path}", "The checkout is damaged, or not a clone.", "git status"
    ),
    "take-nothing": Words(
        "{target} has no edits under verl/ since the base",
        "It was never patched or edited, or another checkout was meant.",
        "python apply_patch.py --repo {target}   (then edit, then run this again)",
    ),
    "take-no-commit": Words(
        "{target} has no commit {rev}",
        "A shallow clone, or a clone of another repository.",
        "git -C {target} fetch origin {rev}",
    ),
    "take-deleted": Words(
        "{path} was deleted in the checkout",
        "Our patches never delete verl's files.",
        "git checkout -- {path}   (in the checkout)",
    ),
    "take-outside": Words(
        "{path} was changed, which lies outside verl/",
        "The patch carries verl's package only.",
        "Undo it there, or keep it in a branch of its own: git -C {target} checkout -- {path}",
    ),
    "take-both-sides": Words(
        "{path} was edited in the checkout and in verl_overrides/, differently: the checkout has "
        "{theirs}, verl_overrides/ builds {ours}, and the checkout was given {given}",
        "Someone edited verl_overrides/ directly, or took another checkout's edits since.",
        "Bring both edits together in the checkout (git diff shows yours), undo the one in "
        "verl_overrides/ with git checkout, and run this again.",
    ),
    "take-stale-yaml": Words(
        "{path} is not what the configuration composes to",
        "A yaml was edited and the generated reference was not.",
        "bash make_patch.sh --repo {target} --refresh-generated",
    ),
    "take-config-broken": Words(
        "verl's configuration {path} does not compose",
        "An edited yaml is wrong.",
        "Repair the yaml that the line above names.",
    ),
    "take-needs-git": Words(
        "{target} is no clone, so it has no commits",
        "--base and --head name commits.",
        "Leave them out: the files as they are will be taken.",
    ),
    "take-needs-repo": Words(
        "--base, --head and --output need --repo",
        "They say what to take from a checkout.",
        "bash make_patch.sh --repo CHECKOUT ...",
    ),
    "take-check-repo": Words(
        "--check and --repo do not go together",
        "--check compares patches/ with verl_overrides/; no checkout takes part.",
        "bash make_patch.sh --check",
    ),
    "take-other-base": Words(
        "verl_overrides/ is for the pinned base only",
        "A patch for another commit cannot be built from it.",
        "Add --output FILE to write such a patch elsewhere.",
    ),
    # The build.
    "build-nothing": Words(
        "verl_overrides/ holds neither new files nor seams",
        "Nothing was taken from a checkout yet.",
        "bash make_patch.sh --repo CHECKOUT",
    ),
    "build-stray": Words(
        "{path} stands among the seams and is no .patch file",
        "A copy of a verl file was saved there.",
        "Remove it; seams are taken from a checkout: bash make_patch.sh --repo CHECKOUT",
    ),
    "build-twice": Words(
        "{path} is both a new file and a seam",
        "A file that verl has was copied to verl_overrides/verl/.",
        "Keep one of the two.",
    ),
    "build-symlink": Words(
        "{path} is a symbolic link", "A patch carries plain files only.", "Put the file itself."
    ),
    "build-not-a-file": Words(
        "{path} is not a plain file", "A patch carries plain files only.", "Remove it."
    ),
    "build-mode": Words(
        "{path} is executable or has another special mode",
        "A patch of ours sets no modes.",
        "chmod 644 {path}",
    ),
    "build-binary": Words(
        "{path} is not UTF-8 text", "A patch carries text only.", "Keep it out of the tree."
    ),
    "build-empty": Words(
        "{path} is empty", "GNU patch cannot make an empty file.", "Give it its licence header."
    ),
    "build-crlf": Words(
        "line {line} of {path} has a carriage return",
        "An editor or git's autocrlf wrote the line ends of Windows.",
        "sed -i 's/\\r$//' {path}",
    ),
    "build-no-final-newline": Words(
        "{path} does not end in a newline", "An editor left it out.", "echo >> {path}"
    ),
    "build-hidden-character": Words(
        "line {line} of {path} holds an invisible or reordering character",
        "It was pasted from a page; such characters make code read other than it runs.",
        "Remove it, or write it as an escape.",
    ),
    "build-seam-path": Words(
        "the seam {path}.patch does not hold exactly the one section for {path}",
        "It was renamed or edited by hand.",
        "Take it from a checkout again: bash make_patch.sh --repo CHECKOUT",
    ),
    "build-seam-preamble": Words(
        "the seam {path}.patch has text before 'diff --git'",
        "It was edited by hand.",
        "Take it from a checkout again: bash make_patch.sh --repo CHECKOUT",
    ),
    "build-base-has": Words(
        "{path} is a new file of the patch, but verl has it already",
        "An edit of verl's own file belongs in a seam.",
        "Edit it in a checkout, then: bash make_patch.sh --repo CHECKOUT",
    ),
    "build-base-lacks": Words(
        "{path} has a seam, but verl has no such file",
        "The seam was made for another verl.",
        "Make it again for the pinned verl: bash make_patch.sh --repo CHECKOUT",
    ),
    "build-base-differs": Words(
        "the seam of {path} was made for another content of that file",
        "The checkout was not at the pinned commit, or the base tree was edited.",
        "Make it again for the pinned verl: bash make_patch.sh --repo CHECKOUT",
    ),
    "build-stale": Words(
        "patches/{path} is not what verl_overrides/ builds",
        "One of the two was edited and the other not rebuilt.",
        _REBUILD,
    ),
    "build-unlisted": Words(
        "patches/{path} is a file that the manifest does not name",
        "It was put there by hand; patches/ is generated.",
        "Remove it.",
    ),
}


def render_error(error: PatchkitError) -> str:
    """Returns the text of a refusal, without a final newline."""
    parts = parts_of(error)
    lines = [f"refused: {parts['what']}"]
    lines += [
        f"  {label + ':':<9} {parts[label]}"
        for label in ("expected", "found", "cause", "next")
        if parts.get(label)
    ]
    return "\n".join(lines + [f"  {line}" for line in error.data.get("diff", ())])


def parts_of(error: PatchkitError) -> dict[str, Any]:
    """Returns the parts of a refusal: reason, what, expected, found, cause, next."""
    words = WORDS[error.reason]
    data = {"target": "VERL"} | {key: value for key, value in error.data.items()}
    parts = {"reason": error.reason, "what": words.what.format(**data)}
    for key in ("expected", "found"):
        if error.data.get(key) is not None:
            parts[key] = str(error.data[key])
    parts["cause"] = words.cause.format(**data)
    parts["next"] = words.next.format(**data)
    return parts
