# SPDX-License-Identifier: Apache-2.0
"""What a checkout is, and what each command does in each state."""

import os

import pytest

from tests.patchkit import world
from tests.patchkit.world import ACTOR, BASE, DEEP, INIT, NEW, OLDER, RESULT, TRAINER


def test_apply_brings_the_result_and_reverse_leaves_an_archive_exactly_as_it_was(apply, tree):
    before = world.picture(tree)
    assert apply("--repo", tree).code == 0
    assert world.files_of(tree) == RESULT
    assert apply("--repo", tree, "--reverse").code == 0
    assert world.files_of(tree) == BASE
    after = world.picture(tree)
    assert after.keys() == before.keys()
    assert all(after[path] == before[path] for path in before if path not in RESULT)


def test_reverse_removes_the_bytecode_of_the_modules_it_removes(apply, tree):
    apply(tree)
    cache = tree / "verl/gradloc/__pycache__"
    cache.mkdir()
    (cache / "hook.cpython-311.pyc").write_bytes(b"code")
    apply(tree, "--reverse")
    assert not (tree / "verl/gradloc").exists()


def test_reverse_keeps_a_file_of_the_users_in_our_folder(apply, tree):
    apply(tree)
    (tree / "verl/gradloc/mine.py").write_text("mine = 1\n")
    assert apply(tree, "--reverse").code == 0
    assert world.files_of(tree) == BASE | {"verl/gradloc/mine.py": "mine = 1\n"}


@pytest.mark.parametrize("applied", [False, True])
def test_what_is_done_already_and_what_only_looks_changes_nothing(apply, tree, applied):
    if applied:
        apply(tree)
    with world.unchanged(tree):
        apply(tree, "--check").expect(0)
        apply(tree, "--status").expect(0)
        said = f"{'already' if applied else 'not'} applied, nothing to do"
        apply(tree, *(() if applied else ("--reverse",))).expect(0, said)


