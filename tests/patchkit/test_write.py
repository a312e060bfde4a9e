# SPDX-License-Identifier: Apache-2.0
"""All files or none, whatever call fails, whenever the run is killed, and however many run at once."""

import errno
import fcntl
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

from patchkit import apply as applier
from patchkit import tree as write
from tests.conftest import ROOT
from tests.patchkit.world import ACTOR, BASE, RESULT, SEAM, TOUCHED, TRAINER, files_of, put, unchanged


def do_until(at, action, for_good=False):
    """What ``write.do`` becomes: at call number ``at``, and if asked at every later one, ``action`` comes first."""
    count = iter(range(1, 10**6))

    def do(call, *arguments):
        number = next(count)
        if number == at or (for_good and number > at):
            action()
        return call(*arguments)

    return do


def no_space():
    raise OSError(errno.ENOSPC, "No space left on device", "somewhere")


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("reverse", [(), ("--reverse",)], ids=["apply", "reverse"])
def test_whichever_call_fails_the_tree_is_as_before_or_as_after(apply, tree, monkeypatch, reverse, for_good):
    (tree / "verl/__init__.py").chmod(0o604)
    before, after = (RESULT, BASE) if reverse else (BASE, RESULT)
    back, codes = () if reverse else ("--reverse",), set()
    apply(tree, *() if reverse else ("--status",)).expect(0)
    for at in range(1, 200):
        with monkeypatch.context() as failing:
            failing.setattr(write, "do", do_until(at, no_space, for_good))
            codes.add(code := apply(tree, *reverse).code)
        if code == 5:
            assert "interrupted" in apply(tree, "--status", "--json").document["notes"][0]
            apply(tree, *back).expect(0, "put back what an interrupted run had changed")
        assert files_of(tree) == (after if code == 0 else before), at
        assert not reverse or code == 0 or (tree / SEAM).stat().st_mode & 0o777 == 0o604, at
        if code == 0:
            apply(tree, *back).expect(0)
            if at > 50:
                break
    assert codes == ({0, 4, 5} if for_good else {0, 4})


@pytest.mark.parametrize(
    "reverse", [(), pytest.param(("--reverse",), marks=pytest.mark.slow)], ids=["apply", "reverse"]
)
def test_killed_at_any_call_every_file_is_whole_and_the_next_run_finishes(apply, tree, repo, reverse):
    before, after = (RESULT, BASE) if reverse else (BASE, RESULT)
    for at in range(1, 200):
        apply(tree, *() if reverse else ("--reverse",)).expect(0)
        if (child := os.fork()) == 0:
            write.do = do_until(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            os._exit(applier.main(["--quiet", "--patches", str(repo / "patches"), str(tree), *reverse]))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = files_of(tree)
        assert all(found.get(path) in (before.get(path), after.get(path)) for path in TOUCHED), at
        apply(tree, *reverse).expect(0)
        assert files_of(tree) == after, at
        if code == 0:
            break
    assert at > 30


def interrupted(tree):
    """A tree whose run was killed between two files."""
    digests = {p: [hashlib.sha256(side[p].encode()).hexdigest() for side in (BASE, RESULT)] for p in (ACTOR, TRAINER)}
    put(tree / ".gradloc-patch", {"run/journal.json": json.dumps(digests)})
    put(tree / ".gradloc-patch/run/now", {path: BASE[path] for path in (ACTOR, TRAINER)})
    put(tree, {ACTOR: RESULT[ACTOR]})
    return tree / ".gradloc-patch"


def test_what_an_interrupted_run_changed_is_put_back_first(apply, tree):
    assert apply(tree, "--status", "--json").document["notes"] == []
    interrupted(tree)
    with unchanged(tree):
        predicted = apply(tree, "--check", "--json").expect(0).document
        assert predicted["changed"] == sorted(TOUCHED) and len(predicted["notes"]) == 1
        apply(tree, "--check", "--reverse").expect(0, "nothing to take off")
        assert len(apply(tree, "--status", "--json").expect(0).document["notes"]) == 1
    apply(tree, "--reverse").expect(0, "put back what an interrupted run had changed")
    assert files_of(tree) == BASE


def test_a_file_edited_since_is_not_overwritten_and_a_damaged_copy_not_put_back(apply, tree):
    state = interrupted(tree)
    (tree / ACTOR).write_text("mine\n")
    apply(tree).expect(5, "a run was interrupted here and cannot be undone")
    assert (tree / ACTOR).read_text() == "mine\n"
    put(tree, {ACTOR: RESULT[ACTOR]})
    put(state / "run/now", {ACTOR: "damaged\n"})
    apply(tree).expect(5, "cannot be undone")
    assert (tree / ACTOR).read_text() == RESULT[ACTOR]


@pytest.mark.parametrize("journal", ["{", "[1]", "{}x", '{"../../etc/passwd": [null, null]}', '{"verl/a": [1]}'])
def test_a_journal_that_is_not_ours_moves_nothing(apply, tree, journal):
    put(tree / ".gradloc-patch", {"run/journal.json": journal})
    apply(tree).expect(5, "cannot be undone")
    assert files_of(tree) == BASE


@pytest.mark.parametrize(("room", "code"), [(2**20, 4), (2**21, 0)])
def test_a_disk_needs_room_for_the_files_and_a_mebibyte(apply, tree, monkeypatch, room, code):
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=room, f_frsize=1))
    apply(tree).expect(code)


