# SPDX-License-Identifier: Apache-2.0
"""What make_patch.sh says: of a checkout's edits, of the sources, of the base."""

from .words import Words

_REBUILD = "bash make_patch.sh"

WORDS: dict[str, Words] = {
    # Taking edits from a checkout.
    "git-missing": Words("git is not installed", "make_patch.sh needs it.", "Install git."),
    "git-failed": Words("git {command} failed in {path}", "The checkout is damaged, or not a clone.", "git status"),
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
    "take-wrong-commit": Words(
        "{target} is not at the base, nor on top of it",
        "Another version of verl is checked out; its own changes would end up in the patch.",
        "git -C {target} worktree add DIR {commit}   (make the edits there)",
    ),
    "take-deleted": Words(
        "{path} was deleted in the checkout",
        "Our patches never delete verl's files.",
        "git checkout -- {path}   (in the checkout)",
    ),
    "take-outside": Words(
        "{path} was changed, which lies outside verl/",
        "The patch carries verl's package only; or a newer verl is checked out.",
        "Undo it there, or keep it in a branch of its own: git -C {target} checkout -- {path}",
    ),
    "take-both-sides": Words(
        "{path} was edited in the checkout and in the sources here, differently: the checkout has "
        "{theirs}, the sources {ours}, and the checkout was given {given}",
        "Someone edited gradloc/ or verl_overrides/ directly, or took another checkout's edits since.",
        "Bring both edits together in the checkout (git diff shows yours), undo the one in "
        "the sources with git checkout, and run this again.",
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
        "--check compares patches/ with its sources; no checkout takes part.",
        "bash make_patch.sh --check",
    ),
    "take-other-base": Words(
        "the sources are for the pinned base only",
        "A patch for another commit cannot be built from it.",
        "Add --output FILE to write such a patch elsewhere.",
    ),
    # The build.
    "build-nothing": Words(
        "gradloc/ and verl_overrides/ hold neither new files nor seams",
        "Nothing was taken from a checkout yet.",
        "bash make_patch.sh --repo CHECKOUT",
    ),
    "build-no-version": Words(
        "{path} names no version",
        "The line __version__ = ... is missing there.",
        "Put it back: it is the one place that names the version.",
    ),
    "build-twice": Words(
        "{path} is both a new file and a seam",
        "A file that verl has was copied to verl_overrides/.",
        "Keep one of the two.",
    ),
    "build-symlink": Words("{path} is a symbolic link", "A patch carries plain files only.", "Put the file itself."),
    "build-not-a-file": Words("{path} is not a plain file", "A patch carries plain files only.", "Remove it."),
    "build-mode": Words(
        "{path} is executable or has another special mode",
        "A patch of ours sets no modes.",
        "chmod 644 {path}",
    ),
    "build-binary": Words("{path} is not UTF-8 text", "A patch carries text only.", "Keep it out of the tree."),
    "build-empty": Words("{path} is empty", "GNU patch cannot make an empty file.", "Give it its licence header."),
    "build-crlf": Words(
        "line {line} of {path} has a carriage return",
        "An editor or git's autocrlf wrote the line ends of Windows.",
        "sed -i 's/\\r$//' {path}",
    ),
    "build-no-final-newline": Words("{path} does not end in a newline", "An editor left it out.", "echo >> {path}"),
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
        "patches/{path} is not what its sources build",
        "One of the two was edited and the other not rebuilt.",
        _REBUILD,
    ),
    "build-unlisted": Words(
        "patches/{path} is a file that the manifest does not name",
        "It was put there by hand; patches/ is generated.",
        "Remove it.",
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
}
