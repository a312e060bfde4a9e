# SPDX-License-Identifier: Apache-2.0
"""All files or none, whatever call fails, whenever the run is killed, and however many run at once."""

import errno
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from patchkit.apply import Applier, load
from patchkit.refusal import Refusal
from patchkit.tree import resolve
from patchkit.write import JOURNAL, Filesystem, locked
from tests.conftest import ROOT
from tests.patchkit.world import ACTOR, BASE, RESULT, SEAM, TOUCHED, TRAINER, files_of, unchanged, write_tree


class Failing(Filesystem):
    """Fails at call number ``at``, and if asked at every one that follows."""

    def __init__(self, at: int, for_good: bool = False):
        self.at, self.for_good, self.count = at, for_good, 0

    def do(self, call, *arguments):
        self.count += 1
        if self.count == self.at or (self.for_good and self.count > self.at):
            raise OSError(errno.ENOSPC, "No space left on device", "somewhere")
        return call(*arguments)


def run(repo, tree, files, reverse=False):
    applier = Applier(resolve(str(tree)), load(repo / "patches"))
    applier.files = files
    return applier.run(reverse)


@pytest.mark.parametrize("reverse", [False, True], ids=["apply", "reverse"])
def test_whichever_call_fails_the_tree_is_as_before_or_as_after(apply, repo, tree, reverse):
    (tree / "verl/__init__.py").chmod(0o604)
    before, after = (RESULT, BASE) if reverse else (BASE, RESULT)
    if reverse:
        apply(tree).expect(0)
    counted = Failing(-1)
    for at in range(1, 200):
        files = Failing(at)
        try:
            run(repo, tree, files, reverse)
        except (Refusal, OSError):
            assert files_of(tree) == before, at
            assert not reverse or (tree / SEAM).stat().st_mode & 0o777 == 0o604, at
            assert not list(tree.rglob("*.tmp")), at
        else:
            assert files_of(tree) == after, at
            apply(tree, *() if reverse else ("--reverse",)).expect(0)
            if files.count < at:
                counted = files
                break
    assert counted.count > 30


def test_a_disk_that_stays_dead_leaves_a_journal_that_the_next_run_follows(apply, repo, tree):
    codes = set()
    for at in range(1, 60):
        try:
            run(repo, tree, Failing(at, for_good=True))
        except Refusal as refusal:
            codes.add(refusal.code)
        except OSError:
            pass
        if (tree / ".gradloc-patch" / JOURNAL).exists():
            apply(tree, "--status", "--json")
            apply(tree, "--reverse").expect(0)
        elif files_of(tree) != BASE:
            apply(tree, "--reverse").expect(0)
        left = {path: text for path, text in files_of(tree).items() if not path.endswith(".tmp")}
        assert left == BASE, at
    assert 5 in codes
    apply(tree).expect(0)
    apply(tree, "--reverse").expect(0)
    assert files_of(tree) == BASE


KILLED = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from patchkit import apply, write
do, count = write.Filesystem.do, 0
def counted(self, call, *arguments):
    global count
    count += 1
    if count == int(sys.argv[4]):
        os.kill(os.getpid(), 9)
    return do(self, call, *arguments)
