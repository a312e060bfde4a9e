# SPDX-License-Identifier: Apache-2.0
"""Every state of a tree, and every odd target: what is done is done whole, what is refused changes nothing."""

import contextlib
import errno
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile

import pytest

from patchkit.language import blob_id
from patchkit.refusal import guarded, say
from patchkit.tree import read_regular, resolve
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
)


def test_on_and_off_again_are_the_same_bytes_and_a_second_time_writes_nothing(apply, tree):
    apply(tree).expect(0, "applied: 3 files")
    assert files_of(tree) == RESULT
    with unchanged(tree):
        apply(tree).expect(0, "nothing to apply")
        apply(tree, "--status").expect(0, "APPLIED")
        assert "... and" not in apply(tree, "--check").expect(0, "nothing to apply").out
    apply(tree, "--reverse").expect(0, "taken off: 3 files")
    assert files_of(tree) == BASE and not (tree / ".gradloc-patch").exists()
    with unchanged(tree):
        apply(tree, "--reverse").expect(0, "nothing to take off")
        apply(tree, "--status", "--quiet").expect(0, "PRISTINE")


@pytest.mark.parametrize("reverse", [(), ("--reverse",)], ids=["apply", "reverse"])
def test_a_check_predicts_and_changes_nothing(apply, tree, reverse):
    if reverse:
        apply(tree).expect(0)
    with unchanged(tree):
        apply(tree, "--check", *reverse).expect(0, *TOUCHED)
        assert apply(tree, "--check", "--json", *reverse).expect(0).document["changed"] == sorted(TOUCHED)


def as_worktree(clone):
    git(clone, "worktree", "add", "-q", "--detach", str(clone.with_name("linked")))
    return clone.with_name("linked")


def as_submodule(clone):
    outer = make_clone(clone.with_name("outer"), {"readme": "ours\n"})
    git(outer, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(clone), "verl-inside")
    return outer / "verl-inside"


def in_another_repository(clone):
    """Where `git apply` exits 0 and does nothing."""
    outer = make_clone(clone.with_name("outer"), {"readme": "ours\n"})
    return write_tree(outer / "vendored", BASE)


def named_by_a_link(clone):
    clone.with_name("link").symlink_to(clone)
    return clone.with_name("link")


def with_spaces(clone):
    return clone.rename(clone.with_name("a clone, with 'quotes'"))


def with_a_hostile_configuration(clone):
    (clone / ".git/config").open("a").write("[core]\n fsmonitor = touch PWNED\n[apply]\n whitespace = fix\n")
    return clone


@pytest.mark.parametrize(
    "kind",
    [as_worktree, as_submodule, in_another_repository, named_by_a_link, with_spaces, with_a_hostile_configuration],
)
def test_whatever_the_tree_is_it_is_patched_and_taken_back(apply, clone, kind):
    tree = kind(clone)
    apply(tree).expect(0)
    assert files_of(tree.resolve()) | {".git": ""} == RESULT | {".git": ""}
    apply(tree, "--reverse").expect(0)
    assert {path: text for path, text in files_of(tree.resolve()).items() if path != ".git"} == BASE
    assert not list(tree.rglob("PWNED"))


def test_a_git_folder_that_does_not_point_back_is_another_tree_s(clone):
    linked = as_worktree(clone)
    copied = shutil.copytree(linked, clone.with_name("copied"))
    assert resolve(str(linked)).git_dir is not None and resolve(str(copied)).git_dir is None


