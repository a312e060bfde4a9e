# SPDX-License-Identifier: Apache-2.0
"""patches/ is what the sources say, and a patched tree's edits come back into them."""

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from patchkit import apply as applier
from patchkit import build
from patchkit.patch import parse
from patchkit.refusal import Refusal
from tests.conftest import ROOT
from tests.patchkit.world import ACTOR, BASE, OTHER, RESULT, SEAM, TRAINER, files_of, make_clone, put, shell, unchanged

PATCH, NEW = "patches/gradloc.patch", "verl/new.py"
EDIT = {path: text.replace("line 3\n", "line three\n") + "# and an end\n" for path, text in RESULT.items()}


def test_a_check_writes_nothing_and_says_what_is_stale(make, repo):
    put(repo / "verl_overrides/v0.7.0/verl/utils/__pycache__", {"seam.cpython-311.pyc": "left by a compiler"})
    with unchanged(repo):
        make("--check").expect(0, "is what its sources build")
    (repo / "patches" / "stray.patch").write_text("x\n")
    with unchanged(repo):
        make("--check").expect(3, "patches/stray.patch is not what")
    make().expect(0)
    names = sorted(path.name for path in (repo / "patches").iterdir())
    assert names == ["gradloc.patch", "gradloc.patch.sha256", "manifest.json"]
    subprocess.run(["sha256sum", "-c", "--strict", names[1]], cwd=repo / "patches", check=True, capture_output=True)
    seam = repo / "verl_overrides/v0.7.0" / SEAM
    seam.write_text(seam.read_text() + "more = 1\n")
    make("--check").expect(3, "+more = 1")
    (repo / "gradloc/__init__.py").write_text('__version__ = "2.0"\n')
    make().expect(3, "is for gradloc 1.0, and this is 2.0")


@pytest.mark.parametrize("has_history", [False, True])
def test_apply_edit_take_apply_afresh_are_the_same_bytes(apply, make, repo, tmp_path, has_history):
    checkout = put(tmp_path / "edited", BASE)
    if has_history:  # of the user's, whatever verl's was; with commits after the patch, too
        make_clone(checkout, {"mine/notes": "mine\n"})
    apply(checkout).expect(0)
    edits = {path: EDIT[path] for path in (ACTOR, TRAINER, SEAM)} | {OTHER: "mine = '\u2028\\f'\n", NEW: "\tx = 1 \n"}
    put(checkout, edits)
    if has_history:
        shell(checkout, "git add -A; git commit -qm edits")
    make("--repo", checkout, "--also", OTHER, "--also", NEW).expect(0, "built: gradloc.patch", f"taken: {OTHER}")
    fresh = put(tmp_path / "fresh", BASE)
    apply(fresh).expect(0)
    assert files_of(fresh) == BASE | edits
    with unchanged(repo):
        make("--repo", checkout).expect(0, "unchanged")
        make("--repo", fresh).expect(0, "unchanged")
    for tree in (fresh, checkout):
        apply(tree).expect(0, "nothing to apply")
        apply(tree, "--reverse").expect(0)
        assert files_of(tree) == BASE | ({"mine/notes": "mine\n"} if has_history and tree == checkout else {})


def test_edits_are_taken_one_after_the_other(apply, make, tree):
    apply(tree).expect(0)
    for text in ("one", "two"):
        put(tree, {ACTOR: f"{RESULT[ACTOR]}# {text}\n"})
        make("--repo", tree).expect(0, "built")
    apply(tree).expect(0, "nothing to apply")


def test_what_the_patch_does_not_touch_is_left_out_unless_it_is_named(apply, make, repo, tree):
    apply(tree).expect(0)
    put(tree, {OTHER: "ours now\n", NEW: "new = 1\n"})
    make("--repo", tree).expect(0, f"left out: {OTHER}", f"left out: {NEW}", "unchanged")
    (tree / OTHER).unlink()
    make("--repo", tree).expect(0, f"left out: {OTHER}   (deleted there", "unchanged")


WRONG = [("--also", OTHER), ("--base-tree", "v9"), ("--repo", ".", "--also", "setup.py"), ("--repo", "")]


