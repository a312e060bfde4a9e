# SPDX-License-Identifier: Apache-2.0
"""Every state of a tree, and every odd target: what is done is done whole, what is refused changes nothing."""

import errno
import io
import os
import re
import shlex
import subprocess
import sys

import pytest

from patchkit.apply import STATES
from patchkit.patch import blob_id, read_regular
from patchkit.refusal import guarded, say
from tests.conftest import ROOT
from tests.patchkit.world import (
    ACTOR,
    BASE,
    OTHER,
    RESULT,
    SEAM,
    TOUCHED,
    TRAINER,
    files_of,
    git,
    make_clone,
    unchanged,
    write_tree,
)  # fmt: skip


def test_on_and_off_again_are_the_same_bytes_and_a_second_time_writes_nothing(apply, tree):
    for options, did, after in (((), "applied", RESULT), (("--reverse",), "taken off", BASE)):
        with unchanged(tree):
            apply(tree, "--check", *options).expect(0, *TOUCHED)
            assert apply(tree, "--check", "--json", *options).expect(0).document["changed"] == sorted(TOUCHED)
        apply(tree, *options).expect(0, f"{did}: 3 files")
        assert files_of(tree) == after
        with unchanged(tree):
            apply(tree, *options).expect(0, "nothing to")
            apply(tree, "--check", *options).expect(0, "nothing to")
            apply(tree, "--status", "--quiet").expect(0, "PRISTINE" if options else "APPLIED")
    assert not (tree / ".gradloc-patch").exists()


def as_worktree(clone):
    git(clone, "worktree", "add", "-q", "--detach", str(clone.with_name("linked")))
    return clone.with_name("linked")


def as_submodule(clone):
    outer = make_clone(clone.with_name("outer"), {"readme": "ours\n"})
    git(outer, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(clone), "verl-inside")
    return outer / "verl-inside"


def in_another_repository(clone):
    """Where `git apply` exits 0 and does nothing."""
    return write_tree(make_clone(clone.with_name("outer"), {"readme": "ours\n"}) / "vendored", BASE)


def named_by_a_link(clone):
    clone.with_name("link").symlink_to(clone)
    return clone.with_name("link")


def with_spaces(clone):
    return clone.rename(clone.with_name("a clone, with 'quotes'"))


def with_a_hostile_configuration(clone):
    (clone / ".git/config").open("a").write("[core]\n fsmonitor = touch PWNED\n[apply]\n whitespace = fix\n")
    return clone


KINDS = [as_worktree, as_submodule, in_another_repository, named_by_a_link, with_spaces, with_a_hostile_configuration]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_the_tree_is_it_is_patched_and_taken_back_and_git_sees_no_other_file(apply, clone, kind):
    tree = kind(clone)
    apply(tree).expect(0)
    assert files_of(tree.resolve()) | {".git": ""} == RESULT | {".git": ""}
    if kind not in (in_another_repository, with_a_hostile_configuration):
        said = subprocess.run(["git", "status", "--short", "-uall"], cwd=tree, capture_output=True, text=True).stdout
        assert sorted(line[3:] for line in said.splitlines()) == sorted(TOUCHED)
    apply(tree, "--reverse").expect(0)
    assert {path: text for path, text in files_of(tree.resolve()).items() if path != ".git"} == BASE
    assert not list(tree.rglob("PWNED"))


