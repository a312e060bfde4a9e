# SPDX-License-Identifier: Apache-2.0
"""The disk fails, or the process dies, at every single operation on the disk.

A run that can still speak leaves all-before or all-after. A run that died leaves each file whole,
as before or as after, and the next run finishes or undoes the rest.
"""

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patchkit.apply.applier import Applier
from patchkit.apply.library import Library
from patchkit.errors import PatchkitError
from patchkit.tree.checkout import resolve
from patchkit.tree.disk import Filesystem
from tests.patchkit import world
from tests.patchkit.world import BASE, OLDER, RESULT

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[3]

COMMANDS = {
    "apply": (BASE, "apply", RESULT),
    "reverse": (RESULT, "reverse", BASE),
    "upgrade": (OLDER, "apply", RESULT),
    "downgrade": (OLDER, "reverse", BASE),
}


class Killed(BaseException):
    """The process ended here: nothing after this reaches the disk."""


class FaultyDisk(Filesystem):
    """Counts operations; number ``at`` (and, if ``lasting``, all later ones) fails."""

    def __init__(self, at: int, fault: type[BaseException] = OSError, lasting: bool = False):
        self.at, self.fault, self.lasting, self.count = at, fault, lasting, 0

    def do(self, call, *arguments):
        self.count += 1
        if self.count == self.at or (self.lasting and self.count > self.at):
            if call is os.write:  # half of it reaches the disk
                os.write(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            if call is os.close:
                os.close(arguments[0])
            if self.fault is OSError:
                raise OSError(errno.ENOSPC, "No space left on device", str(arguments[0]))
            raise self.fault
        return super().do(call, *arguments)


def run(root: Path, patches: Path, method: str, disk: Filesystem | None = None) -> int:
    """Runs a command on the library's level; returns the exit code that it would have."""
    try:
        getattr(Applier(resolve(str(root)), Library(patches), files=disk), method)()
    except PatchkitError as error:
        return error.exit_code
    except OSError:  # before anything began; the command line says so with exit code 4
        return 4
    return 0


def each_operation(
    start: Callable[[Path], Path], folder: Path, patches: Path, method: str, **options
) -> Iterator[tuple]:
    """Yields (root, exit code) of a command whose operation 1, 2, 3 ... fails, on a root from ``start``; None: died."""
    at, disk = 0, FaultyDisk(0)
    while disk.count >= at:
        at += 1
        root, disk = start(folder / str(at)), FaultyDisk(at, **options)
        try:
            code = run(root, patches, method, disk)
        except (Killed, KeyboardInterrupt):
            code = None
        yield root, code


def written(files: dict[str, str]) -> Callable[[Path], Path]:
    return lambda root: world.write_tree(root, files)


def no_traces(root: Path) -> bool:
    return not [path for path in root.rglob("*") if path.name.endswith(".tmp")]


def test_every_call_that_changes_a_disk_is_one_that_the_tests_make_fail():
    """In the rooms that write to a checkout each such call goes through ``Filesystem.do``."""
    writing = r"os\.(mkdir|rmdir|unlink|remove|replace|rename|write|fchmod|fchown|fsync|link|symlink)\("
    for path in (*ROOT.glob("patchkit/tree/*.py"), *ROOT.glob("patchkit/apply/*.py")):
        assert not re.search(writing, path.read_text()), path
        assert not re.search(r"\.(write_text|write_bytes|mkdir|unlink|rename|touch|rmdir)\(", path.read_text()), path


@pytest.mark.parametrize("command", COMMANDS)
def test_one_failed_operation_is_rolled_back_or_does_no_harm(patches, tmp_path, command):
    before, method, after = COMMANDS[command]
    codes = []
    for root, code in each_operation(written(before), tmp_path, patches, method):
        codes.append(code)
        assert code in (0, 4)
        assert world.files_of(root) == (after if code == 0 else before)
        assert no_traces(root)
        assert run(root, patches, method) == 0
        assert world.files_of(root) == after
    assert codes.count(4) > 40 and codes[-1] == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_disk_that_stays_broken_is_reported_and_repaired_by_the_next_run(patches, tmp_path, command):
    before, method, after = COMMANDS[command]
    codes = set()
    for root, code in each_operation(written(before), tmp_path, patches, method, lasting=True):
        codes.add(code)
        assert code in (0, 4, 5)
        if code != 5:
            assert world.files_of(root) in (before, after)
        assert_each_file_is_whole(root, before, after)
        assert run(root, patches, method) == 0
        assert world.files_of(root) == after
        assert no_traces(root)
    assert {4, 5} <= codes


@pytest.mark.parametrize("next_method", ["apply", "reverse"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_died_is_finished_or_undone_by_the_next(patches, tmp_path, command, next_method):
    before, method, after = COMMANDS[command]
    for root, _ in each_operation(written(before), tmp_path, patches, method, fault=Killed, lasting=True):
        assert_each_file_is_whole(root, before, after)
        untouched = world.picture(root)
        assert run(root, patches, "status") == run(root, patches, "check") == 0
        assert world.picture(root) == untouched
        assert run(root, patches, next_method) == 0
        assert world.files_of(root) == (RESULT if next_method == "apply" else BASE)
        assert no_traces(root)


def test_an_upgrade_from_a_build_that_only_its_copy_knows_survives_any_death(patches, tmp_path):
    trial = BASE | {
        world.ACTOR: BASE[world.ACTOR] + "trial()\n",
        "verl/gradloc/t.py": "t = 1\n",
        world.INIT: RESULT[world.INIT],
    }
    made = world.make_patches(tmp_path / "trial", trial)

    def start(root: Path) -> Path:
        assert run(world.write_tree(root, BASE), made, "apply") == 0
        return root

    died = 0
    for root, code in each_operation(start, tmp_path, patches, "apply", fault=Killed, lasting=True):
        died += code is None
        assert run(root, patches, "apply") == 0
        assert world.files_of(root) == RESULT
    assert died > 60


@pytest.mark.parametrize("fault", [OSError, Killed])
def test_a_recovery_that_dies_or_fails_is_recovered_from(patches, tmp_path, fault):
    counter = FaultyDisk(10**9)
    run(world.write_tree(tmp_path / "count", BASE), patches, "apply", counter)

    def died_at(first: int) -> Callable[[Path], Path]:
        def start(root: Path) -> Path:
            with pytest.raises(Killed):
                run(world.write_tree(root, BASE), patches, "apply", FaultyDisk(first, Killed, lasting=True))
            return root

        return start

    tries = 0
    for first in range(counter.count // 2, counter.count - 8, 5):
        folder = tmp_path / str(first)
        for root, code in each_operation(died_at(first), folder, patches, "reverse", fault=fault, lasting=True):
            assert code in (0, 4, 5, None)
            assert_each_file_is_whole(root, BASE, RESULT)
            assert run(root, patches, "apply") == 0
            assert world.files_of(root) == RESULT and no_traces(root)
            tries += 1
    assert tries > 100


def assert_each_file_is_whole(root: Path, before: dict, after: dict) -> None:
    files = {path: text for path, text in world.files_of(root).items() if ".tmp" not in path}
    for path, text in files.items():
        assert text in (before.get(path), after.get(path)), path
    for path in before.keys() & after.keys():
        assert path in files, path


def test_an_edit_made_during_the_run_is_kept_and_the_rest_put_back(patches, tree):
    class Early(Filesystem):
        edited = False

        def do(self, call, *arguments):
            if call is os.replace and arguments[1].name != "journal.json" and not self.edited:
                self.edited = True
                (tree / world.ACTOR).write_text("my edit\n")
            return super().do(call, *arguments)

    code = run(tree, patches, "apply", Early())
    assert code == 1
    assert world.files_of(tree) == BASE | {world.ACTOR: "my edit\n"}


def test_an_edit_made_after_a_crash_is_never_overwritten(capsys, patches, tree):
    for at in range(1, 200):
        with pytest.raises(Killed):
            run(tree, patches, "apply", FaultyDisk(at, Killed, lasting=True))
        if world.files_of(tree).get(world.DEEP) == RESULT[world.DEEP]:
            break
        run(tree, patches, "reverse")
    (tree / world.TRAINER).write_text("my edit\n")
    before = world.files_of(tree)
    for options in ((), ("--reverse",), ("--force",)):
        outcome = world.run(capsys, patches, tree, *options).expect(1, "was edited after a run was interrupted")
        assert world.TRAINER in outcome.err
    assert world.files_of(tree) == before


def test_a_journal_that_names_a_path_outside_the_tree_is_refused(capsys, patches, tree):
    state = tree / ".gradloc-patch"
    state.mkdir()
    entry = {"where": "tree", "path": "verl/../../escape", "before": None, "after": None}
    entry["temporary"] = ".gradloc.1.0.tmp"
    deep = world.json.loads("[" * 900 + "]" * 900)
    for entries in ([entry], [entry | {"path": "verl/x", "temporary": "../x"}], [{}], 7, deep):
        document = {"schema_version": 1, "committing": True, "entries": entries, "folders": []}
        (state / "journal.json").write_text(world.json.dumps(document))
        world.run(capsys, patches, tree).expect(5, "journal.json")
    assert world.files_of(tree) == BASE


def test_an_interrupt_from_the_keyboard_puts_everything_back(patches, tmp_path):
    for root, _ in each_operation(written(BASE), tmp_path, patches, "apply", fault=KeyboardInterrupt):
        assert world.files_of(root) in (BASE, RESULT) and no_traces(root)


@pytest.mark.parametrize("command", COMMANDS)
def test_everything_is_durable_before_the_journal_says_so(patches, tmp_path, command):
    """Power may fail too: each file is synced before it counts, each folder before it is over."""
    before, method, _ = COMMANDS[command]
    root = world.write_tree(tmp_path / "t", before)
    names, unsynced, log = {}, set(), []

    class Watched(Filesystem):
        def do(self, call, *arguments):
            place = arguments[0]
            if call is os.fsync and place in names:
                unsynced.discard(names[place])
            elif call is os.replace:
                assert not unsynced, "something is moved in before everything written is durable"
                log.append(("replace", arguments[1]))
            elif call is os.unlink:
                log.append(("remove", place))
            result = super().do(call, *arguments)
            if call is os.open and place.name != "lock":
                names[result] = place
                unsynced.add(place)
            return result

        def sync_folder(self, path):
            log.append(("folder", path))
            names.clear()
            super().sync_folder(path)

    assert run(root, patches, method, Watched()) == 0
    state = root / ".gradloc-patch"
    journal = state / "journal.json"
    begun = [at for at, entry in enumerate(log) if entry == ("replace", journal)]
    over = log.index(("remove", journal))
    moved = [at for at, (_, path) in enumerate(log) if state not in path.parents and path != state]
    assert len(begun) == 2 and log[begun[1] + 1] == ("folder", state)
    assert begun[1] < min(moved) and max(moved) < over
    last = {}
    for at, (kind, path) in enumerate(log[:over]):
        if kind in ("replace", "remove") and path.parent.is_dir():
            last[path.parent] = at
    for folder, at in last.items():
        assert ("folder", folder) in log[at:over], f"{folder} is not synced"


def test_a_full_disk_is_predicted_before_anything_is_written(capsys, patches, tree, monkeypatch):
    real = os.statvfs(tree)
    full = os.statvfs_result((*real[:4], 10, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda folder: full)
    with world.unchanged(tree):
        for options in ((), ("--check",)):
            world.run(capsys, patches, tree, *options).expect(4, "not enough room")
