# SPDX-License-Identifier: Apache-2.0
"""Every state of a tree, and every odd target: what is done is done whole, what is refused changes nothing."""

import errno
import io
import os
import re
import shlex
import subprocess
import sys

import pytest

from patchkit.apply import OPTIONS, STATES
from patchkit.patch import blob_id, read_regular
from patchkit.refusal import REFUSALS, guarded, say
from tests.conftest import ROOT
from tests.patchkit.world import ACTOR, BASE, OTHER, RESULT, SEAM, TOUCHED, TRAINER, files_of, put, shell, unchanged


def test_on_and_off_again_are_the_same_bytes_and_a_second_time_writes_nothing(apply, tree):
    for options, did, after in (((), "applied", RESULT), (("--reverse",), "taken off", BASE)):
        with unchanged(tree):
            apply(tree, "--check", *options).expect(0, *TOUCHED)
            assert apply(tree, "--check", "--json", *options).expect(0).document["changed"] == sorted(TOUCHED)
        apply(tree, *options).expect(0, f"{did}: 3 files")
        assert files_of(tree) == after
        with unchanged(tree):
            apply(tree, *options).expect(0, "nothing to")
            apply(tree, "--check", *options).expect(0, "nothing to")
            apply(tree, "--status", "--quiet").expect(0, "PRISTINE" if options else "APPLIED")
    assert not (tree / ".gradloc-patch").exists()