write.Filesystem.do = counted
os.fsync = lambda handle: None
sys.exit(apply.main(["--patches", sys.argv[2], sys.argv[3]]))
"""


def test_killed_at_any_call_every_file_is_whole_and_the_next_run_finishes(apply, repo, tree):
    for at in range(2, 60, 3):
        command = [sys.executable, "-c", KILLED, str(ROOT), str(repo / "patches"), str(tree), str(at)]
        done = subprocess.run(command, capture_output=True)
        found = files_of(tree)
        assert all(found[path] in (BASE[path], RESULT[path]) for path in BASE), at
        apply(tree).expect(0)
        assert files_of(tree) == RESULT, at
        apply(tree, "--reverse").expect(0)
        assert files_of(tree) == BASE
        if done.returncode != -signal.SIGKILL:
            return
    raise AssertionError("never ran through")


def interrupted(tree):
    """A tree whose run was killed between two files."""
    state = tree / ".gradloc-patch"
    entries = []
    for path in (ACTOR, TRAINER):
        sides = {"before": BASE[path], "after": RESULT[path]}
        digests = {side: hashlib.sha256(text.encode()).hexdigest() for side, text in sides.items()}
        entries.append({"path": path} | digests)
        write_tree(state, {f"before-{path.replace('/', '-')}": BASE[path]})
    write_tree(state, {JOURNAL: json.dumps(entries)})
    write_tree(tree, {ACTOR: RESULT[ACTOR]})
    return state


def test_what_an_interrupted_run_changed_is_put_back_first(apply, tree):
    assert apply(tree, "--status", "--json").document["notes"] == []
    interrupted(tree)
    with unchanged(tree):
        predicted = apply(tree, "--check", "--json").expect(0).document
        assert predicted["changed"] == sorted(TOUCHED) and len(predicted["notes"]) == 1
        apply(tree, "--check", "--reverse").expect(0, "nothing to take off")
    assert len(apply(tree, "--status", "--json").expect(1, "").document["notes"]) == 1
    apply(tree, "--reverse").expect(0, "put back what an interrupted run had changed")
    assert files_of(tree) == BASE


def test_a_file_edited_since_is_not_overwritten(apply, tree):
    interrupted(tree)
    (tree / ACTOR).write_text("mine\n")
    apply(tree).expect(1, "was edited after a run was interrupted")
    assert (tree / ACTOR).read_text() == "mine\n"


OUTSIDE = '[{"path": "../../etc/passwd", "before": null, "after": null}]'


@pytest.mark.parametrize(
    "journal", ["{", "[1]", "[]x", OUTSIDE, OUTSIDE.replace("../../etc", "verl").replace("null", "1")]
)
def test_a_journal_that_is_not_ours_moves_nothing(apply, tree, journal):
    write_tree(tree / ".gradloc-patch", {JOURNAL: journal})
    apply(tree).expect(5, "cannot be used")
    assert files_of(tree) == BASE


def test_what_was_kept_of_a_file_and_damaged_is_not_put_back(apply, tree):
    state = interrupted(tree)
    write_tree(state, {f"before-{ACTOR.replace('/', '-')}": "damaged\n"})
    apply(tree).expect(5, "cannot be used")
    assert (tree / ACTOR).read_text() == RESULT[ACTOR]


@pytest.mark.parametrize(("room", "code"), [(2**20, 4), (2**21, 0)])
def test_a_disk_needs_room_for_the_files_and_a_mebibyte(apply, tree, monkeypatch, room, code):
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=room, f_frsize=1))
    apply(tree).expect(code)


def test_what_changes_while_it_runs_is_not_overwritten(repo, tree, monkeypatch):
    class Meddling(Filesystem):
        def do(self, call, *arguments):
            if call is os.replace and str(arguments[1]).endswith("dp_actor.py"):
                (tree / TRAINER).write_text("mine\n")
            return call(*arguments)

    with pytest.raises(Refusal, match="changed-meanwhile"):
        run(repo, tree, Meddling())
    assert files_of(tree)[TRAINER] == "mine\n" and files_of(tree)[ACTOR] in (BASE[ACTOR], RESULT[ACTOR])


def test_two_at_once_one_works_and_the_other_says_so_or_waits(repo, tree):
    command = [sys.executable, str(ROOT / "apply_patch.py"), "--patches", str(repo / "patches"), str(tree)]
    for options in ([], ["--wait", "20"]):
        running = [subprocess.Popen([*command, *options], stdout=-1, stderr=-1, text=True) for _ in range(4)]
        answers = [(process.communicate(), process.returncode) for process in running]
        codes = [code for _, code in answers]
        assert set(codes) <= ({0, 6} if not options else {0}) and 0 in codes, answers
        assert files_of(tree) == RESULT
        subprocess.run([*command, "--reverse"], check=True, capture_output=True)
        assert files_of(tree) == BASE


def test_a_lock_says_who_holds_it_and_goes_with_its_holder(apply, tree):
    holder = "import fcntl, os, sys, time; h = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); fcntl.flock(h, 2)\n"
    holder += "os.write(h, b'process 7'); print('locked', flush=True); time.sleep(60)"
    (tree / ".gradloc-patch").mkdir()
    process = subprocess.Popen([sys.executable, "-c", holder, str(tree / ".gradloc-patch/lock")], stdout=-1)
    process.stdout.readline()
    began = time.monotonic()
    apply(tree).expect(6, "another run is at work", "process 7")
    assert time.monotonic() - began < 5
    process.kill()
    process.wait()
    (tree / ".gradloc-patch/lock").write_text("process 7 " * 40)
    with locked(Filesystem(), tree / ".gradloc-patch"):
        assert (tree / ".gradloc-patch/lock").read_text().count("process") == 1, "nothing of an older holder"
    apply(tree).expect(0)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS], ids=errno.errorcode.get)
def test_where_nothing_may_be_written_nothing_to_do_is_done(apply, tree, monkeypatch, code):
    do = Filesystem.do

    def denied(self, call, *arguments):
        if call in (os.mkdir, os.open):
            raise OSError(code, os.strerror(code), str(arguments[0]))
        return do(self, call, *arguments)

    apply(tree).expect(0)
    monkeypatch.setattr(Filesystem, "do", denied)
    with unchanged(tree):
        apply(tree).expect(0, "nothing to apply")
        assert apply(tree, "--reverse", "--json").document["error"]["reason"] == "blocked-permission"
    interrupted(tree)
    apply(tree).expect(1)


def test_a_file_system_without_attributes_or_synced_folders_will_do(apply, tree, monkeypatch):
    def unsupported(*arguments):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    def synced(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "listxattr", unsupported, raising=False)
    monkeypatch.setattr(os, "fsync", synced)
    apply(tree).expect(0)
    assert files_of(tree) == RESULT


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_named(apply, tree, monkeypatch, code):
    def flock(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    with unchanged(tree):
        assert apply(tree, "--json").document["error"]["reason"] == "no-locks"
