# SPDX-License-Identifier: Apache-2.0
"""What is said of a patch, its checksum and its manifest."""

from .words import Words

_GET_AGAIN = "Get the file again, whole and unchanged."
_BUILT = "Use the patch as built: patches/gradloc.patch."
_NOT_OURS = "The patch was not written by make_patch.sh, or was changed afterwards."
_RESTORE = "git checkout -- patches/   (or unpack the release again)"

WORDS: dict[str, Words] = {
    # The checksum.
    "sums-missing": Words(
        "no checksum for {path}",
        "A patch is only applied when something says what it should be, and neither "
        "--patch-sha256, --sha256-file, a file {name}.sha256 beside it nor the manifest does.",
        "Add --patch-sha256 HEX with the sha256 that its author published.",
    ),
    "sums-empty": Words("the checksum file {path} is empty", "It was cut off or never written.", _GET_AGAIN),
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
        "Leave out --patch-file and --patch-url: the patch that comes with this tool has the same options and trains.",
    ),
    "sums-manifest": Words(
        "{path} and the manifest disagree about the patch",
        "patches/ was put together from two versions.",
        _RESTORE,
    ),
    "digest-twice": Words(
        "--patch-sha256 and --sha256-file were both given",
        "One digest decides.",
        "Leave one out.",
    ),
    "digest-without-patch": Words(
        "--patch-sha256 and --sha256-file speak of a patch, and none was named",
        "The patch that comes with this tool is verified without them.",
        "Add --patch-file FILE or --patch-url URL, or leave them out.",
    ),
    "version-unknown": Words(
        "there is no such version of the patch", "It is misspelt.", "python apply_patch.py --list"
    ),
    # The manifest.
    "manifest-unreadable": Words(
        "the manifest {path} cannot be read", "The folder patches/ is not complete.", _RESTORE
    ),
    "manifest-too-large": Words("the manifest {path} is too large to be ours", "It is another file.", _RESTORE),
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
    "manifest-nesting": Words("the manifest {path} is nested too deeply", "It is not our manifest.", _RESTORE),
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
    "patch-compressed": Words("the patch is {kind}-compressed", "An archive was saved under its name.", "Unpack it."),
    "patch-utf16": Words("the patch is UTF-16", "A shell redirection re-encoded it.", _GET_AGAIN),
    "patch-bom": Words("the patch begins with a byte order mark", "An editor saved it again.", _GET_AGAIN),
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
    "patch-no-files": Words("the patch names no file ('diff --git' never occurs)", "It is another file.", _BUILT),
    "patch-dialect": Words(
        "line {line}: only git's own form of a diff is read",
        "It is a context, ed or plain diff.",
        _BUILT,
    ),
    "patch-unknown-line": Words("line {line} of the patch is not a part of the patch language", _NOT_OURS, _BUILT),
    "patch-names-disagree": Words("line {line} of the patch names another file than its section", _NOT_OURS, _BUILT),
    "patch-abbreviated": Words(
        "line {line} of the patch names {path} by an abbreviated id",
        "It was made by git diff without --full-index, so its base and its result cannot be verified.",
        "Make it again with: bash make_patch.sh --repo CHECKOUT --output FILE",
    ),
    "patch-index": Words("line {line}: the ids of {path} do not agree with what its section does", _NOT_OURS, _BUILT),
    "patch-no-hunks": Words("the patch's section for {path} changes nothing (line {line})", _NOT_OURS, _BUILT),
    "patch-new-file": Words("line {line}: the new file {path} is not one whole hunk", _NOT_OURS, _BUILT),
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
    "patch-truncated": Words("the patch ends in the middle, at line {line}", "The file was cut off.", _GET_AGAIN),
    "patch-result-newline": Words(
        "line {line}: the patch would leave {path} without a final newline", _NOT_OURS, _BUILT
    ),
    "patch-hidden-character": Words(
        "line {line}: the patch adds an invisible or reordering character to {path}",
        "Such characters make code read other than it runs.",
        "Do not use this patch.",
    ),
    "patch-unsorted": Words("the patch's sections are not in order: {path} after {other}", _NOT_OURS, _BUILT),
    "patch-deletes": Words("line {line}: the patch deletes {path}", "Our patches never delete verl's files.", _BUILT),
    "patch-renames": Words("line {line}: the patch renames or copies {path}", _NOT_OURS, _BUILT),
    "patch-binary": Words("line {line}: the patch holds binary data for {path}", _NOT_OURS, _BUILT),
    "type-symlink": Words(
        "line {line}: the patch makes {path} a symbolic link",
        "Links lead a writer out of the tree.",
        "Do not use this patch.",
    ),
    "type-gitlink": Words("line {line}: the patch makes {path} a submodule", _NOT_OURS, "Do not use this patch."),
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
    "path-case": Words("{path} and {other} differ in case only", "On some disks they are one file.", _BUILT),
    "path-file-and-folder": Words("{path} is both a file and the folder of {other}", _NOT_OURS, _BUILT),
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
    "result-not-utf8": Words("{path} is not UTF-8", "It is not verl's file.", "Restore it from verl."),
}