KINDS = {
    "worktree": "git -C clone worktree add -q --detach ../tree",
    "submodule": "git init -q o; git -C o -c protocol.file.allow=always submodule add -q ../clone in; ln -s o/in tree",
    "in another repository": "git init -q o; cp -r clone o/in; rm -rf o/in/.git; ln -s o/in tree",  # git apply exits 0
    "named by a link": "ln -s clone tree",
    "spaces": "mv clone \"a clone, with 'quotes'\"; ln -s \"a clone, with 'quotes'\" tree",
    "hostile": "cd clone; git config core.fsmonitor 'touch PWNED'; git config apply.whitespace fix; mv $PWD ../tree",
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_the_tree_is_it_is_patched_and_taken_back_and_git_sees_no_other_file(apply, clone, kind):
    shell(clone.parent, KINDS[kind])
    tree = (clone.parent / "tree").resolve()
    apply(tree if kind in ("spaces", "submodule") else clone.parent / "tree").expect(0)
    assert files_of(tree) | {".git": ""} == RESULT | {".git": ""}
    if kind not in ("in another repository", "hostile"):
        said = shell(tree, "git status --short -uall")
        assert sorted(line[3:] for line in said.splitlines()) == sorted(TOUCHED)
    apply(tree, "--reverse").expect(0)
    assert {path: text for path, text in files_of(tree).items() if path != ".git"} == BASE
    assert not list(tree.rglob("PWNED"))


def test_a_path_that_cannot_be_printed_is_no_failure(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stdout", out)
    assert guarded(lambda: say("verl-\udcff"), []) == 0 and b"udcff" in out.buffer.getvalue()


def test_an_installed_package_is_named_on_purpose(apply, tmp_path, monkeypatch):
    site = put(tmp_path / "site-packages", BASE)
    with unchanged(site):
        apply(site).expect(1, "an environment's package folder", "--installed")
    monkeypatch.setattr("patchkit.apply.installed_root", lambda: site)
    apply("--installed").expect(0, "(package of verl 0.7.0)")
    apply("--installed", "--reverse").expect(0)
    assert files_of(site) == BASE


def test_what_is_no_tree_is_no_target(apply, tmp_path, tree):
    apply(tmp_path / "nowhere").expect(1, "no folder that can be read")
    (tmp_path / "loop").symlink_to("loop")
    apply(tmp_path / "loop").expect(1, "no folder that can be read")
    apply(tree / "verl").expect(1, "NOT_VERL", f"--repo {tree}")
    for wrong in ([""], [tree, "--repo", tree], [tree, "--status", "--check"], []):
        apply(*wrong).expect(2)
    assert apply(tree, "--frobnicate", "--json").document["exit_code"] == 2


EDITED = "sed -i 's/^actor line 9$/mine/' $A"
REFUSED = {
    "edited": (EDITED, "DRIFTED", "hunk 1 does not fit at line 9"),
    "forty lines lower": ("yes '# a new line' | head -40 | cat - $A > x; mv x $A", "hunk 1 does not fit at line 8"),
    "CRLF": ("sed -i 's/$/\\r/' $A", "CRLF line ends", "core.autocrlf"),
    "missing": ("rm $T", "DRIFTED", "the file is missing"),
    "a link": ("mv $A x.py; ln -s $PWD/x.py $A", "DRIFTED", "a symbolic link is in the way", "ls -ld"),
    "a linked folder": ("mv verl/workers x; ln -s ../x verl/workers", "verl/workers is a symbolic link", "ls -ld"),
    "a pipe": ("rm $A; mkfifo $A", "DRIFTED", "a named pipe", "ls -ld"),
    "a folder": ("rm $A; mkdir $A", "DRIFTED", "a folder is in the way", "ls -ld"),
    "no folder for the new file": ("rm -r verl/utils", "may not be written to"),
    "a state folder elsewhere": ("ln -s .. .gradloc-patch", "is not a folder of this tool"),
    "read-only": ("chmod 444 $A", "is read-only", "chmod u+w"),
    "in the way": ("echo mine > $S", "DRIFTED", "another file is where the patch adds one"),
    "the released patch": ("echo released > $A", "the publicly released GradLoc patch is on this tree", "apply -R"),
    "another verl": ("echo 0.6.1 > $V; echo x > $A", "WRONG_BASE: this is verl 0.6.1", "Use verl 0.7.0"),
    "verl 0.9": ("echo 0.9.1 > $V; rm $T", "WRONG_BASE: this is verl 0.9.1", "+gradloc=on"),
    "GradLoc 0.3": (
        "mkdir verl/gradloc; echo x > $A",
        "GradLoc 0.1, 0.2 or 0.3",
        "--reverse   (in a clone of that version)",
    ),
    "half by --reject": ("sed -i '51s/.*/mine/;7d' $T; echo > $T.rej", "`git apply --reject` left it half done"),
    "half patched": ("sed -i '10ahook()' $A", "PARTIAL", "2 of 3 files are not", f"not patched: {TRAINER}"),
}


@pytest.mark.parametrize("spoil", REFUSED)
def test_what_is_refused_is_left_as_it_is(apply, tree, spoil, monkeypatch):
    monkeypatch.setattr("patchkit.apply.PUBLISHED_ACTOR", blob_id(b"released\n"))
    command, *said = REFUSED[spoil]
    shell(tree, command)
    with unchanged(tree.parent / tree.name):
        apply(tree, "--check").expect(1, *said)
        apply(tree).expect(1, *said)
        if spoil not in ("read-only", "no folder for the new file", "a state folder elsewhere"):  # nothing to do
            apply(tree, "--reverse").expect(1, *said)
        if spoil != "half patched":
            apply(tree, "--force").expect(1, *said)
    if ":" in said[0]:
        assert said[0].split(":")[0] in {state.name for state in STATES}


def test_a_file_that_may_not_be_read_is_so_named(apply, tree, monkeypatch):
    def denied(path, *arguments):
        if path.name == "dp_actor.py":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_regular(path, *arguments)

    monkeypatch.setattr("patchkit.tree.read_regular", denied)
    assert apply(tree, "--json").document["error"]["reason"] == "state-blocked"


def test_a_status_says_it_in_one_word_and_in_json(apply, tree):
    shell(tree, EDITED)
    assert apply(tree, "--status", "--quiet").out == "DRIFTED\n"
    found = apply(tree, "--status", "--json").document
    assert (found["state"], found["exit_code"], [one["path"] for one in found["files"]]) == ("DRIFTED", 1, [ACTOR])
    refused = apply(tree, "--json").document
    assert refused["error"]["what"] and [one["path"] for one in refused["files"]] == [ACTOR]


def type_next(refusal):
    """Does what a refusal says is next."""
    shell("/", re.search(r"next: +(.*?)(   .*)?\n", refusal)[1])


def test_your_own_edits_in_a_patched_file_are_kept_and_the_way_to_keep_them_works(apply, clone):
    apply(clone).expect(0)
    mine = RESULT[ACTOR].replace("actor line 30\n", "mine\n")
    put(clone, {ACTOR: mine, SEAM: "mine\n"})
    for options in ((), ("--reverse",), ("--force",)):
        with unchanged(clone / "verl"):
            said = apply(clone, *options).expect(1, "edited after it was applied", "stash push").err
    type_next(said)
    apply(clone).expect(1, "PARTIAL")
    apply(clone, "--force").expect(0)
    assert files_of(clone) == RESULT
    (clone / SEAM).unlink()
    shell(clone, "git add -- $A; git stash pop")
    assert files_of(clone) == RESULT | {ACTOR: mine, SEAM: "mine\n"}


@pytest.mark.parametrize("is_committed", [True, False])
def test_edits_of_a_fork_and_the_patch_are_merged_by_the_command_that_is_named(apply, clone, is_committed):
    (clone / ACTOR).write_text(BASE[ACTOR].replace("line 30\n", "mine\n"))
    if is_committed:
        shell(clone, "git commit -qam mine")
    type_next(apply(clone).expect(1, "DRIFTED").err)
    assert files_of(clone) == RESULT | {ACTOR: RESULT[ACTOR].replace("line 30\n", "mine\n")}
    shell(clone, f"rm $T; {EDITED}")
    assert "3way" not in apply(clone).expect(1, "DRIFTED: 2 of the files").err


@pytest.mark.parametrize("reverse, result", [((), RESULT), (("--reverse",), BASE)], ids=["finish", "undo"])
def test_force_ends_a_half_patched_tree_and_other_edits_are_no_matter(apply, clone, reverse, result):
    put(clone, {ACTOR: RESULT[ACTOR], OTHER: "mine\n"})
    apply(clone, "--force", *reverse).expect(0)
    assert files_of(clone) == result | {OTHER: "mine\n"}
    apply(clone, "--reverse").expect(0)
    shell(clone, "mkdir .git/rebase-merge")
    with unchanged(clone):
        apply(clone).expect(1, "git is at work here (rebase-merge)")
    apply(clone, "--force").expect(0)


def test_put_on_by_git_or_by_patch_it_is_known(apply, repo, clone, tree):
    patch = str(repo / "patches" / "gradloc.patch")
    shell(clone, f"git apply --check {patch}; git apply {patch}")
    shell(tree, f"patch -p1 -s -i {patch}")
    for patched in (clone, tree):
        apply(patched, "--status").expect(0, "APPLIED")
        apply(patched, "--reverse").expect(0)
        assert files_of(patched) == BASE


def test_modes_and_labels_are_kept_and_a_hard_link_elsewhere_keeps_its_bytes(apply, tree, tmp_path):
    (tree / ACTOR).chmod(0o640)
    os.link(tree / ACTOR, tmp_path / "cached")
    apply(tree).expect(0)
    assert (tree / ACTOR).stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "cached").read_text() == BASE[ACTOR]


BROKEN = {
    "a byte": lambda text: text.replace(b"hook()", b"hack()"),
    "CRLF": lambda text: text.replace(b"\n", b"\r\n"),
    "cut off": lambda text: text[:-20],
    "nothing": lambda text: b"",
}
NO_MANIFEST = ["", "{", "[1]", '{"patches": 1}', '{"version": "1.0", "patches": [{}]}', "[" * 10**4, " " * 2**17]
NO_MANIFEST += ['{"version": "1.0", "patches": []}', "\udcff"]


@pytest.mark.parametrize("spoil", [*BROKEN, *range(len(NO_MANIFEST))])
def test_patches_that_are_not_the_manifests_are_not_used(apply, repo, tree, spoil):
    place = repo / "patches" / ("gradloc.patch" if spoil in BROKEN else "manifest.json")
    is_ours = spoil in BROKEN
    text = BROKEN[spoil](place.read_bytes()) if is_ours else NO_MANIFEST[spoil].encode(errors="surrogateescape")
    place.write_bytes(text)
    with unchanged(tree):
        apply(tree).expect(3, "manifest", "git checkout -- patches/")


@pytest.mark.parametrize("command", [["-I", "-S", "a clone/apply_patch.py"], ["-m", "patchkit.apply"]], ids=str)
def test_however_it_is_started_it_works_and_names_itself_whole(tmp_path, tree, command):
    (tmp_path / "a clone").symlink_to(ROOT)
    started = [sys.executable, *command, "--repo", str(tree)]
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    done = subprocess.run([*started, "--status"], **options)
    assert done.returncode == 1 and "DRIFTED" in done.stdout
    next_ = re.search("next: +(.*)", subprocess.run([*started, "--nonsense"], **options).stderr)[1]
    assert ((ROOT if command[0] == "-m" else tmp_path) / shlex.split(next_)[1]).is_file()


def test_the_page_has_every_state_every_exit_code_and_every_option():
    page = (ROOT / "docs/applier.md").read_text()
    assert {state.name for state in STATES} | {"NOT_VERL"} == set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE))
    assert {row[0] for row in REFUSALS.values()} | {"0"} == set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE))
    table = page.partition("## Options")[2].partition("## States")[0]
    assert set(re.findall(r"`(--[a-z0-9-]+)", table)) == {name for name in OPTIONS if name[0] == "-"} - {"--patches"}


def test_every_refusal_of_the_table_is_raised_somewhere_and_no_other():
    code = "".join(path.read_text() for path in (ROOT / "patchkit").glob("*.py"))
    assert {name for name in REFUSALS if f'"{name}"' not in code} == set()
    assert set(re.findall(r'Refusal\("([a-z-]+)"', code)) <= REFUSALS.keys() >= {row[1] for row in STATES} - {""}
