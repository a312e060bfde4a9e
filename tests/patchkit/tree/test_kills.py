# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` at random moments, and two runs at once: real processes, the real disk.

The default suite kills 12 runs on a small tree; the long one 500 on the
real verl: python -m pytest tests/patchkit/tree/test_kills.py -m slow
"""

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchkit.apply.applier import Applier
from patchkit.errors import PatchkitError
from patchkit.tree.disk import Filesystem
from tests.patchkit import world
from tests.patchkit.tree.test_faults import no_traces, run
from tests.patchkit.world import BASE, NEW, RESULT

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[3]


def forked(root: Path, patches: Path, method: str) -> int:
    """Starts a command in a child process; a fork, so that no time goes into starting Python."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            code = run(root, patches, method)
        finally:
            os._exit(code)
    return child


def code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("is_real", "wanted"), [(False, 12), pytest.param(True, 500, marks=pytest.mark.slow)])
def test_kills_leave_every_file_whole_and_the_next_run_ends_it(request, patches, tmp_path, is_real, wanted):
    """Apply and reverse in turns on one tree, on the real verl in the long suite."""
    random.seed(20250101)
    patches = ROOT / "patches" if is_real else patches
    base = request.getfixturevalue("base_tree") if is_real else world.write_tree(tmp_path / "base", BASE)
    root = Path(shutil.copytree(base, tmp_path / "verl"))
    goals, spans_s = {"reverse": files_at(root)}, {}
    for method in ("apply", "reverse"):
        began = time.monotonic()
        assert run(root, patches, method) == 0
        spans_s[method] = time.monotonic() - began
        goals.setdefault(method, files_at(root))
    killed = unfinished = mixed = rounds = 0
    while killed < wanted:
        assert rounds < 20 * wanted, "hardly any kill comes in time"
        method = ("apply", "reverse")[rounds % 2]
        rounds += 1
        child = forked(root, patches, method)
        time.sleep(random.uniform(0, spans_s[method]))
        os.kill(child, signal.SIGKILL)
        killed += code_of(child) == -signal.SIGKILL
        unfinished += (root / ".gradloc-patch/journal.json").exists()
        found = files_at(root)
        mixed += found not in goals.values()
        for path, digest in found.items():
            assert digest in [files.get(path) for files in goals.values()], path
        began = time.monotonic()
        assert run(root, patches, method) == 0
        if unfinished % 20 == 0:  # how busy the machine is changes
            spans_s[method] = time.monotonic() - began
        assert files_at(root) == goals[method] and no_traces(root)
    print(f"{killed} of {rounds} runs killed, {unfinished} with a journal, {mixed} with a mixed tree")
    assert unfinished > wanted // 20 and mixed >= wanted // 100


def files_at(root: Path) -> dict[str, str]:
    """Returns the sha256 of every file below ``verl/`` but those that a run is writing."""
    return {
        path.relative_to(root).as_posix(): world.hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((root / "verl").rglob("*"))
        if path.is_file() and not path.name.endswith(".tmp")
    }


def test_twelve_launchers_that_wait_all_end_well_and_one_of_them_writes(patches, tree):
    command = [sys.executable, "apply_patch.py", "--patches", patches, "--repo", tree, "--wait", "120", "--json"]
    runs = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(12)]
    said = [json.loads(one.communicate()[0]) for one in runs]
    assert [one.returncode for one in runs] == [0] * 12
    did = [one["did"].split(":")[0] for one in said]
    assert sorted(did) == ["already applied, nothing to do"] * 11 + ["applied 0.1.0"]
    assert world.files_of(tree) == RESULT and no_traces(tree)


