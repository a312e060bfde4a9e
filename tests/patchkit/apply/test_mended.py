# SPDX-License-Identifier: Apache-2.0
"""What users met and could not get out of: one test for each, as it happened."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from patchkit.apply import library
from patchkit.errors import MAX_LISTED
from patchkit.tree.disk import Filesystem
from tests.patchkit import world
from tests.patchkit.build.test_take import Workshop
from tests.patchkit.world import ACTOR, BASE, NEW, RESULT, TRAINER

ROOT = Path(__file__).resolve().parents[3]
STATE = ".gradloc-patch"
TRIAL = BASE | {world.INIT: RESULT[world.INIT], ACTOR: BASE[ACTOR] + "trial()\n", NEW: "trial = 1\n"}


@pytest.fixture
def shop(tmp_path, monkeypatch, capsys):
    return Workshop(tmp_path, monkeypatch, capsys)


# An older build whose copy is gone.


def test_an_unknown_build_is_not_called_edited_and_the_way_out_keeps_all_of_it(capsys, apply, clone, tmp_path):
    world.run(capsys, world.make_patches(tmp_path / "trial", TRIAL), clone)
    shutil.rmtree(clone / ".git" / STATE)
    for options in ((), ("--reverse",), ("--force",)):
        refused = apply(clone, *options).expect(1, "a build of the patch that is not known here")
        assert "make_patch.sh" not in refused.err and "edited after it was applied" not in refused.err
    # What it advises: everything of that build is kept aside, and the tree can be patched.
    world.git(clone, "stash", "push", "--include-untracked", "--", "verl")
    assert f"git -C {clone} stash push --include-untracked -- verl" in refused.err
    assert world.files_of(clone) == BASE
    assert apply(clone).code == 0


def test_edits_are_not_taken_where_nothing_says_what_they_are_edits_of(shop):
    shop.edit(TRAINER, RESULT[TRAINER] + "mine\n")
    shutil.rmtree(shop.clone / ".git" / STATE)
    said = shop.refused(1, "which build of the patch")
    assert "on a fresh checkout" in said


def test_the_copy_comes_back_when_an_unedited_tree_is_patched_again(shop):
    """The way to a known origin, where the tree is not edited yet."""
    shutil.rmtree(shop.clone / ".git" / STATE)
    assert "nothing to do" in world.run(shop.capsys, shop.patches, shop.clone).out
    shop.edit(NEW, "mine = 1\n")
    assert f"taken: {NEW}" in shop.take().out


def test_an_old_release_whose_copy_is_gone_brings_nothing_back(shop):
    """It is known by its files' ids: nothing of it is an edit."""
    world.release(shop.patches, world.patch_of(BASE, TRIAL), "0.0.8")
    shop.make()
    world.git(shop.clone, "clean", "-fdq")
    world.git(shop.clone, "checkout", "-q", "--", ".")
    world.write_tree(shop.clone, TRIAL)
    shutil.rmtree(shop.clone / ".git" / STATE)
    with world.unchanged(*shop.places):
        assert "nothing to take" in shop.take().out


# What was done is not unsaid.


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("option", ["--quiet", "--json", "--wait=0", "--status", "--list", "--check"])
def test_a_report_that_cannot_be_written_is_a_failure_where_it_is_all_that_was_asked_for(patches, tree, option):
    command = [sys.executable, "apply_patch.py", "--patches", str(patches), str(tree), option]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    if option in ("--status", "--list", "--check"):
        assert done.returncode == 4 and "could not be written" in done.stderr
        return
    assert done.returncode == 0 and world.files_of(tree) == RESULT
    said = "" if option == "--quiet" else "note: this was done, but not said: No space left on device\n"
    assert done.stderr == said


# What a container that ran as root left behind.


def test_byte_code_of_another_user_does_not_stand_in_the_way(apply, tree, monkeypatch):
    apply(tree)
    cache = tree / "verl/gradloc/__pycache__"
    cache.mkdir()
    (cache / "hook.cpython-311.pyc").write_bytes(b"code")
    do = Filesystem.do

    def denied(self, call, *arguments):
        if call is os.unlink and arguments[0].suffix == ".pyc":
            raise PermissionError(13, "Permission denied", str(arguments[0]))
        return do(self, call, *arguments)

    monkeypatch.setattr(Filesystem, "do", denied)
    apply(tree, "--reverse").expect(0, f"sudo rm -r {cache}")
    assert {path: text for path, text in world.files_of(tree).items() if "pycache" not in path} == BASE
    monkeypatch.undo()
    assert apply(tree, "--reverse").code == 0
    assert not (tree / "verl/gradloc").exists(), "the next run sweeps what it may"