def test_what_changes_while_it_runs_is_not_overwritten(apply, tree, monkeypatch):
    def meddle(call, *arguments):
        if call is os.replace and str(arguments[1]).endswith("ray_trainer.py"):
            (tree / ACTOR).write_text("mine\n")
        return call(*arguments)

    monkeypatch.setattr(write, "do", meddle)
    apply(tree).expect(1, "was changed while this ran")
    assert files_of(tree) == BASE | {ACTOR: "mine\n"}


def test_two_at_once_one_works_and_the_other_says_so_or_waits(repo, tree):
    command = [sys.executable, str(ROOT / "apply_patch.py"), "--patches", str(repo / "patches"), str(tree)]
    for options in ([], ["--wait", "20"]):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        running = [subprocess.Popen([*command, *options], **pipes) for _ in range(4)]
        answers = [(process.communicate(), process.returncode) for process in running]
        codes = {code for _, code in answers}
        assert codes <= ({0, 6} if not options else {0}) and 0 in codes, answers
        assert files_of(tree) == RESULT
        subprocess.run([*command, "--reverse"], check=True, capture_output=True)
        assert files_of(tree) == BASE


def test_a_lock_goes_with_its_holder(apply, tree):
    with write.locked(tree):
        began = time.monotonic()
        apply(tree).expect(6, "another run is at work")
        apply(tree, "--status").expect(0, "PRISTINE")
        assert time.monotonic() - began < 60
    apply(tree).expect(0)


def test_where_nothing_may_be_written_nothing_to_do_is_done(apply, tree, monkeypatch):
    apply(tree).expect(0)
    monkeypatch.setattr(os, "access", lambda *given: False)
    with unchanged(tree):
        apply(tree).expect(0, "nothing to apply")
        apply(tree, "--reverse").expect(1, "may not be written to", "ls -ld")


def test_a_file_system_without_attributes_or_synced_folders_will_do(apply, tree, monkeypatch):
    def unsupported(handle, *given, **more):
        if not isinstance(handle, int) or stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "listxattr", unsupported, raising=False)
    monkeypatch.setattr(os, "fsync", unsupported)
    apply(tree).expect(0)
    assert files_of(tree) == RESULT
    monkeypatch.setattr(fcntl, "flock", unsupported)
    with unchanged(tree):
        apply(tree).expect(1, "has no locks")