def test_a_path_that_cannot_be_printed_is_no_failure(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stdout", out)
    assert guarded(lambda: say("verl-\udcff"), []) == 0 and b"udcff" in out.buffer.getvalue()


def test_an_installed_package_is_named_on_purpose(apply, tmp_path, monkeypatch):
    site = write_tree(tmp_path / "site-packages", BASE)
    with unchanged(site):
        apply(site).expect(1, "an environment's package folder", "--installed")
    monkeypatch.setattr("patchkit.apply.installed_root", lambda: site)
    apply("--installed").expect(0, "(package of verl 0.7.0)")
    apply("--installed", "--reverse").expect(0)
    assert files_of(site) == BASE


def test_what_is_no_tree_is_no_target(apply, tmp_path, tree):
    apply(tmp_path / "nowhere").expect(1, "no folder that can be read")
    (tmp_path / "loop").symlink_to("loop")
    apply(tmp_path / "loop").expect(1, "no folder that can be read")
    apply(tree / "verl").expect(1, "NOT_VERL", f"--repo {tree}")
    for wrong in ([""], [tree, "--repo", tree], [tree, "--status", "--check"], []):
        apply(*wrong).expect(2)
    assert apply(tree, "--frobnicate", "--json").document["exit_code"] == 2


def edited(tree):
    (tree / ACTOR).write_text(BASE[ACTOR].replace("actor line 9\n", "mine\n"))


def missing(tree):
    (tree / TRAINER).unlink()


def linked_file(tree):
    (tree / ACTOR).rename(tree / "elsewhere.py")
    (tree / ACTOR).symlink_to(tree / "elsewhere.py")


def linked_folder(tree):
    (tree / "verl/workers").rename(tree / "elsewhere")
    (tree / "verl/workers").symlink_to(tree / "elsewhere")


def pipe(tree):
    (tree / ACTOR).unlink()
    os.mkfifo(tree / ACTOR)


def a_folder(tree):
    (tree / ACTOR).unlink()
    (tree / ACTOR).mkdir()


def without_its_folder(tree):
    (tree / OTHER).unlink()
    (tree / OTHER).parent.rmdir()


def a_state_folder_elsewhere(tree):
    (tree / ".gradloc-patch").symlink_to(tree.parent)


def read_only(tree):
    (tree / ACTOR).chmod(0o444)


def a_file(path, text, **others):
    """A tree in which ``path`` has ``text``, and others theirs."""
    return lambda tree: write_tree(tree, {path: text} | {others.pop("also", path): others.pop("has", text)})


VERSION, RELEASED = "verl/version/version", "in place of the file that the public patch makes\n"
HALF = BASE[TRAINER].replace("trainer line 7\n", "").replace("line 51\n", "line mine\n")
OTHERS = {"also": ACTOR, "has": "theirs\n"}
REFUSED = {
    "edited": (edited, "DRIFTED", "hunk 1 does not fit at line 9"),
    "forty lines lower": (a_file(ACTOR, "# a new line\n" * 40 + BASE[ACTOR]), "hunk 1 does not fit at line 8"),
    "CRLF": (a_file(ACTOR, BASE[ACTOR].replace("\n", "\r\n")), "CRLF line ends", "core.autocrlf"),
    "missing": (missing, "DRIFTED", "the file is missing"),
    "a link": (linked_file, "DRIFTED", "a symbolic link is in the way", "ls -ld"),
    "a linked folder": (linked_folder, "DRIFTED", "verl/workers is a symbolic link", "ls -ld"),
    "a pipe": (pipe, "DRIFTED", "a named pipe", "ls -ld"),
    "a folder": (a_folder, "DRIFTED", "a folder is in the way", "ls -ld"),
    "no folder for the new file": (without_its_folder, "may not be written to"),
    "a state folder elsewhere": (a_state_folder_elsewhere, "is not a folder of this tool"),
    "read-only": (read_only, "is read-only", "chmod u+w"),
    "in the way": (a_file(SEAM, "mine = True\n"), "DRIFTED", "another file is where the patch adds one"),
    "the released patch": (a_file(ACTOR, RELEASED), "the publicly released GradLoc patch is on this tree", "apply -R"),
    "another verl": (a_file(VERSION, "0.6.1\n", **OTHERS), "WRONG_BASE: this is verl 0.6.1", "Use verl 0.7.0"),
    "verl 0.9": (a_file(VERSION, "0.9.1\n", **OTHERS), "WRONG_BASE: this is verl 0.9.1", "+gradloc=on"),
    "GradLoc 0.3": (a_file("verl/gradloc/__init__.py", '__version__ = "0.3.0"\n', **OTHERS),
                    "GradLoc 0.1, 0.2 or 0.3 has patched this tree", "--reverse   (in a clone of that version)"),
    "half by --reject": (a_file(TRAINER, HALF, also=f"{TRAINER}.rej", has="@@ -47,7 +46,7 @@\n"),
                         "DRIFTED", "`git apply --reject` left it half done"),
    "half patched": (a_file(ACTOR, RESULT[ACTOR]), "PARTIAL", "2 of 3 files are not", f"not patched: {TRAINER}"),
}  # fmt: skip


@pytest.mark.parametrize("spoil", REFUSED)
def test_what_is_refused_is_left_as_it_is(apply, tree, spoil, monkeypatch):
    monkeypatch.setattr("patchkit.apply.PUBLISHED_ACTOR", blob_id(RELEASED.encode()))
    make, *said = REFUSED[spoil]
    make(tree)
    with unchanged(tree.parent / tree.name):
        apply(tree, "--check").expect(1, *said)
        apply(tree).expect(1, *said)
        if spoil not in ("read-only", "no folder for the new file", "a state folder elsewhere"):  # nothing to do
            apply(tree, "--reverse").expect(1, *said)
        if spoil != "half patched":
            apply(tree, "--force").expect(1, *said)
    if ":" in said[0]:
        assert said[0].split(":")[0] in {row[0] for row in STATES}


def test_a_file_that_may_not_be_read_is_so_named(apply, tree, monkeypatch):
    def denied(path, *arguments):
        if path.name == "dp_actor.py":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_regular(path, *arguments)

    monkeypatch.setattr("patchkit.tree.read_regular", denied)
    assert apply(tree, "--json").document["error"]["reason"] == "state-blocked"


def test_a_status_says_it_in_one_word_and_in_json(apply, tree):
    edited(tree)
    assert apply(tree, "--status", "--quiet").out == "DRIFTED\n"
    found = apply(tree, "--status", "--json").document
    assert (found["state"], found["exit_code"], [one["path"] for one in found["files"]]) == ("DRIFTED", 1, [ACTOR])
    refused = apply(tree, "--json").document
    assert refused["error"]["what"] and [one["path"] for one in refused["files"]] == [ACTOR]


def type_next(refusal):
    """Does what a refusal says is next."""
    identity = {f"GIT_{who}_{what}": "t@t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    command = re.search(r"next: +(.*?)(   .*)?\n", refusal)[1]
    subprocess.run(["sh", "-ec", command], check=True, env=os.environ | identity)


def test_your_own_edits_in_a_patched_file_are_kept_and_the_way_to_keep_them_works(apply, clone):
    apply(clone).expect(0)
    mine = RESULT[ACTOR].replace("actor line 30\n", "mine\n")
    write_tree(clone, {ACTOR: mine, SEAM: "mine\n"})
    for options in ((), ("--reverse",), ("--force",)):
        with unchanged(clone / "verl"):
            said = apply(clone, *options).expect(1, "edited after it was applied", "stash push").err
    type_next(said)
    apply(clone).expect(1, "PARTIAL")
    apply(clone, "--force").expect(0)
    assert files_of(clone) == RESULT
    (clone / SEAM).unlink()
    git(clone, "add", "--", ACTOR)
    git(clone, "stash", "pop")
    assert files_of(clone) == RESULT | {ACTOR: mine, SEAM: "mine\n"}


@pytest.mark.parametrize("is_committed", [True, False])
def test_edits_of_a_fork_and_the_patch_are_merged_by_the_command_that_is_named(apply, clone, is_committed):
    (clone / ACTOR).write_text(BASE[ACTOR].replace("line 30\n", "mine\n"))
    if is_committed:
        git(clone, "commit", "-qam", "mine")
    type_next(apply(clone).expect(1, "DRIFTED").err)
    assert files_of(clone) == RESULT | {ACTOR: RESULT[ACTOR].replace("line 30\n", "mine\n")}
    missing(clone)
    edited(clone)
    assert "3way" not in apply(clone).expect(1, "DRIFTED: 2 of the files").err


@pytest.mark.parametrize("reverse, result", [((), RESULT), (("--reverse",), BASE)], ids=["finish", "undo"])
def test_force_ends_a_half_patched_tree_and_other_edits_are_no_matter(apply, clone, reverse, result):
    write_tree(clone, {ACTOR: RESULT[ACTOR], OTHER: "mine\n"})
    apply(clone, "--force", *reverse).expect(0)
    assert files_of(clone) == result | {OTHER: "mine\n"}
    apply(clone, "--reverse").expect(0)
    (clone / ".git/rebase-merge").mkdir()
    with unchanged(clone):
        apply(clone).expect(1, "git is at work here (rebase-merge)")
    apply(clone, "--force").expect(0)


def test_put_on_by_git_or_by_patch_it_is_known(apply, repo, clone, tree):
    patch = str(repo / "patches" / "gradloc.patch")
    git(clone, "apply", "--check", patch)
    git(clone, "apply", patch)
    subprocess.run(["patch", "-p1", "-s", "-i", patch], cwd=tree, check=True)
    for patched in (clone, tree):
        apply(patched, "--status").expect(0, "APPLIED")
        apply(patched, "--reverse").expect(0)
        assert files_of(patched) == BASE


def test_modes_and_labels_are_kept_and_a_hard_link_elsewhere_keeps_its_bytes(apply, tree, tmp_path):
    (tree / ACTOR).chmod(0o640)
    os.link(tree / ACTOR, tmp_path / "cached")
    apply(tree).expect(0)
    assert (tree / ACTOR).stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "cached").read_text() == BASE[ACTOR]


BROKEN = {
    "a byte": lambda text: text.replace(b"hook()", b"hack()"),
    "CRLF": lambda text: text.replace(b"\n", b"\r\n"),
    "cut off": lambda text: text[:-20],
    "nothing": lambda text: b"",
}
NO_MANIFEST = ["", "{", "[1]", '{"patches": 1}', '{"version": "1.0", "patches": [{}]}', "[" * 10**4, " " * 2**17]
NO_MANIFEST += ['{"version": "1.0", "patches": []}', "\udcff"]


@pytest.mark.parametrize("spoil", [*BROKEN, *range(len(NO_MANIFEST))])
def test_patches_that_are_not_the_manifests_are_not_used(apply, repo, tree, spoil):
    place = repo / "patches" / ("gradloc.patch" if spoil in BROKEN else "manifest.json")
    is_ours = spoil in BROKEN
    text = BROKEN[spoil](place.read_bytes()) if is_ours else NO_MANIFEST[spoil].encode(errors="surrogateescape")
    place.write_bytes(text)
    with unchanged(tree):
        apply(tree).expect(3, "manifest", "git checkout -- patches/")


@pytest.mark.parametrize("command", [["-I", "-S", "a clone/apply_patch.py"], ["-m", "patchkit.apply"]], ids=str)
def test_however_it_is_started_it_works_and_names_itself_whole(tmp_path, tree, command):
    (tmp_path / "a clone").symlink_to(ROOT)
    started = [sys.executable, *command, "--repo", str(tree)]
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    done = subprocess.run([*started, "--status"], **options)
    assert done.returncode == 1 and "DRIFTED" in done.stdout
    next_ = re.search("next: +(.*)", subprocess.run([*started, "--nonsense"], **options).stderr)[1]
    assert ((ROOT if command[0] == "-m" else tmp_path) / shlex.split(next_)[1]).is_file()


def test_the_page_has_every_state_and_every_option(apply):
    page = (ROOT / "docs/applier.md").read_text()
    assert {row[0] for row in STATES} | {"NOT_VERL"} == set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE))
    with pytest.raises(SystemExit):
        apply("--help")