# Other verls.


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.9.0", ("this is verl 0.9.0, which needs no patch", "pip install .", "+gradloc=on")),
        ("1.2.0.dev", ("this is verl 1.2.0.dev, which needs no patch", "+gradloc=on")),
        ("0.8.0.dev", ("this is verl 0.8.0.dev, for which there is no patch", "0.7.0 or 0.7.1", "0.9")),
        ("0.6.1", ("this is verl 0.6.1, the nearest patch is for v0.7.0", "Use verl 0.7.0")),
    ],
)
def test_another_verl_is_named_with_what_fits_it(apply, tmp_path, version, said):
    """From 0.8 on the actor is elsewhere; such a tree is verl all the same."""
    files = {path: text for path, text in BASE.items() if path != ACTOR} | {"verl/version/version": version + "\n"}
    root = world.write_tree(tmp_path / "t", files)
    for options in ((), ("--check",), ("--reverse",)):
        refused = apply(root, *options).expect(1, "WRONG_BASE")
        assert all(text in refused.err for text in said), refused.err
        assert ("the file is missing" in refused.err) == ("nearest" in refused.err), "no list where nothing fits"
    assert apply(root, "--status", "--quiet").out == "WRONG_BASE\n"


# Trees that mean harm, or are broken.


@pytest.mark.parametrize("content", ["{}", "[]", "", '{"schema_version": 1}'])
@pytest.mark.parametrize("options", [(), ("--check",), ("--reverse",), ("--check", "--reverse")])
def test_a_journal_that_cannot_be_used_is_said_by_every_command(apply, tree, content, options):
    (tree / STATE).mkdir()
    (tree / STATE / "journal.json").write_text(content)
    apply(tree, *options).expect(5, "cannot be used", f"rm -r {tree}/{STATE}")
    assert world.files_of(tree) == BASE
    assert "a run was interrupted here" in apply(tree, "--status").out


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (".gradloc-patch/lock", 1),
        (".gradloc-patch/journal.json", 5),
        (".gradloc-patch/applied.patch", 1),
        ("HEAD", 0),
        ("packed-refs", 0),
        ("commondir", 0),
    ],
)
def test_a_pipe_in_the_git_or_the_state_folder_is_not_waited_for(apply, clone, name, code):
    def waits(*_):
        raise TimeoutError

    (clone / ".git" / STATE).mkdir()
    (clone / ".git" / name).unlink(missing_ok=True)
    os.mkfifo(clone / ".git" / name)
    signal.signal(signal.SIGALRM, waits)
    signal.alarm(20)
    apply(clone, "--status").expect(0, "PRISTINE")
    assert apply(clone, "--check").code in (0, code)
    assert apply(clone, "--force").code == code
    signal.alarm(0)


@pytest.mark.parametrize("how", ["file", "link"])
def test_a_git_folder_elsewhere_that_does_not_point_back_is_not_written_to(apply, tree, tmp_path, how):
    victim = world.make_clone(tmp_path / "victim") / ".git"
    if how == "file":
        (tree / ".git").write_text(f"gitdir: {victim}\n")
    else:
        (tree / ".git").symlink_to(victim)
    with world.unchanged(victim):
        outcome = apply(tree, "--json")
        assert outcome.code == 0 and outcome.document["head"] is None
    assert apply(tree, "--reverse").code == 0 and not (tree / STATE).exists()


@pytest.mark.parametrize("ref", ["{secret}", "refs/../../secret", "refs/heads/secret"])
def test_no_file_is_printed_as_if_it_were_a_commit(apply, clone, tmp_path, ref):
    secret = tmp_path / "secret"
    for place in (secret, clone / "secret", clone / ".git/refs/heads/secret"):
        place.write_text("a password\n" if "heads" in ref else 40 * "a")  # which looks like a commit
    (clone / ".git/HEAD").write_text(f"ref: {ref.format(secret=secret)}\n")
    for options in ((), ("--reverse",), ("--status", "--json")):
        outcome = apply(clone, *options)
        assert outcome.code == 0 and not re.search(f"password|{40 * 'a'}", outcome.out + outcome.err)


