# SPDX-License-Identifier: Apache-2.0
"""The text of refusals: complete, in one place, and without a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from patchkit.apply import cli
from patchkit.errors import IntegrityError
from tests.patchkit import world
from tests.patchkit.world import ACTOR, BASE

ROOT = Path(__file__).resolve().parents[3]


def test_the_whole_of_a_refusal_reads_like_this(apply, tree):
    world.write_tree(tree, {ACTOR: BASE[ACTOR].replace("actor line 9\n", "mine()\n")})
    assert apply("--repo", tree).err == (
        "refused: DRIFTED: 1 of the files that the patch touches hold neither verl's content nor "
        f"the patch's, first {ACTOR}\n"
        f"  expected: git blob {world.blob_id(BASE[ACTOR].encode())[:12]}\n"
        f"  found:    git blob {world.blob_id((tree / ACTOR).read_bytes())[:12]}\n"
        "  cause:    hunk 1 does not fit at line 9: the patch expects 'actor line 9', there is "
        "'mine()'.\n"
        f"  next:     mv {tree}/{ACTOR} ELSEWHERE   (and take the file from verl 0.7.0 again)\n"
        f"  {ACTOR}: hunk 1 does not fit at line 9: the patch expects 'actor line 9', there is "
        "'mine()'\n"
    )


def test_json_carries_the_same_parts(apply, tree):
    world.write_tree(tree, {ACTOR: "mine\n"})
    document = apply("--repo", tree, "--json").document
    assert document["exit_code"] == 1 and document["state"] == "DRIFTED"
    assert set(document["error"]) == {"reason", "what", "expected", "found", "cause", "next"}
    assert [file["path"] for file in document["files"]] == [ACTOR]


def test_json_of_a_success_says_what_was_done(apply, tree):
    document = apply("--repo", tree, "--json").document
    assert document["exit_code"] == 0 and document["state"] == "APPLIED"
    assert ACTOR in document["changed"] and document["command"] == "apply"


def test_quiet_prints_errors_only(apply, tree):
    assert apply("--repo", tree, "--quiet").out == ""
    world.write_tree(tree, {ACTOR: "mine\n"})
    outcome = apply("--repo", tree, "--quiet")
    assert outcome.out == "" and outcome.err.startswith("refused: ")


def test_list_names_every_edition_with_its_files(apply):
    apply("--list").expect(0, "0.0.9 for verl v0.7.0", ACTOR)
    editions = apply("--list", "--json").document["editions"]
    assert [edition["version"] for edition in editions][1] == "0.0.9"


def test_wrong_usage_is_exit_2(capsys):
    for arguments in (["--nonsense"], ["--check", "--status"], ["--rep", "x"], ["--wait", "soon"]):
        assert cli.main(arguments) == 2
        assert "next:     apply_patch.py --help" in capsys.readouterr().err
        assert cli.main([*arguments, "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["error"]["reason"] == "usage"


def test_help_has_an_example_and_the_exit_codes(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert "python apply_patch.py --repo" in text and "Exit codes: 0 done" in text


def test_the_way_out_fits_the_kind_of_target(apply, tree, clone):
    for root, said in ((clone, f"git -C {clone} worktree add DIR "), (tree, f"mv {tree}/{ACTOR} ELSEWHERE")):
        world.write_tree(root, {ACTOR: "mine\n"})
        assert f"  next:     {said}" in apply(root).err


def test_a_reader_that_goes_away_is_no_failure(patches, tree):
    command = f"{sys.executable} apply_patch.py --patches {patches} {tree} | true; "
    done = subprocess.run(["bash", "-c", command + 'exit "${PIPESTATUS[0]}"'], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert world.files_of(tree) == world.RESULT


def test_a_target_whose_name_cannot_be_printed_works(patches, tmp_path):
    root = world.write_tree(tmp_path / "v\udcff", BASE)
    command = [sys.executable, "apply_patch.py", "--patches", patches, root]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_debug_shows_the_error_itself(patches, tree):
    with pytest.raises(IntegrityError):
        cli.main(["--patches", str(patches / "nowhere"), "--debug", "--repo", str(tree)])


def test_the_tool_runs_with_nothing_but_the_standard_library(tmp_path):
    """No package, no user site, no environment; and it imports neither torch nor requests."""
    script = (
        "import runpy, sys; sys.argv = ['apply_patch.py', '--list', '--quiet']\n"
        f"try: runpy.run_path({str(ROOT / 'apply_patch.py')!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "ours = {'patchkit', '__main__', '__mp_main__', 'sitecustomize'}\n"
        "print(sorted(loaded - set(sys.stdlib_module_names) - ours))\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
