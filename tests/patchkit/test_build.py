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

from patchkit import build
from patchkit.language import parse
from tests.conftest import ROOT
from tests.patchkit.world import (
    ACTOR,
    BASE,
    OTHER,
    RESULT,
    SEAM,
    TRAINER,
    files_of,
    git,
    make_clone,
    unchanged,
    write_tree,
)


@pytest.fixture
def real_bases():
    """What the real repository starts from."""


def test_a_check_writes_nothing_and_says_what_is_stale(make, repo):
    write_tree(repo / "verl_overrides/v0.7.0/verl/utils/__pycache__", {"seam.cpython-311.pyc": "left by a compiler"})
    with unchanged(repo):
        make("--check").expect(0, "is what its sources build")
    (repo / "patches" / "stray.patch").write_text("x\n")
    with unchanged(repo):
        make("--check").expect(3, "patches/stray.patch is not what")
    make().expect(0)
    assert sorted(path.name for path in (repo / "patches").iterdir()) == ["manifest.json", "verl-0.7.0.patch"]
    seam = repo / "verl_overrides/v0.7.0" / SEAM
    seam.write_text(seam.read_text() + "more = 1\n")
    make("--check").expect(3, "+more = 1")


EDIT = {path: text.replace("line 3\n", "line three\n") + "# and an end\n" for path, text in RESULT.items()}


def plain(folder):
    return write_tree(folder, BASE)


def with_a_history_of_its_own(folder):
    """Of the user's, whatever verl's was; with commits after the patch, too."""
    return make_clone(folder, BASE | {"mine/notes": "mine\n", OTHER: "mine\n"})


@pytest.mark.parametrize("kind", [plain, with_a_history_of_its_own])
def test_apply_edit_take_apply_afresh_are_the_same_bytes(apply, make, repo, tmp_path, kind):
    checkout = kind(tmp_path / "edited")
    apply(checkout).expect(0)
    for path in (ACTOR, TRAINER, SEAM):
        write_tree(checkout, {path: EDIT[path]})
    if kind is not plain:
        git(checkout, "add", "-A")
        git(checkout, "commit", "-qm", "edits")
    make("--repo", checkout).expect(0, "built: verl-0.7.0.patch")
    fresh = write_tree(tmp_path / "fresh", BASE)
    apply(fresh).expect(0)
    assert files_of(fresh) == BASE | {path: EDIT[path] for path in (ACTOR, TRAINER, SEAM)}
    before = {path.name: path.read_bytes() for path in (repo / "patches").iterdir()}
    make("--repo", checkout).expect(0, "unchanged")
    make("--repo", fresh).expect(0, "unchanged")
    assert before == {path.name: path.read_bytes() for path in (repo / "patches").iterdir()}
    apply(fresh, "--reverse").expect(0)
    assert files_of(fresh) == BASE


def test_edits_are_taken_one_after_the_other(apply, make, tree):
    apply(tree).expect(0)
    for text in ("one", "two"):
        write_tree(tree, {ACTOR: f"{RESULT[ACTOR]}# {text}\n"})
        make("--repo", tree).expect(0, "built")
    apply(tree).expect(0, "nothing to apply")


def test_what_is_taken_and_cannot_be_built_changes_no_source(apply, make, repo, tree):
    apply(tree).expect(0)
    write_tree(tree, {ACTOR: EDIT[ACTOR], SEAM: 'VERSION = "2.0"\n'})
    with unchanged(repo):
        make("--repo", tree).expect(3)


def test_what_the_patch_does_not_touch_is_left_out_unless_it_is_named(apply, make, repo, tree):
    apply(tree).expect(0)
    write_tree(tree, {OTHER: "ours now\n", "verl/new.py": "new = 1\n"})
    make("--repo", tree).expect(0, f"left out: {OTHER}", "left out: verl/new.py", "unchanged")
    (tree / OTHER).unlink()
    make("--repo", tree).expect(0, f"left out: {OTHER}   (deleted there", "unchanged")
    write_tree(tree, {OTHER: "ours now\n"})
    make("--repo", tree, "--also", OTHER, "--also", "verl/new.py").expect(0, "built")
    carried = parse((repo / "patches/verl-0.7.0.patch").read_bytes()).keys()
    assert carried == {ACTOR, TRAINER, SEAM, OTHER, "verl/new.py"}