# The published patch on a tree.


def test_the_published_patch_on_a_tree_is_named_with_the_way_to_take_it_off(apply, clone, tree, monkeypatch):
    for root in (clone, tree):
        world.write_tree(root, {ACTOR: "def published():\n"})
    blob = world.blob_id(b"def published():\n")
    assert len(library.PUBLISHED_RESULTS) == 4 and all(len(blob) == 40 for blob in library.PUBLISHED_RESULTS.values())
    monkeypatch.setitem(library.PUBLISHED_RESULTS, ACTOR, blob)
    refused = apply(clone)
    assert refused.code == 1 and "publicly released GradLoc patch is on this tree" in refused.err
    assert f"git -C {clone} apply -R" in refused.err and f"git -C {clone} checkout -- {ACTOR}" in refused.err
    assert "apply -R" in apply(tree).err
    world.git(clone, "checkout", "--", ACTOR)
    assert apply(clone).code == 0


# The command line.


def test_make_patch_says_which_python_it_needs(tmp_path):
    old = tmp_path / "python3.8"
    code = "import sys; sys.version_info = (3, 8, 1); exec(sys.argv.pop(2))"
    old.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
    old.chmod(0o755)
    command = ["bash", str(ROOT / "make_patch.sh"), "--check"]
    done = subprocess.run(command, env={**os.environ, "PYTHON": str(old)}, capture_output=True, text=True)
    assert done.returncode != 0 and "needs Python 3.10" in done.stderr and "Traceback" not in done.stderr


def test_modules_of_the_current_folder_are_not_imported(tmp_path):
    for name in ("json", "patchkit", "argparse", "hashlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for command in (["bash", ROOT / "make_patch.sh"], [sys.executable, ROOT / "apply_patch.py"]):
        done = subprocess.run([*command, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "--repo" in done.stdout, done.stderr


def test_the_next_command_can_be_pasted_as_it_is(apply, tmp_path):
    root = world.write_tree(tmp_path / "my verl; echo $HOME", BASE)
    said = apply(root).out.splitlines()
    command = next(line for line in said if "next:" in line).split("next:")[1].split("   (")[0].strip()
    done = subprocess.run(["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["python", "apply_patch.py", "--repo", str(root), "--reverse"]


def test_check_and_reverse_together_predict_the_reverse(apply, tree):
    apply(tree)
    with world.unchanged(tree):
        outcome = apply(tree, "--check", "--reverse")
        assert outcome.code == 0
        assert all(said in outcome.out for said in ("would change", "removed", "--reverse"))
    world.write_tree(tree, {ACTOR: "mine\n"})
    assert apply(tree, "--check", "--reverse").code == 1


@pytest.mark.parametrize("right", [True, False])
def test_the_built_patch_can_be_pinned_to_what_the_user_was_told(apply, patches, tree, right):
    """patches/ may be changed as a whole, sums and manifest too: only a digest from elsewhere can tell."""
    digest = world.hashlib.sha256((patches / "gradloc.patch").read_bytes()).hexdigest()
    outcome = apply(tree, "--sha256", digest if right else "0" * 64)
    assert outcome.code == (0 if right else 3)
    assert world.files_of(tree) == (RESULT if right else BASE)
    if not right:
        assert f"found:    {digest}" in outcome.err


def test_long_lists_of_files_are_cut_short(capsys, tmp_path):
    names = [f"verl/gradloc/m{number}.py" for number in range(90)]
    patches = world.make_patches(tmp_path / "w", RESULT | dict.fromkeys(names, "ours\n"))
    root = world.write_tree(tmp_path / "t", RESULT | dict.fromkeys(names, "mine\n"))
    for options in ((), ("--status",)):
        said = world.run(capsys, patches, root, *options)
        assert "... and 70 more" in said.out + said.err
    document = world.run(capsys, patches, root, "--json").document
    assert len(document["files"]) == MAX_LISTED


def test_a_run_leaves_no_file_open(apply, clone):
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir()))
    assert apply(clone).code == 0
    with (clone / ".git" / STATE / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert apply(clone, "--reverse").code == 6
    assert len(list(open_files.iterdir())) == before
