# SPDX-License-Identifier: Apache-2.0
"""The built patch on the real verl, judged by independent readers; properties on random trees."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchkit.apply.library import Library
from patchkit.build.sources import Sources, check_text, new_file_section
from patchkit.build.take import seam
from patchkit.errors import IntegrityError
from patchkit.patch import language as splice
from patchkit.patch.content import blob_id
from patchkit.patch.language import parse
from patchkit.patch.manifest import parse as parse_manifest
from patchkit.patch.manifest import render as render_manifest
from tests.patchkit import world
from tests.patchkit.world import BASE, RESULT

ROOT = Path(__file__).resolve().parents[3]
PATCH = ROOT / "patches/gradloc.patch"
MAX_SEAM_LINES = 150


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not {".gradloc-patch", "__pycache__"} & set(path.parts)
    }


@pytest.fixture(scope="module")
def files():
    """The sections of the built patch."""
    return list(Library(ROOT / "patches").families[0][1][0].files.values())


@pytest.fixture(scope="module")
def patched(base_tree, patched_tree):
    """What the applier made of the base: every file's bytes."""
    return contents(patched_tree)


def test_apply_on_the_real_base_gives_the_promised_results_and_touches_nothing_else(files, base_tree, patched):
    base = contents(base_tree)
    expected = dict(base)
    for file in files:
        assert file.after == blob_id(patched[file.path])
        assert (file.before is None) == (file.path not in base)
        assert file.before is None or file.before == blob_id(base[file.path])
        expected[file.path] = patched[file.path]
    assert patched == expected


def test_reverse_on_the_real_base_gives_the_base_back(capsys, files, base_tree, tmp_path):
    root = Path(shutil.copytree(base_tree, tmp_path / "verl"))
    before = world.picture(root)
    assert world.run(capsys, ROOT / "patches", root).code == 0
    assert world.run(capsys, ROOT / "patches", root, "--reverse").code == 0
    after = world.picture(root)
    assert after.keys() == before.keys()
    touched = {file.path for file in files}
    for path, seen in before.items():
        # The mode and the content; the time too of what was not touched.
        assert (after[path][0], after[path][-1]) == (seen[0], seen[-1])
        assert path in touched or after[path] == seen


def test_git_in_a_scratch_index_agrees(base_tree, patched, files, tmp_path):
    root = Path(shutil.copytree(base_tree, tmp_path / "verl"))
    world.git(root, "init", "-q")
    world.git(root, "add", "-A", "-f")
    base = world.git(root, "write-tree")
    world.git(root, "apply", "--cached", str(PATCH))
    for file in files:
        listed = world.git(root, "ls-files", "--stage", file.path).split()
        assert listed[:2] == ["100644", file.after]
    world.git(root, "apply", "--cached", "--reverse", str(PATCH))
    assert world.git(root, "write-tree") == base