@pytest.mark.parametrize(
    ("files", "state", "code"),
    [
        (BASE, "PRISTINE", 0),
        (RESULT, "APPLIED", 0),
        (OLDER, "OTHER_VERSION", 0),
        (BASE | {ACTOR: RESULT[ACTOR]}, "PARTIAL", 1),
        (BASE | {ACTOR: BASE[ACTOR] + "mine\n"}, "DRIFTED", 1),
        (BASE | {ACTOR: "another\n", "verl/version/version": "0.6.1\n"}, "WRONG_BASE", 1),
        ({path: text for path, text in BASE.items() if "init" not in path}, "NOT_VERL", 1),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_each_state_has_its_name_and_exit_code(apply, tmp_path, files, state, code):
    root = world.write_tree(tmp_path / "t", files)
    outcome = apply(root, "--status")
    assert outcome.code == code
    assert (outcome.out + outcome.err).removeprefix("refused: ").startswith(state)
    if state != "NOT_VERL":
        assert apply(root, "--status", "--quiet").out == state + "\n"
        assert apply(root, "--status", "--json").document["state"] == state


DRIFTS = {
    "base-drift-offset": ({ACTOR: "#\n" * 40 + BASE[ACTOR]}, "hunk 1 does not fit at line 8"),
    "base-wrong-place": ({ACTOR: "def other():\n" + BASE[ACTOR] + BASE[ACTOR]}, "does not fit"),
    "base-dirty-elsewhere": ({ACTOR: BASE[ACTOR] + "mine()\n"}, "not where the patch edits it"),
    "base-crlf-checkout": ({path: BASE[path].replace("\n", "\r\n") for path in (ACTOR, TRAINER)}, "CRLF"),
    "new-file-exists-different": ({NEW: "mine = True\n"}, "stands where the patch adds"),
    "parent-blocked": ({"verl/gradloc": "a file\n"}, "verl/gradloc is a plain file"),
}


@pytest.mark.parametrize("case", DRIFTS)
@pytest.mark.parametrize("options", [(), ("--check",), ("--force",), ("--reverse", "--force")])
def test_a_file_of_unknown_content_is_never_overwritten(apply, tmp_path, case, options):
    edits, said = DRIFTS[case]
    root = world.write_tree(tmp_path / "t", BASE | edits)
    with world.unchanged(root):
        outcome = apply("--repo", root, *options).expect(1, "DRIFTED", said, next(iter(edits)), "next:")
        assert ("--force never overwrites" in outcome.err) == ("--force" in options)


def test_edits_of_a_patched_checkout_are_told_from_strange_files(apply, clone):
    apply(clone)
    world.write_tree(clone, {NEW: "mine = 1\n", ACTOR: RESULT[ACTOR].replace("hook()", "hook(1)")})
    with world.unchanged(clone):
        for options in ((), ("--reverse",), ("--force",)):
            outcome = apply(clone, *options).expect(1, "were edited after it was applied")
            outcome.expect(1, f"bash make_patch.sh --repo {clone}", "expects 'hook()', there is 'hook(1)'")


def test_edits_can_be_thrown_away_and_the_patch_completed(apply, clone):
    apply(clone)
    world.write_tree(clone, {NEW: "mine = 1\n", ACTOR: RESULT[ACTOR] + "mine\n"})
    (clone / NEW).unlink()
    world.git(clone, "checkout", "--", ACTOR)
    assert apply(clone).code == 1
    assert apply(clone, "--force").code == 0
    assert world.files_of(clone) == RESULT


KINDS = {
    "missing": lambda place: None,
    "became-a-folder": lambda place: world.write_tree(place, {"x": "x\n"}),
    "is-a-link": lambda place: place.symlink_to("/etc/passwd"),
    "is-a-link-to-the-right-content": lambda place: place.symlink_to("moved.py"),
    "is-a-pipe": lambda place: os.mkfifo(place),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_file_that_is_no_plain_file_is_refused(apply, tree, kind):
    (tree / TRAINER).rename(tree / TRAINER.replace("ray_trainer", "moved"))
    KINDS[kind](tree / TRAINER)
    before = world.files_of(tree)
    apply(tree).expect(1, TRAINER)
    assert world.files_of(tree) == before


def test_a_linked_folder_is_never_written_through(apply, tree, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tree / "verl/gradloc").symlink_to(outside)
    apply(tree).expect(1, "symbolic link")
    assert not any(outside.iterdir())


def test_a_half_patched_tree_is_refused_and_force_finishes_or_undoes_it(apply, tmp_path):
    for options, wanted in ((("--force",), RESULT), (("--reverse", "--force"), BASE)):
        root = world.write_tree(tmp_path / options[0] / str(len(options)), BASE)
        world.write_tree(root, {ACTOR: RESULT[ACTOR]})
        with world.unchanged(root):
            refused = apply(root).expect(1, "PARTIAL", "--force", "--reverse", "found:    1 of 5 files patched")
            listed = [line for line in refused.err.splitlines() if "not patched:" in line]
            assert len(listed) == 4 and ACTOR not in refused.err, "only what the patch wants and is not there"
        apply(root, *options).expect(0, "--force skipped the check")
        assert world.files_of(root) == wanted


@pytest.mark.parametrize(
    ("options", "said", "files"), [((), "upgraded from 0.0.9", RESULT), (("--reverse",), "reversed", BASE)]
)
def test_an_older_version_is_upgraded_or_reversed_in_one_step(apply, tmp_path, options, said, files):
    root = world.write_tree(tmp_path / "t", OLDER)
    apply(root, *options).expect(0, said)
    assert world.files_of(root) == files


def test_a_version_can_be_pinned_by_name(apply, tree):
    assert apply(tree, "--patch-version", "0.1.0").code == 0
    for version, said in (("0.0.9", "older release"), ("9.9", "misspelt")):
        refused = apply(tree, "--patch-version", version).expect(2, "expected: 0.1.0")
        assert said in refused.err
    assert world.files_of(tree) == RESULT


def test_a_new_file_with_the_right_content_is_part_of_the_state(apply, tree):
    world.write_tree(tree, {NEW: RESULT[NEW]})
    assert apply(tree).code == 0
    assert world.files_of(tree) == RESULT


def test_after_git_checkout_the_new_files_left_behind_do_no_harm(apply, clone):
    apply(clone)
    world.git(clone, "checkout", "--", ".")
    assert apply(clone, "--status", "--quiet").out == "PARTIAL\n"
    assert apply(clone, "--reverse").code == 0
    assert world.files_of(clone) == BASE


def test_a_development_build_is_known_by_the_copy_it_left(capsys, apply, tree, tmp_path):
    built = BASE | {ACTOR: BASE[ACTOR] + "trial()\n", "verl/gradloc/trial.py": "trial = 1\n", INIT: RESULT[INIT]}
    world.run(capsys, world.make_patches(tmp_path / "trial", built), tree)
    assert world.files_of(tree) == built
    assert apply(tree, "--status", "--quiet").out == "OTHER_VERSION\n"
    assert apply(tree).code == 0
    assert world.files_of(tree) == RESULT
    assert not (tree / "verl/gradloc/trial.py").exists()


def test_a_damaged_copy_in_the_state_folder_is_of_no_use_and_does_no_harm(apply, tree):
    apply(tree)
    (tree / ".gradloc-patch/applied.patch").write_bytes(b"diff --git a/../x b/../x\n")
    assert "is no use" in apply(tree, "--status").out
    assert apply(tree, "--reverse").code == 0
    assert world.files_of(tree) == BASE


def test_a_file_without_a_final_newline_can_be_given_one_and_loses_it_again(capsys, tmp_path):
    base = BASE | {"verl/config.yaml": world.numbered("key", 9) + "last: 1"}
    result = base | {"verl/config.yaml": base["verl/config.yaml"] + "\nours: 2\n", INIT: RESULT[INIT]}
    patches = world.make_patches(tmp_path / "w", result, base)
    root = world.write_tree(tmp_path / "t", base)
    assert world.run(capsys, patches, root).code == 0
    assert world.files_of(root) == result
    assert world.run(capsys, patches, root, "--reverse").code == 0
    assert world.files_of(root) == base


def test_permissions_of_a_replaced_file_stay(apply, tree):
    (tree / ACTOR).chmod(0o640)
    for options in ((), ("--reverse",)):
        apply(tree, *options).expect(0)
        assert (tree / ACTOR).stat().st_mode & 0o777 == 0o640


def test_a_foreign_patch_with_full_ids_is_applied_by_its_digest(apply, tree, tmp_path):
    other = BASE | {ACTOR: BASE[ACTOR].replace("line 30\n", "line thirty\n"), DEEP: "deep = 1\n"}
    file = tmp_path / "other.patch"
    file.write_bytes(world.patch_of(BASE, other))
    digest = world.hashlib.sha256(file.read_bytes()).hexdigest()
    apply("--repo", tree, "--patch-file", file).expect(3, "no checksum")
    assert apply("--repo", tree, "--patch-file", file, "--patch-sha256", digest).code == 0
    assert world.files_of(tree) == other
    assert apply("--repo", tree).code == 0, "ours replaces it: the copy it left tells how"
    assert world.files_of(tree) == RESULT
