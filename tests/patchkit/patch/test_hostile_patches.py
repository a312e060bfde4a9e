# SPDX-License-Identifier: Apache-2.0
"""Patches that must be refused: exit 3, the reason, the line, an untouched tree.

git accepts about half of them in silence. Each patch comes with its own right checksum, so it is the
patch language that refuses, not the digest.
"""

import gzip
import io
import zipfile

import pytest

from patchkit.build.sources import new_file_section
from patchkit.errors import IntegrityError
from patchkit.patch.content import ABSENT as ABSENT_BLOB
from patchkit.patch.content import blob_id, sha256_hex
from patchkit.patch.language import parse
from tests.patchkit import world
from tests.patchkit.world import ACTOR, BASE, RESULT

GOOD = world.seam(ACTOR, BASE[ACTOR], RESULT[ACTOR])
BLOB = blob_id(b"x\n")


def added(path: str, text: str = "x\n", mode: str = "100644") -> str:
    """Returns a section that adds ``path``."""
    return new_file_section(path, text).replace("mode 100644", f"mode {mode}")


def zipped(text: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("gradloc.patch", text)
    return buffer.getvalue()


def two_hunks() -> str:
    after = BASE[ACTOR].replace("line 10\n", "line ten\n").replace("line 30\n", "line thirty\n")
    return world.seam(ACTOR, BASE[ACTOR], after)


def swapped(text: str) -> str:
    head, first, second = text.split("@@ -")
    return head + "@@ -" + second + "@@ -" + first


def overlapping(text: str) -> str:
    return text.replace("@@ -27,7 +27,7 @@", "@@ -12,7 +12,7 @@")


HEADER = f"diff --git a/{ACTOR} b/{ACTOR}\n"
ZERO_CONTEXT = (
    HEADER + f"index {blob_id(BASE[ACTOR].encode())}..{blob_id(RESULT[ACTOR].encode())} 100644\n"
    f"--- a/{ACTOR}\n+++ b/{ACTOR}\n@@ -10,0 +11 @@ actor line 10\n+hook()\n"
)
CONTEXT_DIFF = f"*** a/{ACTOR}\n--- b/{ACTOR}\n***************\n*** 1,2 ****\n"

PATCHES: dict[str, tuple[str | bytes, str]] = {
    "patch-empty": (b"", "patch-empty"),
    "patch-html": ("<!DOCTYPE html>\n<html>404</html>\n", "patch-html"),
    "patch-gzip": (gzip.compress(GOOD.encode()), "patch-compressed"),
    "patch-zip": (zipped(GOOD), "patch-compressed"),
    "patch-utf16": (GOOD.encode("utf-16"), "patch-utf16"),
    "patch-utf16-without-bom": (GOOD.encode("utf-16-le"), "patch-utf16"),
    "patch-bom": (b"\xef\xbb\xbf" + GOOD.encode(), "patch-bom"),
    "patch-crlf": (GOOD.replace("\n", "\r\n"), "patch-crlf"),
    "patch-one-cr": (GOOD.replace("+hook()\n", "+hook()\r\n"), "patch-crlf"),
    "patch-nul-in-path": (GOOD.replace("dp_actor", "dp\0actor"), "patch-nul"),
    "patch-nul-in-body": (GOOD.replace("+hook", "+ho\0ok"), "patch-nul"),
    "patch-truncated-hunk": (GOOD[: GOOD.index("+hook")], "patch-truncated"),
    "patch-no-final-newline": (GOOD[:-1], "patch-no-final-newline"),
    "patch-count-short": (GOOD.replace("-8,6 +8,7", "-8,8 +8,9"), "patch-truncated"),
    "patch-count-short-before-a-file": (GOOD.replace("-8,6 +8,7", "-8,8 +8,9") + added("verl/z.py"), "patch-count"),
    "patch-count-long": (GOOD.replace("-8,6 +8,7", "-8,5 +8,6"), "patch-count"),
    "patch-trailing-garbage": (GOOD + "-- \n2.39.5\n", "patch-count"),
    "patch-trailing-text": (GOOD + "the end\n", "patch-unknown-line"),
    "patch-trailing-empty-line": (GOOD + "\n", "patch-unknown-line"),
    "patch-same-file-twice": (GOOD + GOOD, "path-twice"),
    "patch-header-mismatch": (GOOD.replace("+++ b/verl/w", "+++ b/verl/x"), "names-disagree"),
    "patch-git-line-mismatch": (GOOD.replace(HEADER, "diff --git a/verl/x.py b/verl/x.py\n"), "names-disagree"),
    "patch-git-line-two-names": (GOOD.replace(HEADER, f"diff --git a/verl/x.py b/{ACTOR}\n"), "names-disagree"),
    "patch-hunks-descending": (swapped(two_hunks()), "patch-hunk-order"),
    "patch-hunks-overlapping": (overlapping(two_hunks()), "patch-hunk-order"),
    "patch-hunks-wrong-shift": (GOOD.replace("-8,6 +8,7", "-8,6 +9,7"), "patch-hunk-order"),
    "patch-zero-context": (ZERO_CONTEXT, "patch-context"),
    "patch-long-line": ("diff --git " + "x" * (6 * 2**20) + "\n", "patch-too-large"),
    "patch-many-hunks": (GOOD.split("@@")[0] + "@@ -1 +1 @@\n-a\n+b\n" * 250_000, "patch-context"),
    "path-dotdot": (added("verl/../../escape"), "path-unsafe"),
    "path-dot": (added("verl/./x"), "path-unsafe"),
    "path-absolute": (added("/tmp/x"), "path-unsafe"),
    "path-double-slash": (added("//x"), "path-unsafe"),
    "path-drive": (added("C:\\x"), "path-unsafe"),
    "path-drive-relative": (added("C:x"), "path-unsafe"),
    "path-unc": (added("\\\\srv\\x"), "path-unsafe"),
    "path-dotgit": (added(".git/hooks/x"), "path-unsafe"),
    "path-dotgit-case": (added(".GIT/config"), "path-unsafe"),
    "path-dotgit-short": (added("git~1/config"), "path-unsafe"),
    "path-dotgit-inside": (added("verl/pkg/.git/config"), "path-unsafe"),
    "path-dotgit-dot": (added("verl/.git./x"), "path-unsafe"),
    "path-dotgit-space": (added("verl/.git /x"), "path-unsafe"),
    "path-dotgit-stream": (added("verl/.git::$INDEX_ALLOCATION/x"), "path-unsafe"),
    "path-gitmodules": (added("verl/.gitmodules"), "path-unsafe"),
    "path-gitattributes": (added("verl/.gitattributes"), "path-unsafe"),
    "path-backslash": (added("verl\\x.py"), "path-unsafe"),
    "path-control": (added("verl/a\tb.py"), "path-unsafe"),
    "path-quoted": (added('"verl/a\\nb.py"'), "path-unsafe"),
    "path-nfd": (added("verl/u\u0308.py"), "path-unsafe"),
    "path-bidi": (added("verl/\u202eyp.py"), "path-unsafe"),
    "path-homoglyph": (added("verl/\u0430.py"), "path-unsafe"),
    "path-case-collision": (added("verl/pkg/A.py") + added("verl/pkg/a.py"), "path-case"),
    "path-outside-prefix": (added("setup.py"), "path-unsafe"),
    "path-workflow": (added(".github/workflows/x.yml"), "path-unsafe"),
    "path-device-name": (added("verl/con.py"), "path-unsafe"),
    "path-aux": (added("verl/aux/x.py"), "path-unsafe"),
    "path-trailing-dot": (added("verl/x."), "path-unsafe"),
    "path-trailing-space": (added("verl/x "), "path-unsafe"),
    "path-too-long": (added("verl/" + "x" * 200), "path-unsafe"),
    "path-file-and-dir": (added("verl/x") + added("verl/x/y"), "path-file-and-folder"),
    "type-symlink": (added("verl/link", "/etc/passwd\n", "120000"), "type-symlink"),
    "type-symlink-then-through": (added("verl/link", "/tmp\n", "120000") + added("verl/link/x"), "type-symlink"),
    "type-gitlink": (added("verl/sub", "Subproject\n", "160000"), "type-gitlink"),
    "mode-exec": (added("verl/x.py", mode="100755"), "mode-refused"),
    "mode-change-only": (HEADER + "old mode 100644\nnew mode 100755\n", "mode-refused"),
    "mode-in-index-line": (GOOD.replace(" 100644\n", " 100755\n"), "mode-refused"),
    "mode-setuid": (added("verl/x.py", mode="104755"), "mode-refused"),
    "mode-100777": (added("verl/x.py", mode="100777"), "mode-refused"),
    "rename": (f"diff --git a/{ACTOR} b/{ACTOR}\nsimilarity index 100%\nrename from {ACTOR}\n", "patch-renames"),
    "copy": (HEADER + f"copy from {ACTOR}\n", "patch-renames"),
    "delete-file": (HEADER + "deleted file mode 100644\n", "patch-deletes"),
    "binary-literal": (added("verl/x.py").split("index")[0] + "GIT binary patch\nliteral 0\n", "patch-unknown-line"),
    "binary-files-differ": (HEADER + "Binary files a/x and b/x differ\n", "patch-binary"),
    "ed-style": ("10a\nhook()\n.\n", "patch-no-files"),
    "context-diff": (CONTEXT_DIFF, "patch-dialect"),
    "plain-unified-diff": (GOOD[GOOD.index("---") :], "patch-dialect"),
    "content-bidi": (GOOD.replace("+hook()", "+hook()  # \u202e"), "patch-hidden-character"),
    "content-zero-width": (GOOD.replace("+hook", "+ho\u200bok"), "patch-hidden-character"),
    "abbreviated-index": (GOOD.replace(blob_id(BASE[ACTOR].encode()), "abcdef01"), "abbreviated"),
    "index-of-nothing": (GOOD.replace(blob_id(RESULT[ACTOR].encode()), ABSENT_BLOB), "index"),
    "index-lies": (GOOD.replace(blob_id(RESULT[ACTOR].encode()), BLOB), "result-digest"),
    "no-hunks": (GOOD[: GOOD.index("@@")], "patch-no-hunks"),
    "only-context": (GOOD[: GOOD.index("@@")] + "@@ -1,2 +1,2 @@\n actor line 1\n actor line 2\n", "patch-no-hunks"),
    "result-without-newline": (added("verl/x.py") + "\\ No newline at end of file\n", "patch-result-newline"),
    "sections-unsorted": (added("verl/z.py") + added("verl/a.py"), "patch-unsorted"),
    "preamble-too-long": ("words\n" * 70 + GOOD, "patch-dialect"),
    "not-utf8": (GOOD.replace("+hook", "+h\xf6").encode("latin-1"), "patch-not-utf8"),
    "new-file-in-two-hunks": (added("verl/x.py") + "@@ -5,0 +9 @@\n+y\n", "patch-new-file"),
    "count-of-one-spelt-out": (added("verl/x.py").replace("+1 @@", "+1,1 @@"), "unknown-line"),
}


@pytest.mark.parametrize("case", PATCHES)
def test_a_hostile_patch_is_refused_and_the_tree_untouched(apply, tree, tmp_path, case):
    text, reason = PATCHES[case]
    data = text if isinstance(text, bytes) else text.encode()
    file = tmp_path / "hostile.patch"
    file.write_bytes(data)
    with world.unchanged(tmp_path):
        options = ("--repo", tree, "--patch-file", file, "--patch-sha256", sha256_hex(data))
        outcome = apply(*options, "--json")
        assert outcome.code == 3, outcome.out
        assert reason in outcome.reason, outcome.out
        shown = apply(*options).err
        assert shown.startswith("refused: ") and "cause:" in shown and "next:" in shown


def test_the_patch_that_these_were_made_from_is_accepted(apply, tree, tmp_path):
    file = tmp_path / "good.patch"
    file.write_text("Description: a preamble\n\n" + GOOD)
    digest = sha256_hex(file.read_bytes())
    assert apply("--repo", tree, "--patch-file", file, "--patch-sha256", digest).code == 0
    assert world.files_of(tree)[ACTOR] == RESULT[ACTOR]


LINES = {
    "patch-one-cr": 9,
    "patch-truncated-hunk": 8,
    "patch-count-short-before-a-file": 13,
    "patch-count-long": 12,
    "patch-trailing-garbage": 13,
    "patch-trailing-text": 13,
    "patch-header-mismatch": 4,
    "patch-hunks-overlapping": 14,
    "patch-zero-context": 5,
    "type-symlink": 2,
    "mode-in-index-line": 2,
    "delete-file": 2,
    "abbreviated-index": 2,
    "content-bidi": 9,
    "no-hunks": 4,
    "only-context": 5,
    "plain-unified-diff": 1,
    "preamble-too-long": 65,
    "new-file-in-two-hunks": 8,
}


@pytest.mark.parametrize(("case", "line"), LINES.items(), ids=LINES)
def test_a_refusal_names_the_line_of_the_patch(case, line):
    text, _ = PATCHES[case]
    with pytest.raises(IntegrityError) as refused:
        parse(text if isinstance(text, bytes) else text.encode())
    assert refused.value.data["line"] == line and f"line {line}" in str(refused.value)