@pytest.mark.skipif(shutil.which("patch") is None, reason="GNU patch is not installed")
def test_gnu_patch_agrees(base_tree, patched, tmp_path):
    root = Path(shutil.copytree(base_tree, tmp_path / "verl"))
    command = ["patch", "-p1", "--batch", "--fuzz=0", "--no-backup-if-mismatch", "-i", str(PATCH)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "offset" not in done.stdout and "fuzz" not in done.stdout
    assert contents(root) == patched


def test_the_seams_stay_small(files, base_tree, patched, tmp_path):
    """Lines added to verl's own Python, moved or re-indented lines apart: git diff -w."""
    added = 0
    for file in files:
        if file.before is None or not file.path.endswith(".py"):
            continue
        (tmp_path / "after.py").write_bytes(patched[file.path])
        command = ["git", "diff", "--no-index", "--numstat", "-w", "--color-moved=no"]
        done = subprocess.run(
            [*command, str(base_tree / file.path), str(tmp_path / "after.py")], capture_output=True, text=True
        )
        added += int(done.stdout.split()[0]) if done.stdout else 0
    assert 0 < added <= MAX_SEAM_LINES


def test_the_manifest_is_written_as_it_is_read():
    data = (ROOT / "patches/manifest.json").read_bytes()
    assert render_manifest(parse_manifest(data)) == data


LINES = st.lists(st.sampled_from(["a", "b", "c", "  d", "", "-x", "+y", "@@ z", "\\ w", "\x0c"]))
NAMES = st.sampled_from(["verl/a.py", "verl/b/c.py", "verl/b/d.yaml", "verl/e.py"])


@st.composite
def trees(draw) -> tuple[dict[str, str], dict[str, str]]:
    """A tree before and after: files added, edited, left alone; no final newline at times."""
    before, after = {}, {}
    for path in draw(st.sets(NAMES, min_size=1)):
        old = "".join(f"{line}\n" for line in draw(LINES))
        new = "".join(f"{line}\n" for line in draw(LINES.filter(bool)))
        new = new.replace("\x0c", "f")
        kind = draw(st.sampled_from(["add", "edit", "keep"]))
        if kind != "add":
            before[path] = old if draw(st.booleans()) else old.removesuffix("\n")
        after[path] = before[path] if kind == "keep" else new
    return before, after


def _sections(before: dict[str, str], after: dict[str, str]):
    try:
        return parse(world.patch_of(before, after))
    except IntegrityError as error:
        assert error.reason == "build-nothing", error
        return ()


@given(trees())
def test_for_random_trees_forward_gives_after_and_backward_gives_before(pair):
    before, after = pair
    for file in _sections(before, after):
        old = before.get(file.path, "").encode()
        assert splice.forward(file, old) == after[file.path].encode()
        if file.before is not None:
            assert splice.backward(file, after[file.path].encode()) == old


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(trees())
def test_for_random_trees_make_of_apply_is_the_same_patch(pair):
    """A seam made by git, applied, and made again from the result: the same bytes."""
    before, after = pair
    changed = [path for path in before if before[path] != after.get(path, before[path])]
    made = {path: seam(path, before[path].encode(), after[path].encode()) for path in changed}
    added = {path: text for path, text in after.items() if path not in before}
    if not made and not added:
        return
    patch = Sources(added, made).patch(world.V070)
    results = {f.path: splice.forward(f, before.get(f.path, "").encode()) for f in parse(patch)}
    again = Sources(
        {path: check_text(results[path], path) for path in added},
        {path: seam(path, before[path].encode(), results[path]) for path in changed},
    )
    assert again.patch(world.V070) == patch


@given(st.data())
def test_a_mutated_patch_changes_nothing_unless_the_result_is_the_same(data):
    """Any byte changed, dropped or doubled: refused, or the very same result."""
    patch = world.patch_of(BASE, RESULT)
    at = data.draw(st.integers(0, len(patch) - 1))
    piece = data.draw(st.binary(max_size=3))
    mutated = patch[:at] + piece + patch[at + data.draw(st.integers(0, 3)) :]
    try:
        results = {
            file.path: splice.forward(file, BASE.get(file.path, "").encode())
            for file in parse(mutated)
            if file.before is None or file.before == blob_id(BASE.get(file.path, "").encode())
        }
    except IntegrityError:
        return
    for path, result in results.items():
        known = path in RESULT and result == RESULT[path].encode()
        # A renamed new file is another patch with ids that hold; only the digest of the whole
        # patch, which the command line demands, can tell.
        renamed = path not in BASE and result in [t.encode() for t in RESULT.values()]
        assert known or renamed


def test_a_new_file_section_is_what_git_writes(tmp_path):
    for count in (1, 2, 30):
        text = world.numbered("x", count)
        root = world.make_clone(tmp_path / str(count), {"a": "a\n"})
        world.write_tree(root, {"verl/x.py": text})
        world.git(root, "add", "-A")
        ours = new_file_section("verl/x.py", text)
        assert world.git(root, "diff", "--cached", "--full-index") == ours
