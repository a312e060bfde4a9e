# SPDX-License-Identifier: Apache-2.0
"""More than one verl: the patch is picked by content, seams are shared where they fit, and drift is told."""

import difflib
import shutil
from collections import Counter
from pathlib import Path

import pytest

from patchkit.apply.library import Library
from patchkit.build import base as bases
from patchkit.build import generated
from patchkit.build.cli import _base_of, write_file
from patchkit.build.cli import parser as parser_of
from patchkit.build.sources import Folders, compose
from patchkit.errors import IntegrityError
from patchkit.patch.manifest import Base
from patchkit.tree.checkout import resolve
from tests.patchkit import world
from tests.patchkit.build.test_roundtrip import contents
from tests.patchkit.world import ACTOR, BASE, INIT, NEW, RESULT, TRAINER, V070, V071

ROOT = Path(__file__).resolve().parents[3]
# The next verl: the actor is another, the trainer's lines moved, the rest is the same.
NEXT = BASE | {
    "verl/version/version": "0.7.1\n",
    ACTOR: BASE[ACTOR].replace("actor line 11\n", "actor line eleven\n"),
    TRAINER: "new line\n" * 5 + BASE[TRAINER],
}
NEXT_RESULT = RESULT | {
    "verl/version/version": "0.7.1\n",
    ACTOR: NEXT[ACTOR].replace("actor line 10\n", "actor line 10\nhook()\n"),
    TRAINER: "new line\n" * 5 + RESULT[TRAINER],
}


@pytest.fixture
def two(tmp_path, monkeypatch) -> tuple[Folders, dict, Path]:
    """Sources for two verls, their pristine trees, and the built patches/."""
    trees = {V070: world.write_tree(tmp_path / "base-0", BASE), V071: world.write_tree(tmp_path / "base-1", NEXT)}
    folders = world.write_sources(tmp_path, world.sources(BASE, RESULT))
    seam = world.seam(ACTOR, NEXT[ACTOR], NEXT_RESULT[ACTOR])
    write_file(folders.overrides / f"v0.7.1/{ACTOR}.patch", seam.encode())
    for name, data in compose(folders, trees).items():
        write_file(tmp_path / "patches" / name, data)
    monkeypatch.setattr(bases, "PINNED", dict.fromkeys(trees, ""))
    monkeypatch.setattr(bases, "ensure_base", lambda tag: next(t for b, t in trees.items() if b.tag == tag))
    return folders, trees, tmp_path / "patches"


def test_the_content_of_the_tree_picks_the_patch(capsys, two, tmp_path):
    patches = two[2]
    for name, before, after, tag in (("a", BASE, RESULT, "v0.7.0"), ("b", NEXT, NEXT_RESULT, "v0.7.1")):
        # What the tree says of itself decides nothing where the content fits.
        root = world.write_tree(tmp_path / name, before | {"verl/version/version": "9.9\n"})
        world.run(capsys, patches, root).expect(0, f"the patch for verl {tag}")
        assert world.files_of(root) == after | {"verl/version/version": "9.9\n"}
        assert world.run(capsys, patches, root, "--status", "--json").document["base"] == tag
        assert world.run(capsys, patches, root, "--reverse").code == 0
        assert world.files_of(root) == before | {"verl/version/version": "9.9\n"}


def test_base_filters_and_forces_nothing(capsys, two, tmp_path):
    root = world.write_tree(tmp_path / "t", NEXT)
    world.run(capsys, two[2], root, "--base", "v0.7.0").expect(1, "this is verl 0.7.1, the nearest patch is for v0.7.0")
    assert world.files_of(root) == NEXT
    patched = world.write_tree(tmp_path / "patched", NEXT_RESULT)
    refused = world.run(capsys, two[2], patched, "--base", "v0.7.0").expect(1, "this is verl 0.7.1")
    assert "not known here" not in refused.err
    world.run(capsys, two[2], root, "--base", "v0.6").expect(2, "expected: v0.7.0, v0.7.1")
    assert world.run(capsys, two[2], root, "--base", "0.7.1").code == 0


def test_an_edited_tree_is_explained_against_the_verl_that_it_is(capsys, two, tmp_path):
    root = world.write_tree(tmp_path / "t", NEXT | {ACTOR: NEXT[ACTOR].replace("line 10\n", "line ten\n")})
    refused = world.run(capsys, two[2], root).expect(1, "DRIFTED", "hunk 1 does not fit at line 10")
    assert TRAINER not in refused.err


def test_a_mixture_of_two_verls_is_told_which_file_is_of_which(capsys, two, tmp_path):
    root = world.write_tree(tmp_path / "t", BASE | {ACTOR: NEXT[ACTOR]})
    world.run(capsys, two[2], root).expect(1, f"{ACTOR}: it is of verl v0.7.1")
    world.write_tree(root, NEXT | {ACTOR: RESULT[ACTOR], TRAINER: NEXT_RESULT[TRAINER]})
    world.run(capsys, two[2], root, "--force").expect(1, f"{ACTOR}: it is of verl v0.7.0")


def test_a_seam_serves_the_next_verl_where_each_hunk_fits_at_one_place_alone(two):
    folders, trees, patches = two
    edition = Library(patches).families[1][1][0]
    assert set(edition.files) == {ACTOR, TRAINER, INIT, NEW, world.DEEP}
    assert [place.name for place in (folders.overrides / "v0.7.1").rglob("*.patch")] == ["dp_actor.py.patch"]
    world.write_tree(trees[V071], {TRAINER: BASE[TRAINER] + BASE[TRAINER]})
    with pytest.raises(IntegrityError) as caught:
        compose(folders, trees)
    assert caught.value.reason == "build-seam-lacking" and f"{TRAINER}.patch" in caught.value.what