WRONG = [("--also", OTHER), ("--base-tree", "v9"), ("--repo", ".", "--also", "setup.py"), ("--repo", "")]


@pytest.mark.parametrize("arguments", WRONG, ids=str)
def test_what_means_nothing_is_wrong_usage(make, repo, arguments):
    with unchanged(repo):
        make(*arguments).expect(2)


def test_the_next_command_is_of_the_program_that_refuses(make, tmp_path):
    assert "apply_patch" not in make("--repo", tmp_path / "nowhere").expect(1, "next: ").err


def stashed(clone):
    git(clone, "stash", "push", "-u")


def stashed_but_the_new_file(clone):
    git(clone, "stash", "push")


def restored(clone):
    git(clone, "checkout", "--", TRAINER)


@pytest.mark.parametrize("has_record", [True, False])
@pytest.mark.parametrize("spoil", [stashed, stashed_but_the_new_file, restored])
def test_where_the_patch_is_off_no_seam_is_dropped_and_the_way_back_works(
    apply, make, repo, clone, spoil, has_record, monkeypatch
):
    apply(clone).expect(0)
    if not has_record:
        shutil.rmtree(clone / ".git/.gradloc-patch")
    spoil(clone)
    with unchanged(repo):
        next_ = re.search("next: +(.*?)(   .*)?\n", make("--repo", clone).expect(1).err)[1]
    if spoil is not stashed:
        subprocess.run(shlex.split(next_), check=True)
        make("--repo", clone).expect(0, "unchanged")
    else:
        assert "apply_patch.py" in next_


def test_a_seam_is_dropped_by_hand(apply, make, repo, tree):
    apply(tree).expect(0)
    write_tree(tree, {TRAINER: BASE[TRAINER]})
    make("--repo", tree).expect(1)
    (repo / f"verl_overrides/v0.7.0/{TRAINER}.patch").unlink()
    make("--repo", tree).expect(0, "built")
    assert parse((repo / "patches/verl-0.7.0.patch").read_bytes()).keys() == {ACTOR, SEAM}


def test_an_edit_on_both_sides_is_shown_and_nothing_is_taken(apply, make, repo, tree):
    apply(tree).expect(0)
    write_tree(tree, {SEAM: 'VERSION = "1.0"\nthere = 1\n'})
    write_tree(repo / "verl_overrides/v0.7.0", {SEAM: 'VERSION = "1.0"\nhere = 1\n'})
    said = make("--repo", tree).expect(1, "edited there and in verl_overrides/", "-here = 1", "+there = 1").err
    assert "VERSION" not in said, "what both have is not shown"
    shutil.rmtree(tree / ".gradloc-patch")  # as after git apply
    with unchanged(repo):
        make("--repo", tree).expect(1, "edited there and in verl_overrides/")
    write_tree(tree, {SEAM: RESULT[SEAM]})  # as it was given: the edit here stays
    make("--repo", tree).expect(0)
    assert "here = 1" in (repo / "patches/verl-0.7.0.patch").read_text()


TEXTS = {"no newline": b"x = 1", "CR": b"x\r\n", "empty": b"", "latin": b"\xe9\n", "hidden": "x\u202e\n".encode()}


@pytest.mark.parametrize("text", TEXTS)
def test_what_a_patch_must_not_carry_is_not_taken(apply, make, tree, text):
    apply(tree).expect(0)
    (tree / SEAM).write_bytes(TEXTS[text])
    make("--repo", tree).expect(3, SEAM)
    (tree / SEAM).unlink()
    make("--repo", tree).expect(1, SEAM)