@pytest.mark.parametrize("arguments", WRONG, ids=str)
def test_what_means_nothing_is_wrong_usage(make, repo, tmp_path, arguments):
    with unchanged(repo):
        make(*arguments).expect(2)
        assert "apply_patch" not in make("--repo", tmp_path / "nowhere").expect(1, "next: ").err


@pytest.mark.parametrize("has_record", [True, False])
@pytest.mark.parametrize("spoil", ["stash push -u", "stash push", "checkout -- $T"])
def test_where_the_patch_is_off_no_seam_is_dropped_and_the_way_back_works(apply, make, repo, clone, spoil, has_record):
    apply(clone).expect(0)
    if not has_record:
        shutil.rmtree(clone / ".gradloc-patch")
    shell(clone, f"git {spoil}")
    with unchanged(repo):
        next_ = re.search("next: +(.*?)(   .*)?\n", make("--repo", clone).expect(1).err)[1]
    subprocess.run(shlex.split(next_), check=True)
    make("--repo", clone).expect(0, "unchanged")


def test_a_seam_is_dropped_by_hand(apply, make, repo, tree):
    apply(tree).expect(0)
    put(tree, {TRAINER: BASE[TRAINER]})
    make("--repo", tree).expect(1)
    (repo / f"verl_overrides/v0.7.0/{TRAINER}.patch").unlink()
    make("--repo", tree).expect(0, "built")
    assert parse((repo / PATCH).read_bytes()).keys() == {ACTOR, SEAM}


def test_an_edit_on_both_sides_is_shown_and_nothing_is_taken(apply, make, repo, tree):
    apply(tree).expect(0)
    put(tree, {SEAM: 'VERSION = "1.0"\nthere = 1\n'})
    put(repo / "verl_overrides/v0.7.0", {SEAM: 'VERSION = "1.0"\nhere = 1\n'})
    said = make("--repo", tree).expect(1, "edited there and in verl_overrides/", "-here = 1", "+there = 1").err
    assert "VERSION" not in said, "what both have is not shown"
    shutil.rmtree(tree / ".gradloc-patch")  # as after git apply
    with unchanged(repo):
        make("--repo", tree).expect(1, "edited there and in verl_overrides/")
    put(tree, {SEAM: RESULT[SEAM]})  # as it was given: the edit here is kept
    make("--repo", tree).expect(0)
    assert "here = 1" in (repo / PATCH).read_text()


TEXTS = {"no newline": b"x = 1", "CR": b"x\r\n", "empty": b"", "latin": b"\xe9\n", "hidden": "x\u202e\n".encode()}


@pytest.mark.parametrize("text", [*TEXTS, "version"])
def test_what_cannot_be_built_is_not_taken(apply, make, repo, tree, text):
    apply(tree).expect(0)
    put(tree, {ACTOR: EDIT[ACTOR], SEAM: TEXTS.get(text, b'VERSION = "2.0"\n')})
    with unchanged(repo):
        make("--repo", tree).expect(3, SEAM)
        (tree / SEAM).unlink()
        make("--repo", tree).expect(1, SEAM)


def test_a_further_base_is_a_folder(apply, make, repo, tree, tmp_path):
    files = {path: f"# longer\n{text}" if path.endswith(".py") else text for path, text in BASE.items()}
    put(repo / "base/verl-0.7.9", files | {"verl/version/version": "0.7.9\n"})
    other = put(tmp_path / "other", files_of(repo / "base/verl-0.7.9"))
    put(other, {ACTOR: f"# longer\n{RESULT[ACTOR]}", SEAM: RESULT[SEAM]})
    make("--repo", other).expect(1, "has no folder for verl 0.7.9", "v0.7.0")
    base = {"base.json": json.dumps({"commit": "1" * 40, "sdist_sha256": "1" * 64})}
    put(repo / "verl_overrides/v0.7.9", base)
    make("--repo", other, "--also", ACTOR, "--also", SEAM).expect(0, "gradloc-0.7.9.patch")
    for patched, name in ((other, "gradloc-0.7.9.patch"), (tree, "gradloc.patch")):
        apply(patched).expect(0, f"1.0 for verl v{name[8:13]}" if patched == other else "1.0 for verl v0.7.0")
        apply(patched, "--reverse").expect(0)
    put(repo / "base/verl-0.7.9", {ACTOR: "# another\n"})
    make().expect(3, f"hunk 1 of {ACTOR} does not fit")


