# SPDX-License-Identifier: Apache-2.0
"""What may be named as a target, and what it is recognised as."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from patchkit.apply import cli
from tests.patchkit import world
from tests.patchkit.world import ACTOR, BASE, NEW, RESULT

ROOT = Path(__file__).resolve().parents[3]


def test_a_target_that_is_no_folder_is_refused(apply, tmp_path):
    (tmp_path / "file").write_text("x\n")
    apply("--repo", tmp_path / "missing").expect(1, "there is no folder", "next:")
    apply("--repo", tmp_path / "file").expect(1, "is a file", "next:")
    apply("--repo", tmp_path / "file/below").expect(1, "there is no folder", "next:")
    apply("--repo", "").expect(2, "empty string", "next:")


def test_a_folder_that_may_not_be_read_is_refused(apply, tree, monkeypatch):
    def forbidden(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", forbidden)
    apply("--repo", tree).expect(1, "cannot be read")


@pytest.mark.parametrize("named", [(), ("A", "--repo", "B"), ("A", "--installed")])
def test_exactly_one_target_must_be_named(apply, named):
    apply(*named).expect(2, "exactly one target")


@pytest.mark.parametrize("kind", ["another repository", "empty site-packages", "our own"])
def test_what_is_not_verl_is_refused(apply, tmp_path, kind):
    root = tmp_path / "site-packages"
    root.mkdir()
    if kind == "another repository":
        world.make_clone(root, {"setup.py": "x = 1\n"})
    apply("--repo", ROOT if kind == "our own" else root).expect(1, "NOT_VERL", "no verl/__init__.py")


def test_an_environment_is_only_patched_when_asked_for_by_name(apply, tmp_path):
    root = world.write_tree(tmp_path / "site-packages", BASE)
    apply("--repo", root).expect(1, "--installed")
    assert world.files_of(root) == BASE


def test_a_bare_repository_is_refused(apply, clone, tmp_path):
    world.git(clone, "clone", "-q", "--bare", str(clone), str(tmp_path / "bare.git"))
    for target in (tmp_path / "bare.git", clone / ".git"):
        apply("--repo", target).expect(1, "bare")


def test_a_linked_worktree_is_patched_and_its_status_shows_the_patch_alone(apply, clone, tmp_path):
    linked = tmp_path / "linked"
    world.git(clone, "worktree", "add", "-q", str(linked))
    head = world.git(linked, "rev-parse", "HEAD").strip()
    assert apply(linked, "--status", "--json").document["head"] == head
    assert apply(linked).code == 0
    assert world.files_of(linked) == RESULT and world.files_of(clone) == BASE
    listed = world.git(linked, "status", "--porcelain", "--untracked-files=all").splitlines()
    changed = [path for path in sorted(RESULT) if RESULT[path] != BASE.get(path)]
    assert sorted(line[3:] for line in listed) == changed
    assert {line[:2] for line in listed} == {" M", "??"}, "the index is never touched"
    assert apply(linked, "--reverse").code == 0
    assert world.git(linked, "status", "--porcelain", "--ignored") == ""


def test_a_submodule_is_patched(apply, clone, tmp_path):
    outer = world.make_clone(tmp_path / "outer", {"README": "x\n"})
    allow = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "protocol.file.allow"}
    world.git(outer, "submodule", "add", "-q", str(clone), "verl", GIT_CONFIG_VALUE_0="always", **allow)
    inner = outer / "verl"
    assert (inner / ".git").is_file()
    apply(inner).expect(0, "submodule")
    assert world.files_of(inner) == RESULT
    assert apply(inner, "--reverse").code == 0
    assert world.git(inner, "status", "--porcelain", "--ignored") == ""


@pytest.mark.parametrize("tracked", [True, False])
def test_verl_inside_another_repository_is_patched(apply, tmp_path, tracked):
    outer = world.make_clone(tmp_path / "outer", {"README": "x\n"})
    inner = world.write_tree(outer / "third_party/verl-src", BASE)
    if tracked:
        world.git(outer, "add", "-A")
        world.git(outer, "commit", "-q", "-m", "vendored")
    assert apply(inner).code == 0
    assert world.files_of(inner) == RESULT
    assert ".gradloc-patch" not in world.git(outer, "status", "--porcelain", "-uall")
    assert apply(inner, "--reverse").code == 0
    assert not (inner / ".gradloc-patch").exists()


def test_of_an_unpacked_archive_the_commit_is_said_to_be_unknown(apply, tree):
    assert "the commit is unknown" in apply(tree).out


def test_a_folder_inside_verl_is_refused_and_the_parent_proposed(apply, tree):
    with world.unchanged(tree):
        apply("--repo", tree / "verl").expect(1, f"--repo {tree}")


def test_a_checkout_of_another_owner_works_and_is_noted(apply, clone, monkeypatch):
    owner = clone.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    apply(clone).expect(0, "belongs to another user")
    assert world.files_of(clone) == RESULT


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_leaves_the_files_of_another_owner_to_that_owner(apply, clone):
    for path in [clone, *clone.rglob("*")]:
        os.chown(path, 12345, 12345, follow_symlinks=False)
    assert apply(clone).code == 0
    for path in (ACTOR, NEW, "verl/gradloc", ".git/.gradloc-patch/applied.patch"):
        assert (clone / path).stat().st_uid == 12345, path


def test_another_commit_with_the_same_touched_files_is_patched_with_a_note(apply, clone):
    world.write_tree(clone, {"verl/utils/other.py": "another = 1\n"})
    world.git(clone, "commit", "-qam", "elsewhere")
    apply(clone).expect(0, "HEAD is ", "not the base")


def test_another_commit_with_other_touched_files_is_the_wrong_base(apply, clone):
    world.write_tree(clone, {ACTOR: BASE[ACTOR].replace("actor line 10\n", "")})
    world.git(clone, "commit", "-qam", "here")
    outcome = apply(clone)
    assert outcome.code == 1 and "WRONG_BASE" in outcome.err and "f9c855f7cf04" in outcome.err
    assert f"expected: git blob {world.blob_id(BASE[ACTOR].encode())[:12]}" in outcome.err


def test_dirt_elsewhere_is_left_alone(apply, clone):
    world.write_tree(clone, {"verl/utils/other.py": "mine\n", "notes.txt": "mine\n"})
    assert apply(clone).code == 0
    assert apply(clone, "--reverse").code == 0
    mine = {"verl/utils/other.py": "mine\n", "notes.txt": "mine\n"}
    assert world.files_of(clone) == BASE | mine


@pytest.mark.parametrize("refs", ["loose", "packed", "detached"])
def test_the_commit_is_read_from_any_kind_of_ref(apply, clone, refs):
    head = world.git(clone, "rev-parse", "HEAD").strip()
    if refs == "packed":
        world.git(clone, "pack-refs", "--all")
    if refs == "detached":
        world.git(clone, "checkout", "-q", "--detach")
    assert apply(clone, "--status", "--json").document["head"] == head


SETTINGS = {
    "whitespace-fix": ("apply.whitespace", "fix"),
    "ignore-whitespace": ("apply.ignoreWhitespace", "change"),
    "autocrlf": ("core.autocrlf", "true"),
    "external-diff": ("diff.external", "/bin/false"),
    "fsmonitor": ("core.fsmonitor", "touch was-here; false"),
}


@pytest.mark.parametrize("case", [*SETTINGS, "attributes", "git-dir", "assume-unchanged"])
def test_no_setting_of_git_changes_the_result(apply, clone, monkeypatch, tmp_path, case):
    if case in SETTINGS:
        world.git(clone, "config", *SETTINGS[case])
    elif case == "attributes":
        (clone / ".gitattributes").write_text("* text eol=crlf\n")
    elif case == "git-dir":
        other = world.make_clone(tmp_path / "other", {"x": "x\n"})
        monkeypatch.setenv("GIT_DIR", str(other / ".git"))
        monkeypatch.setenv("GIT_WORK_TREE", str(other))
    else:
        world.git(clone, "update-index", "--assume-unchanged", ACTOR)
        world.write_tree(clone, {ACTOR: "dirty\n"})
        assert apply(clone).code == 1
        world.write_tree(clone, {ACTOR: BASE[ACTOR]})
    assert apply(clone).code == 0
    files = {p: t for p, t in world.files_of(clone).items() if p != ".gitattributes"}
    assert files == RESULT
    assert not list(tmp_path.rglob("was-here"))


def test_installed_says_first_what_it_will_do_to_which_environment(apply, tmp_path, monkeypatch, capsys):
    root = world.write_tree(tmp_path / "lib/site-packages", BASE)
    monkeypatch.setattr(cli, "installed_root", lambda: root)
    outcome = apply("--installed")
    first = outcome.out.splitlines()[0]
    assert outcome.code == 0 and str(root) in first and sys.prefix in first and "apply:" in first
    assert world.files_of(root) == RESULT
    assert "--installed --reverse" in outcome.out
    assert apply("--installed", "--reverse").code == 0
    assert world.files_of(root) == BASE


def test_installed_without_verl_is_refused(tmp_path):
    command = [sys.executable, "-I", "-S", str(ROOT / "apply_patch.py"), "--installed"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "this Python has no verl" in done.stderr


def test_a_path_may_have_spaces_and_be_relative(apply, tmp_path, monkeypatch):
    world.write_tree(tmp_path / "a b/verl tree", BASE)
    monkeypatch.chdir(tmp_path / "a b")
    assert apply("verl tree").code == 0
    assert world.files_of(tmp_path / "a b/verl tree") == RESULT


def test_new_files_are_as_readable_as_verls_own_whatever_the_umask(apply, tree):
    """Who patches is not always who trains."""
    (tree / "verl/workers/actor").chmod(0o750)
    before = os.umask(0o077)
    try:
        assert apply(tree).code == 0
    finally:
        os.umask(before)
    mode = stat.S_IMODE((tree / "verl/__init__.py").stat().st_mode)
    assert {stat.S_IMODE((tree / path).stat().st_mode) for path in RESULT} == {mode}
    folder = stat.S_IMODE((tree / "verl").stat().st_mode)
    assert stat.S_IMODE((tree / world.DEEP).parent.stat().st_mode) == folder


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="no extended attributes here")
def test_extended_attributes_and_so_access_lists_stay(apply, tree):
    try:
        os.setxattr(tree / ACTOR, "user.note", b"mine")
    except OSError:
        pytest.skip("this file system has none")
    for options in ((), ("--reverse",)):
        assert apply(tree, *options).code == 0
        assert os.getxattr(tree / ACTOR, "user.note") == b"mine"


def test_another_links_content_stays(apply, tree, tmp_path):
    """uv links packages from its cache."""
    linked = Path(shutil.copytree(tree, tmp_path / "linked", copy_function=os.link))
    assert apply(linked).code == 0
    assert world.files_of(tree) == BASE and world.files_of(linked) == RESULT


@pytest.mark.parametrize("name", ["a\nb", "caf\udcff", "-dash", "$(touch x)`id`'\""])
def test_a_folder_of_any_name(apply, tmp_path, name):
    clone = world.make_clone(tmp_path / "c" / name)
    world.git(clone, "worktree", "add", "-q", "--detach", str(tmp_path / "w" / name))
    for root in (clone, tmp_path / "w" / name):
        assert apply(root, "--json").document["state"] == "APPLIED"
        world.write_tree(root, {ACTOR: "mine\n"})
        assert apply(root).code == 1
        world.write_tree(root, {ACTOR: RESULT[ACTOR]})
        assert apply(root, "--reverse").code == 0 and world.files_of(root) == BASE
        assert world.git(root, "status", "--short") == ""