def add_base(repo, tag="v0.7.9", **changed):
    """Another verl, in which the files are longer, and whatever else is changed."""
    files = {path: f"# longer\n{text}" if path.endswith(".py") else text for path, text in BASE.items()}
    write_tree(repo / "base" / f"verl-{tag[1:]}", files | {"verl/version/version": f"{tag[1:]}\n"} | changed)
    write_tree(repo / "verl_overrides" / tag, {"base.json": json.dumps({"commit": "1" * 40, "sdist_sha256": "1" * 64})})


def test_a_further_base_is_a_folder(apply, make, repo, tmp_path):
    add_base(repo)
    make().expect(0, "verl-0.7.9.patch")
    tree = write_tree(tmp_path / "other", files_of(repo / "base/verl-0.7.9"))
    apply(tree).expect(0)
    assert (tree / ACTOR).read_text() == f"# longer\n{RESULT[ACTOR]}"
    write_tree(tree, {ACTOR: "# longer\n" + EDIT[ACTOR]})
    make("--repo", tree).expect(0)
    assert (repo / f"verl_overrides/v0.7.9/{ACTOR}.patch").is_file()
    apply(tree, "--reverse").expect(0)


def test_an_edit_that_does_not_fit_another_base_leaves_that_one_as_it_is(apply, make, repo, tree):
    add_base(repo, **{TRAINER: BASE[TRAINER].replace("line 30\n", "line of theirs\n")})
    make().expect(0)
    before = (repo / "patches/verl-0.7.9.patch").read_bytes()
    apply(tree).expect(0)
    write_tree(tree, {TRAINER: RESULT[TRAINER].replace("line 31\n", "line of ours\n")})
    make("--repo", tree).expect(0, f"{TRAINER} of verl v0.7.9 stays as it is")
    assert (repo / "patches/verl-0.7.9.patch").read_bytes() == before
    assert "line of ours" in (repo / "patches/verl-0.7.0.patch").read_text()


def test_a_verl_without_a_folder_is_not_taken(apply, make, repo, tree):
    apply(tree).expect(0)
    write_tree(tree, {"verl/version/version": "0.8.0\n"})
    with unchanged(repo):
        make("--repo", tree).expect(1, "is verl 0.8.0", "v0.7.0")
        make("--check", "--debug").expect(0)


def test_a_port_by_hand_is_taken(make, repo, tmp_path):
    add_base(repo, **{TRAINER: BASE[TRAINER].replace("line 51\n", "line of theirs\n")})
    make().expect(3, "does not fit")
    tree = write_tree(tmp_path / "port", files_of(repo / "base/verl-0.7.9"))
    by_hand = {path: f"# longer\n{RESULT[path]}" for path in (ACTOR, TRAINER)} | {SEAM: RESULT[SEAM]}
    write_tree(tree, by_hand)
    make("--repo", tree).expect(0, "verl-0.7.9.patch")
    assert (repo / f"verl_overrides/v0.7.9/{TRAINER}.patch").is_file()


def test_a_seam_that_no_longer_applies_names_its_hunk_and_shows_both_sides(make, repo):
    add_base(repo, **{TRAINER: BASE[TRAINER].replace("line 51\n", "line of theirs\n")})
    answer = make().expect(3, f"hunk 2 of {TRAINER} does not fit at line 51")
    assert "expects | trainer line 51" in answer.err and "has     | trainer line of theirs" in answer.err


def test_a_version_in_one_place_alone_is_refused(make, repo):
    (repo / "gradloc/__init__.py").write_text('__version__ = "2.0"\n')
    make().expect(3, "is for gradloc 1.0, and this is 2.0")