@pytest.mark.parametrize("second", ["apply", "reverse"])
def test_of_two_runs_at_once_one_wins_and_the_other_says_so(patches, tmp_path, second):
    refused = 0
    for number in range(400):
        if refused and number >= 20:
            break
        root = world.write_tree(tmp_path / str(number), BASE)
        codes = sorted(map(code_of, [forked(root, patches, method) for method in ("apply", second)]))
        assert codes in ([0, 0], [0, 6])
        refused += codes == [0, 6]
        assert world.files_of(root) in ((RESULT,) if second == "apply" else (BASE, RESULT)) and no_traces(root)
    assert refused, "in none of the rounds did the two meet"


def test_the_holder_of_the_lock_is_named_and_who_waits_waits_as_long_as_said(apply, tree):
    (tree / ".gradloc-patch").mkdir()
    with (tree / ".gradloc-patch/lock").open("w") as stream:
        stream.write("process 4242 on box since 2024-01-01 00:00:00\n")
        stream.flush()
        fcntl.flock(stream, fcntl.LOCK_EX)
        for options in ((), ("--reverse",), ("--check",), ("--force",)):
            apply(tree, *options).expect(6, "another run is at work", "found:    process 4242 on box")
        assert "another run is at work" in apply(tree, "--status").out
        began = time.monotonic()
        assert apply(tree, "--wait", "0.3").code == 6 and time.monotonic() - began >= 0.3
    assert world.files_of(tree) == BASE
    assert apply(tree).code == 0, "a lock file that a dead run left is no lock"


@pytest.mark.parametrize("link", ["to a folder", "to nothing", "a file"])
def test_a_state_folder_that_is_none_is_refused(apply, tree, tmp_path, link):
    outside = tmp_path / "outside"
    state = tree / ".gradloc-patch"
    if link == "a file":
        state.write_text("mine\n")
    else:
        if link == "to a folder":
            outside.mkdir()
        state.symlink_to(outside)
    apply(tree).expect(1, ".gradloc-patch is not a folder")
    assert world.files_of(tree) == BASE
    assert not outside.exists() or not any(outside.iterdir())


@pytest.mark.parametrize(
    ("name", "said"), [("rebase-merge", "a rebase"), ("MERGE_HEAD", "a merge"), ("index.lock", "another git command")]
)
def test_an_unfinished_git_operation_is_noted_and_refused_where_files_differ(apply, clone, name, said):
    (clone / ".git" / name).write_text("")
    apply(clone).expect(0, f"{said} is under way")
    apply(clone, "--reverse").expect(1, f"{said} is under way")
    assert world.files_of(clone) == RESULT
    apply(clone, "--reverse", "--force").expect(0, said, "--force skipped")
    assert world.files_of(clone) == BASE


def test_a_limit_on_file_sizes_is_a_disk_that_fails(patches, tmp_path):
    """``ulimit -f``: git is killed by it and leaves three files changed."""
    big = RESULT | {NEW: world.numbered("big", 4000)}
    made = world.make_patches(tmp_path / "w", big)
    root = world.write_tree(tmp_path / "t", BASE)
    # Python ignores SIGXFSZ, so the write fails with EFBIG.
    command = f"ulimit -f 24; exec {sys.executable} apply_patch.py --patches {made} {root}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 4, done.stderr
    assert "the disk failed" in done.stderr and "Traceback" not in done.stderr
    assert world.files_of(root) == BASE and no_traces(root)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, None])
def test_a_tree_or_a_folder_that_may_not_be_written_to_is_refused(apply, tree, monkeypatch, code):
    def fail(self, call, *arguments):
        raise OSError(code, os.strerror(code), str(arguments[0]))

    if code:
        monkeypatch.setattr(Filesystem, "do", fail)
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "actor")
    with world.unchanged(tree):
        apply(tree).expect(1, "may not be written to")


def test_an_error_in_the_tool_itself_is_no_traceback(capsys, patches, tree, monkeypatch):
    def broken(self):
        raise RuntimeError("a bug")

    monkeypatch.setattr(Applier, "apply", broken)
    world.run(capsys, patches, tree).expect(4, "RuntimeError: a bug", "--debug")
    with pytest.raises(PatchkitError):
        world.run(capsys, patches, tree, "--debug")