def test_a_path_that_cannot_be_printed_is_no_failure(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stdout", out)
    assert guarded(lambda: say("verl-\udcff"), []) == 0 and b"udcff" in out.buffer.getvalue()


def test_an_installed_package_is_named_on_purpose(apply, tmp_path, monkeypatch):
    site = write_tree(tmp_path / "site-packages", BASE)
    with unchanged(site):
        apply(site).expect(1, "an environment's package folder", "--installed")
    monkeypatch.setattr("patchkit.apply.installed_root", lambda: site)
    apply("--installed").expect(0, "installed package")
    assert files_of(site) == RESULT
    apply("--installed", "--reverse").expect(0)


def test_an_archive_of_python_is_no_tree(apply, tmp_path, tree):
    with zipfile.ZipFile(tmp_path / "verl.zip", "w") as archive:
        archive.writestr("verl/__init__.py", "")
    apply(tmp_path / "verl.zip").expect(1)
    apply(tmp_path / "nowhere").expect(1, "no folder that can be read")
    (tmp_path / "loop").symlink_to("loop")
    apply(tmp_path / "loop").expect(1, "no folder that can be read")
    apply(tree / "verl").expect(1, "NOT_VERL", f"--repo {tree}")
    apply("").expect(2)
    apply(tree, "--repo", tree).expect(2, "exactly one target")
    apply(tree, "--status", "--check").expect(2)
    assert apply(tree, "--frobnicate", "--json").document["exit_code"] == 2


def edited(tree):
    (tree / ACTOR).write_text(BASE[ACTOR].replace("actor line 9\n", "mine\n"))


def with_crlf(tree):
    for path in (ACTOR, TRAINER):
        (tree / path).write_bytes(BASE[path].replace("\n", "\r\n").encode())


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
    """Where the new file goes."""
    (tree / OTHER).unlink()
    (tree / OTHER).parent.rmdir()


def forty_lines_lower(tree):
    """Where `git apply` finds the place itself."""
    (tree / ACTOR).write_text("# a new line\n" * 40 + BASE[ACTOR])


def released(tree):
    (tree / ACTOR).write_text(RELEASED)


def in_the_way(tree):
    (tree / SEAM).write_text("mine = True\n")


def of_another_verl(tree):
    (tree / "verl/version/version").write_text("0.6.1\n")
    edited(tree)


def verl_09(tree):
    (tree / "verl/version/version").write_text("0.9.1\n")
    missing(tree)


def of_03(tree):
    """What 0.1 to 0.3 left: a package of their own."""
    write_tree(tree, {"verl/gradloc/__init__.py": '__version__ = "0.3.0"\n', ACTOR: "theirs\n"})


def of_a_later_one(tree):
    write_tree(tree, {SEAM: 'VERSION = "1.1"\n'})


def read_only(tree):
    (tree / ACTOR).chmod(0o444)


def half_applied_by_reject(tree):
    """`git apply --reject` on a file that was edited: one hunk in, one beside."""
    (tree / TRAINER).write_text(BASE[TRAINER].replace("trainer line 7\n", "").replace("line 51\n", "line mine\n"))
    write_tree(tree, {f"{TRAINER}.rej": "@@ -47,7 +46,7 @@\n"})


IDENTITY = {f"GIT_{who}_{what}": "t@t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
RELEASED = "in place of the file that the public patch makes\n"
REFUSED = {
    a_folder: ("DRIFTED", "a folder is in the way"),
    without_its_folder: ("may not be written to",),
    forty_lines_lower: ("DRIFTED", "hunk 1 does not fit at line 8"),
    released: ("the publicly released GradLoc patch is on this tree", "apply -R"),
    edited: ("DRIFTED", "hunk 1 does not fit at line 9"),
    with_crlf: ("CRLF line ends", "core.autocrlf"),
    missing: ("DRIFTED", "the file is missing"),
    linked_file: ("DRIFTED", "a symbolic link is in the way"),
    linked_folder: ("DRIFTED", "verl/workers is a symbolic link"),
    pipe: ("DRIFTED", "a named pipe"),
    in_the_way: ("DRIFTED", "another file stands where the patch adds one"),
    of_another_verl: ("WRONG_BASE: this is verl 0.6.1", "Use verl 0.7.0"),
    verl_09: ("this is verl 0.9.1, for which there is no patch", "+gradloc=on"),
    of_03: ("GradLoc 0.3.0 has patched this tree", "cd GRADLOC-0.3.0 && python apply_patch.py --repo ", "--reverse"),
    of_a_later_one: ("OTHER_VERSION: GradLoc 1.1 has patched this tree", "--reverse"),
    read_only: ("is read-only", "chmod u+w"),
    half_applied_by_reject: ("DRIFTED", "`git apply --reject` left it half done"),
}


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("options", [(), ("--force",), ("--check",), ("--reverse",)], ids=str)
def test_what_is_refused_is_left_as_it_is(apply, tree, spoil, options, monkeypatch):
    monkeypatch.setattr("patchkit.apply.PUBLISHED_ACTOR", blob_id(RELEASED.encode()))
    spoil(tree)
    if spoil in (read_only, without_its_folder) and options == ("--reverse",):
        return  # nothing to do
    with unchanged(tree):
        apply(tree, *options).expect(1, *REFUSED[spoil])


@pytest.mark.parametrize("spoil", [linked_file, linked_folder, pipe, a_folder])
def test_what_is_in_the_way_is_not_blamed_on_an_edit(apply, clone, spoil):
    spoil(clone)
    assert apply(clone, "--json").document["error"]["reason"] == "state-blocked"


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
    command = re.search(r"next: +(.*?)(   .*)?\n", refusal)[1]
    subprocess.run(["sh", "-ec", command], check=True, env=os.environ | IDENTITY)


def test_your_own_edits_in_a_patched_file_stay_and_the_way_to_keep_them_works(apply, clone):
    apply(clone).expect(0)
    mine = RESULT[ACTOR].replace("actor line 30\n", "mine\n")
    (clone / ACTOR).write_text(mine)
    (clone / SEAM).write_text("mine\n")
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
def test_edits_of_a_fork_and_the_patch_are_merged_by_the_command_that_is_named(
    apply, clone, repo, is_committed, monkeypatch
):
    monkeypatch.setattr("patchkit.apply.PATCHES", repo / "patches")
    (clone / ACTOR).write_text(BASE[ACTOR].replace("line 30\n", "mine\n"))
    if is_committed:
        git(clone, "commit", "-qam", "mine")
    type_next(apply(clone).expect(1, "DRIFTED").err)
    assert files_of(clone) == RESULT | {ACTOR: RESULT[ACTOR].replace("line 30\n", "mine\n")}


def test_git_is_asked_to_merge_edits_alone_and_no_file_that_is_missing(apply, clone):
    edited(clone)
    missing(clone)
    assert "3way" not in apply(clone).expect(1, "DRIFTED: 2 of the files").err


def test_other_edits_of_yours_are_no_matter(apply, clone):
    (clone / OTHER).write_text("mine\n")
    git(clone, "commit", "-qam", "mine")
    apply(clone).expect(0)
    apply(clone, "--reverse").expect(0)
    assert files_of(clone) == BASE | {OTHER: "mine\n"}


@pytest.mark.parametrize("reverse, result", [((), RESULT), (("--reverse",), BASE)], ids=["finish", "undo"])
def test_a_half_patched_tree_waits_for_force(apply, tree, reverse, result):
    write_tree(tree, {ACTOR: RESULT[ACTOR]})
    with unchanged(tree):
        apply(tree, *reverse).expect(1, "PARTIAL", "1 of 3 files patched", f"not patched: {TRAINER}")
    apply(tree, "--force", *reverse).expect(0)
    assert files_of(tree) == result


def test_during_a_rebase_files_do_not_change_beneath_git(apply, clone):
    (clone / ".git/rebase-merge").mkdir()
    with unchanged(clone):
        apply(clone).expect(1, "a rebase is under way")
    apply(clone, "--force").expect(0)


def test_put_on_by_git_or_by_patch_it_is_known(apply, repo, clone, tree):
    patch = str(repo / "patches" / "verl-0.7.0.patch")
    git(clone, "apply", "--check", patch)
    git(clone, "apply", patch)
    subprocess.run(["patch", "-p1", "-s", "-i", patch], cwd=tree, check=True)
    for patched in (clone, tree):
        apply(patched, "--status").expect(0, "APPLIED")
        apply(patched, "--reverse").expect(0)
        assert files_of(patched) == BASE


def test_modes_stay_and_a_hard_link_elsewhere_keeps_its_bytes(apply, tree, tmp_path):
    (tree / ACTOR).chmod(0o640)
    os.link(tree / ACTOR, tmp_path / "cached")
    with contextlib.suppress(OSError):  # of a file system without any
        os.setxattr(tree / ACTOR, "user.label", b"mine")
    labels = os.listxattr(tree / ACTOR)
    apply(tree).expect(0)
    assert os.listxattr(tree / ACTOR) == labels
    assert (tree / ACTOR).stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "cached").read_text() == BASE[ACTOR]


PATCH, MANIFEST = "verl-0.7.0.patch", "manifest.json"
BROKEN = {
    "a byte": (PATCH, lambda text: text.replace(b"hook()", b"hack()")),
    "CRLF": (PATCH, lambda text: text.replace(b"\n", b"\r\n")),
    "cut off": (PATCH, lambda text: text[:-20]),
    "a web page": (PATCH, lambda text: b"<!doctype html>"),
    "nothing": (PATCH, lambda text: b""),
    "a manifest that is too large": (MANIFEST, lambda text: text + b" " * 2**16),
}
NO_MANIFEST = ["", "{", '{"patches": 1}', '{"version": "1.0", "patches": [{}]}', "[" * 10**4, "\udcff"]
NO_MANIFEST += ['{"version": "1.0", "patches": []}']
BROKEN |= {
    f"no manifest {number}": (MANIFEST, lambda _, text=text: text.encode(errors="surrogateescape"))
    for number, text in enumerate(NO_MANIFEST)
}


@pytest.mark.parametrize("spoil", BROKEN)
def test_patches_that_are_not_the_manifests_are_not_used(apply, repo, tree, spoil):
    name, change = BROKEN[spoil]
    place = repo / "patches" / name
    place.write_bytes(change(place.read_bytes()))
    with unchanged(tree):
        apply(tree).expect(3, "manifest", "git checkout -- patches/")


def test_the_script_runs_on_a_bare_python_from_anywhere(tmp_path, tree):
    command = [sys.executable, "-I", "-S", str(ROOT / "apply_patch.py"), "--repo", str(tree), "--status"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "DRIFTED" in done.stdout


@pytest.mark.parametrize("command", [["-m", "patchkit.apply"], ["a clone/apply_patch.py"]], ids=str)
def test_however_it_is_started_it_works_and_names_itself_whole(tmp_path, tree, command):
    (tmp_path / "a clone").symlink_to(ROOT)
    started = [sys.executable, *command, "--repo", str(tree)]
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    assert subprocess.run([*started, "--status"], **options).returncode == 1
    next_ = re.search("next: +(.*)", subprocess.run([*started, "--nonsense"], **options).stderr)[1]
    assert ((ROOT if command[0] == "-m" else tmp_path) / shlex.split(next_)[1]).is_file()