@pytest.mark.parametrize("data", [None, b"not it"])
def test_an_archive_that_is_not_verls_is_refused(real_bases, tmp_path, monkeypatch, data):
    if data:
        put(tmp_path, {"verl-0.7.0.tar.gz": data})
    monkeypatch.setenv("VERL_BASE_SDIST", str(tmp_path / "verl-0.7.0.tar.gz"))
    with pytest.raises(Refusal, match="base-digest"):
        build.ensure_base(build.bases()["v0.7.0"], tmp_path / "cache")
    assert not (tmp_path / "cache" / "verl-0.7.0").exists()


@pytest.mark.parametrize("comes_first", [True, False])
def test_where_another_process_unpacks_the_same_its_tree_is_taken(real_bases, tmp_path, monkeypatch, comes_first):
    put(tmp_path, {"verl-0.7.0/mine": ""})
    with tarfile.open(archive := tmp_path / "verl-0.7.0.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "verl-0.7.0", "verl-0.7.0")
    monkeypatch.setenv("VERL_BASE_SDIST", str(archive))
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    base, cache = build.Base(tmp_path / "v0.7.0", "f9c855f7", sha256), tmp_path / "cache"

    def rename(self, target):
        if comes_first:
            target.mkdir()
        raise OSError("the target is there, or the disk has failed")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        if comes_first:
            assert build.ensure_base(base, cache) == cache / "verl-0.7.0"
            return
        with pytest.raises(OSError, match="the disk"):
            build.ensure_base(base, cache)
    assert [*(build.ensure_base(base, cache)).iterdir()] == [cache / "verl-0.7.0/mine"]


def test_where_pip_fetches_nothing_its_error_is_shown(real_bases, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("VERL_BASE_SDIST", raising=False)
    with pytest.raises(Refusal, match="base-pip") as refusal:
        build.ensure_base(build.Base(tmp_path / "v0.7.0", "f9c855f7", ""), tmp_path / "cache")
    assert "No matching distribution found for verl==0.7.0" in refusal.value.data["found"]


@pytest.mark.slow
def test_pip_fetches_the_real_one(real_bases, tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_BASE_SDIST", raising=False)
    assert (build.ensure_base(build.bases()["v0.7.0"], tmp_path / "cache") / "verl/__init__.py").is_file()


@pytest.mark.full
def test_git_and_patch_take_the_real_one_and_each_edited_file_comes_back_the_same(real_bases, tmp_path, capsys):
    assert build.main(["--check"]) == 0
    repo = put(tmp_path / "a repo", {"gradloc/__init__.py": (ROOT / "gradloc/__init__.py").read_text()})
    for name in ("verl_overrides", "patches"):
        shutil.copytree(ROOT / name, repo / name)
    edited, fresh = (tmp_path / name for name in ("an edited one", "fresh"))
    for tree in (edited, fresh):
        shutil.copytree(build.ensure_base(build.bases()["v0.7.0"]), tree)
    patches, patch = ["--patches", str(repo / "patches")], repo / PATCH
    make_clone(edited, {"mine": "mine\n"})
    subprocess.run(["git", "apply", "--check", str(patch)], cwd=edited, check=True)
    subprocess.run(["patch", "-p1", "--dry-run", "-s", "-F0", "-i", str(patch)], cwd=fresh, check=True)
    assert applier.main([*patches, str(edited)]) == 0
    files, also = parse(patch.read_bytes()), "verl/utils/tracking.py"
    assert [path for path, file in files.items() if file.before is None] == [SEAM]
    for number, path in enumerate([*files, also]):
        (edited / path).open("a").write(f"\n# edit {number}\n")
    assert build.main(["--root", str(repo), "--repo", str(edited), "--also", also]) == 0
    assert applier.main([*patches, str(fresh)]) == 0
    assert [(fresh / path).read_bytes() == (edited / path).read_bytes() for path in [*files, also]] == [True] * 11
    assert applier.main([*patches, str(fresh), "--reverse"]) == 0