def test_an_archive_that_is_not_there_is_named(real_bases, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_BASE_SDIST", str(tmp_path / "nope"))
    with pytest.raises(build.Refusal, match="base-path"):
        build.ensure_base(build.bases()["v0.7.0"], tmp_path / "cache")


def test_an_archive_that_is_not_verls_is_refused(real_bases, tmp_path, monkeypatch):
    (tmp_path / "verl-0.7.0.tar.gz").write_bytes(b"not it")
    monkeypatch.setenv("VERL_BASE_SDIST", str(tmp_path / "verl-0.7.0.tar.gz"))
    with pytest.raises(build.Refusal, match="base-digest"):
        build.ensure_base(build.bases()["v0.7.0"], tmp_path / "cache")
    assert not (tmp_path / "cache" / "verl-0.7.0").exists()


@pytest.mark.parametrize("comes_first", [True, False])
def test_where_another_process_unpacks_the_same_its_tree_is_taken(real_bases, tmp_path, monkeypatch, comes_first):
    (tmp_path / "verl-0.7.0").mkdir()
    (tmp_path / "verl-0.7.0/mine").write_text("")
    with tarfile.open(tmp_path / "verl-0.7.0.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "verl-0.7.0", "verl-0.7.0")
    monkeypatch.setenv("VERL_BASE_SDIST", str(tmp_path / "verl-0.7.0.tar.gz"))
    sha256 = hashlib.sha256((tmp_path / "verl-0.7.0.tar.gz").read_bytes()).hexdigest()
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


def test_where_pip_fetches_nothing_its_error_is_told(real_bases, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("VERL_BASE_SDIST", raising=False)
    with pytest.raises(build.Refusal, match="base-pip") as refusal:
        build.ensure_base(build.Base(tmp_path / "v0.7.0", "f9c855f7", ""), tmp_path / "cache")
    assert "ERROR: Could not find" in str(vars(refusal.value)) and "verl==0.7.0" in str(refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["v0.7.0", "v0.7.1"])
def test_pip_fetches_a_real_one(real_bases, tmp_path, monkeypatch, tag):
    monkeypatch.delenv("VERL_BASE_SDIST", raising=False)
    assert (build.ensure_base(build.bases()[tag], tmp_path / "cache") / "verl/__init__.py").is_file()


@pytest.mark.full
def test_the_real_patches_are_what_their_sources_say_and_small(real_bases):
    assert build.main(["--check"]) == 0
    listed = json.loads((ROOT / "patches/manifest.json").read_text())["patches"]
    assert [entry["base"] for entry in listed] == ["v0.7.0", "v0.7.1"]
    for entry in listed:
        files = parse((ROOT / "patches" / entry["name"]).read_bytes())
        assert [path for path, file in files.items() if file.before is None] == [SEAM]


@pytest.mark.full
@pytest.mark.parametrize("tag", ["v0.7.0", "v0.7.1"])
def test_git_and_patch_take_the_real_one_and_each_edited_file_comes_back_the_same(real_bases, tag, tmp_path, capsys):
    from patchkit import apply

    repo = tmp_path / "repo"
    for name in ("verl_overrides", "patches"):
        shutil.copytree(ROOT / name, repo / name)
    write_tree(repo, {"gradloc/__init__.py": (ROOT / "gradloc/__init__.py").read_text()})
    edited, fresh = (tmp_path / name for name in ("edited", "fresh"))
    for tree in (edited, fresh):
        shutil.copytree(build.ensure_base(build.bases()[tag]), tree)
    patches, patch = ["--patches", str(repo / "patches")], repo / "patches" / f"verl-{tag[1:]}.patch"
    make_clone(edited, {"mine": "mine\n"})
    subprocess.run(["git", "apply", "--check", str(patch)], cwd=edited, check=True)
    subprocess.run(["patch", "-p1", "--dry-run", "-s", "-F0", "-i", str(patch)], cwd=fresh, check=True)
    assert apply.main([*patches, str(edited)]) == 0
    git(edited, "add", "-A")
    git(edited, "commit", "-qm", "patched")
    paths = list(parse(patch.read_bytes()))
    for number, path in enumerate(paths):
        (edited / path).open("a").write(f"\n# edit {number}\n")
    assert build.main(["--root", str(repo), "--repo", str(edited)]) == 0
    assert apply.main([*patches, str(fresh)]) == 0
    assert [(fresh / path).read_bytes() for path in paths] == [(edited / path).read_bytes() for path in paths]
    assert apply.main([*patches, str(fresh), "--reverse"]) == 0