def test_edits_of_the_next_verl_go_to_its_own_folder_and_shared_files_to_the_first(capsys, two, tmp_path):
    folders, _, patches = two
    shared = "verl/utils/reward.py"
    write_file(folders.overrides / "v0.7.0" / shared, b"reward = 1\n")
    assert world.make(capsys, folders, patches).code == 0
    root = world.write_tree(tmp_path / "t", NEXT)
    world.run(capsys, patches, root)
    edits = {TRAINER: NEXT_RESULT[TRAINER] + "more\n", NEW: "edited = 1\n", shared: "reward = 2\n"}
    world.write_tree(root, edits)
    assert world.make(capsys, folders, patches, "--repo", root).code == 0
    assert folders.place("v0.7.0", NEW).read_text() == "edited = 1\n"
    assert (folders.overrides / "v0.7.0" / shared).read_text() == "reward = 2\n"
    assert "+more\n" in (folders.overrides / f"v0.7.1/{TRAINER}.patch").read_text()
    assert "more" not in (folders.overrides / f"v0.7.0/{TRAINER}.patch").read_text()
    first, second = (world.write_tree(tmp_path / name, files) for name, files in (("x", BASE), ("y", NEXT)))
    for tree in (first, second):
        assert world.run(capsys, patches, tree).code == 0
    assert world.files_of(second) == NEXT_RESULT | edits
    assert world.files_of(first) == RESULT | {NEW: "edited = 1\n", shared: "reward = 2\n"}


def test_a_clone_is_taken_to_be_on_the_latest_verl_that_it_descends_from(tmp_path):
    clone = world.make_clone(tmp_path / "clone")
    first = world.git(clone, "rev-parse", "HEAD").strip()
    world.write_tree(clone, NEXT)
    world.git(clone, "commit", "-qam", "next")
    second = world.git(clone, "rev-parse", "HEAD").strip()
    trees = {Base("v0.7.0", first): None, Base("v0.7.1", second): None}
    for arguments, tag in (([], "v0.7.1"), (["--head", first], "v0.7.0"), (["--base", "v0.7.0"], "v0.7.0")):
        options = parser_of().parse_args(["--repo", str(clone), *arguments])
        assert _base_of(resolve(str(clone)), options, trees).tag == tag


def test_drift_says_for_each_seam_whether_and_where_it_fits(capsys, two, tmp_path):
    folders, _, patches = two

    def drift(files: dict) -> str:
        root = world.write_tree(tmp_path / f"t{len(list(tmp_path.iterdir()))}", files)
        outcome = world.make(capsys, folders, patches, "--drift", root, "--base", "v0.7.0")
        assert outcome.code == 0
        return outcome.out

    with world.unchanged(folders.package, folders.overrides, patches):
        assert "2 same" in drift(BASE)
        assert f"{ACTOR}  conflict  hunk 1, at about line 8" in drift(NEXT)
        assert f"{TRAINER} moved hunk 1 by +5 lines, hunk 2 by +5 lines" in " ".join(drift(NEXT).split())
        assert "fits" in drift(BASE | {ACTOR: BASE[ACTOR] + "mine\n"})
        assert "missing" in drift({path: text for path, text in BASE.items() if path != ACTOR})


# The real verls.


@pytest.fixture(scope="module")
def next_base() -> Path:
    """The pristine verl 0.7.1."""
    return bases.ensure_base("v0.7.1")


def test_the_real_0_7_1_is_patched_and_reversed_to_its_exact_base(capsys, next_base, base_tree, tmp_path):
    root = Path(shutil.copytree(next_base, tmp_path / "verl"))
    world.run(capsys, ROOT / "patches", root).expect(0, "the patch for verl v0.7.1")
    first, second = (families[1][0] for families in Library(ROOT / "patches").families)
    assert first.files.keys() == second.files.keys()
    package = {path: file.after for path, file in first.files.items() if file.before is None}
    assert package == {path: file.after for path, file in second.files.items() if file.before is None}
    assert world.run(capsys, ROOT / "patches", root, "--reverse").code == 0
    assert contents(root) == contents(next_base)


def test_the_seams_of_both_verls_say_the_same_to_gradloc():
    """Who adds a call or a key for one verl adds it for the other."""
    first, second = (families[1][0].files for families in Library(ROOT / "patches").families)
    for path, file in first.items():
        if file.before is not None and "_generated_" not in path:
            assert added(file) == added(second[path]), path


def added(file) -> Counter:
    """The lines of a seam that speak of gradloc, or that are keys, without their indentation."""
    lines = (
        line[2:].strip() for hunk in file.hunks for line in difflib.ndiff(hunk.old, hunk.new) if line.startswith("+ ")
    )
    is_yaml = file.path.endswith(".yaml")
    return Counter(line for line in lines if line and ("gradloc" in line or is_yaml))


@pytest.mark.full
@pytest.mark.parametrize("tag", [base.tag for base in bases.PINNED])
def test_the_generated_yaml_of_each_patched_verl_is_fresh(capsys, tmp_path, tag):
    pytest.importorskip("hydra")
    root = Path(shutil.copytree(bases.ensure_base(tag), tmp_path / "verl"))
    assert world.run(capsys, ROOT / "patches", root).code == 0
    generated.check(root)


def test_each_built_patch_names_its_verl():
    library = Library(ROOT / "patches")
    assert [entry.name for entry in library.manifest.entries] == ["gradloc.patch", "gradloc-v0.7.1.patch"]
    for base, editions in library.families:
        assert f"Applies-To: verl {base.tag}, commit {base.commit}\n".encode() in editions[0].patch
