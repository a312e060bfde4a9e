# SPDX-License-Identifier: Apache-2.0
"""What is said of a target, its state, its disk, and of a download."""

from .words import Words

WORDS: dict[str, Words] = {
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
        "Patching an environment changes every program that runs in it, so it is asked for by name.",
        "python apply_patch.py --installed   (with the Python of that environment)",
    ),
    "target-not-installed": Words(
        "NOT_VERL: this Python has no verl",
        "apply_patch.py was started with another Python than the one that trains.",
        "ENVIRONMENT/bin/python apply_patch.py --installed",
    ),
    "target-count": Words(
        "exactly one target is needed, and {found} were named",
        "A folder is never guessed: that is how an environment gets patched by accident.",
        "python apply_patch.py --repo VERL",
    ),
    # The state.
    "state-drifted": Words(
        "DRIFTED: {count} of the files that the patch touches hold neither verl's content nor the "
        "patch's, first {path}",
        "{why}.{unforced}",
        "git -C {target} stash push -- {path}   (keeps your edit, restores the file)",
        "Move {target}/{path} away and take it from the verl==0.7.0 archive again.",
    ),
    "state-wrong-base": Words(
        "WRONG_BASE: this is verl at {head}, the patch is for {commit}, and {count} of the files "
        "that it touches differ, first {path}",
        "Another version of verl is checked out, or commits of your own changed these files.{unforced}",
        "git -C {target} worktree add DIR {commit}   (a second checkout, at the right commit)",
        "Use verl 0.7.0.",
    ),
    "state-crlf": Words(
        "DRIFTED: {count} of the files that the patch touches have CRLF line ends, first {path}",
        "The checkout was made with core.autocrlf, or through Windows; only the line ends differ.{unforced}",
        "git clone -c core.autocrlf=false {target} DIR   (and use DIR)",
        "Unpack the archive again, without converting line ends.",
    ),
    "state-in-the-way": Words(
        "DRIFTED: something else stands where the patch adds {count} files, first {path}",
        "Files of yours under the same name, or a version of the patch that is not known here.{unforced}",
        "Move away what the lines below name, then run this again.",
    ),
    "state-edited": Words(
        "DRIFTED: {count} of the patch's files were edited after it was applied, first {path}",
        "Work on the patch in this checkout.{unforced}",
        "bash make_patch.sh --repo {target}   (takes the edits into the sources; then this runs)",
    ),
    "state-partial": Words(
        "PARTIAL: the checkout is half patched",
        "Some files were restored by hand, by git checkout or by git stash. Every content is "
        "known, so nothing can be lost.",
        "python apply_patch.py --repo {target} --force   (finishes; with --reverse it undoes)",
    ),
    "git-unfinished": Words(
        "{operation} is under way in {target}",
        "Files that change beneath it end in the wrong commit.",
        "Finish it first (git -C {target} status says how), or add --force.",
    ),
    "changed-meanwhile": Words(
        "{path} was changed while this ran; everything else was put back",
        "An editor or another program wrote to it.",
        "python apply_patch.py --repo {target} --status",
    ),
    "blocked-folder": Words(
        "{path} is not a folder",
        "A link or a file stands where the patch needs a folder; links are never followed.",
        "Move it away.",
    ),
    "blocked-state-folder": Words(
        "{path} is not a folder",
        "Something else stands where this tool keeps its lock and journal.",
        "Move it away.",
    ),
    "blocked-permission": Words(
        "the folder {path} may not be written to",
        "It belongs to another user, or is mounted read-only.",
        "Run as the owner of {target}.",
    ),
    "locked": Words(
        "another run is at work in this checkout ({path})",
        "Two runs were started; the kernel drops the lock when the other ends, however it ends.",
        "Wait for it, then run this again.",
    ),
    # The disk.
    "disk-failed": Words(
        "the disk failed at {path}; everything is as it was before",
        "The disk is full, read-only or damaged, or a limit was hit.",
        "Make room or repair it, then run this again: df -h {target}",
    ),
    "disk-failed-again": Words(
        "the disk failed, and so did putting things back; the journal is {path}",
        "The disk is full, read-only or damaged.",
        "Repair it, then: python apply_patch.py --repo {target}   (finishes or undoes, then "
        "applies; with --reverse it takes the patch off)",
    ),
    "disk-too-small": Words(
        "the disk of {path} has not enough room; nothing was written",
        "It is full.",
        "Make room: df -h {path}",
    ),
    "journal-broken": Words(
        "the journal {path} of an interrupted run cannot be used",
        "It, or what it names, was edited or damaged.",
        "python apply_patch.py --repo {target} --status   (names each file's state); restore what "
        "it names, then remove the journal's folder",
    ),
    "journal-conflict": Words(
        "{path} was edited after a run was interrupted there",
        "The journal {journal} can finish or undo the rest only where contents are known; the "
        "files of before stand beside it as original-*.",
        "Move your edit of {path} elsewhere, git -C {target} checkout -- {path}, run this again.",
        "Move your edit of {path} elsewhere, put the file of before in its place, run this again.",
    ),
    "internal": Words(
        "an error in this tool; what had begun was put back",
        "A bug.",
        "Run the same with --debug and report what it prints.",
    ),
    # The download.
    "net-no-requests": Words(
        "downloads need the Python package requests, which is not installed here ({url})",
        "Nothing else in this tool needs it.",
        "pip install requests   (or download the file yourself and use --patch-file)",
    ),
    "net-scheme": Words(
        "only https is used, on every hop from {url}",
        "Anything else can be changed on the way.",
        "Use the https address, or download the file yourself and use --patch-file.",
    ),
    "net-userinfo": Words(
        "the address {url} came with a user name or a password in it",
        "Such addresses end in logs.",
        "Download the file yourself and use --patch-file.",
    ),
    "net-blob-page": Words(
        "{url} is the page that shows the file, not the file",
        "It was copied from the browser's address line.",
        "--patch-url {raw}",
    ),
    "net-hops": Words("{url} redirects in circles or too often", "The server is set up wrongly.", "Try later."),
    "net-status": Words(
        "the server does not have {url}",
        "It is misspelt, moved or not public.",
        "Open it in a browser, or use --patch-file.",
    ),
    "net-failed": Words(
        "{url} could not be read, in {attempts} attempts",
        "No network, a proxy, a certificate or the server.",
        "Run this again later, or download the file yourself and use --patch-file.",
    ),
    "net-encoding": Words(
        "the server compressed {url} although it was asked not to",
        "A proxy or a server that ignores the request.",
        "Download the file yourself and use --patch-file.",
    ),
    "net-deadline": Words("{url} takes too long", "A slow or a hostile server.", "Run this again later."),
    "net-size": Words(
        "{url} has not the size of the patch",
        "It is another file, or another version.",
        "Check the address.",
    ),
    "net-html": Words(
        "the server sent a web page, not the patch: {url}",
        "A login or an error page, or the page that shows the file.",
        "Use the address of the raw file.",
    ),
}
