# SPDX-License-Identifier: Apache-2.0
"""What a command ends with: 0 judged, 1 what --fail-on names, 2 not judged or not read."""

import json

import pytest

from gradloc import command
from gradloc.report.cli import main
from gradloc.report.commands import COMMANDS

QUIET = "\n".join(f"step {step} | loss: 2.0 | grad_norm: {0.5 + step % 7 / 100}" for step in range(1, 61)) + "\n"
SPIKE = QUIET.replace("step 40 | loss: 2.0 | grad_norm: 0.55", "step 40 | loss: 2.0 | grad_norm: 903.0")
SHORT = "\n".join(QUIET.splitlines()[:3]) + "\n"
LOST = "".join(f"step {step} | loss: {'nan' if step > 30 else 2.0}\n" for step in range(1, 41))
RESUMED = LOST + "".join(f"step {step} | loss: 2.0\n" for step in range(26, 81))
FAST = "\n".join(f"step {step} | speed: 2.0 | reward_std: 0.5" for step in range(1, 61)) + "\n"


@pytest.mark.parametrize(
    ("text", "words", "code"),
    [
        (QUIET, [], 0),
        (QUIET, ["--fail-on", "found"], 0),
        (QUIET, ["--fail-on", "warning"], 0),
        (SPIKE, [], 0),
        (SPIKE, ["--fail-on", "found"], 1),
        (SPIKE, ["--fail-on", "danger"], 1),
        (RESUMED, ["--fail-on", "found"], 1),
        (SHORT, [], 2),
        (SHORT, ["--fail-on", "found"], 2),
        (FAST, [], 2),
        ("no log at all\n", [], 2),
    ],
)
def test_a_log_s_exit_code(text, words, code, tmp_path, capsys):
    (tmp_path / "a.log").write_text(text)
    for more in ([], ["--json"]):
        assert main([str(tmp_path / "a.log"), *words, *more]) == code
    said = capsys.readouterr()
    assert said.out or said.err.startswith("gradloc: ")
    if (text, words) in ((QUIET, []), (SHORT, []), (SPIKE, ["--fail-on", "danger"])):
        assert main(["health", str(tmp_path / "a.log"), *words]) == code


def test_a_run_without_an_event_is_judged_by_its_log(tmp_path, shown):
    (tmp_path / "a.log").write_text(SPIKE)
    (tmp_path / "gradloc").mkdir()
    (tmp_path / "gradloc" / "events.jsonl").write_text("")
    for more in ([], ["--json"], ["--format", "md"]):
        assert "gradient norm 903" in shown(tmp_path, "--fail-on", "found", *more, code=1)
    assert shown(tmp_path, "--list") == ""


def test_a_log_of_a_folder_that_is_not_judged_is_said(tmp_path, capsys):
    for name, text in (("a.log", QUIET), ("b.log", LOST), ("c.log", RESUMED)):
        (tmp_path / name).write_text(text)
    assert main([str(tmp_path)]) == 0
    said = "2 logs of the folder without a gradient norm were not judged: b.log, c.log."
    assert said in capsys.readouterr().err
    assert main([str(tmp_path / "a.log"), str(tmp_path / "b.log"), "--fail-on", "found"]) == 1


def test_logs_without_norms_are_judged_each_and_the_worst_leads(tmp_path, shown):
    for name, first, risen in (("a.log", 2.5, 0.0), ("b.log", 2.9, 6.0), ("c.log", 2.2, 0.0)):
        losses = [first - step / 100 + step * 7 % 5 / 100 + risen * (step > 40) for step in range(1, 81)]
        (tmp_path / name).write_text("".join(f"step {step} loss: {loss}\n" for step, loss in enumerate(losses, 1)))
    said = shown(tmp_path)
    assert said.startswith("b.log") and "loss rose at step 41 and did not come back" in said
    assert "2 other runs:" in said and "a.log: loss went from 2.51 at" in said and "c.log: loss went from 2.21" in said
    said = shown("health", tmp_path)
    assert "b.log" in said.splitlines()[0] and "a.log: loss is finite in all 80 steps" in said


def test_json_says_the_kind_and_what_it_was_judged_from(tmp_path, shown):
    (tmp_path / "a.log").write_text(SPIKE)
    (said,) = json.loads(shown(tmp_path / "a.log", "--json"))["diagnoses"]
    assert said["kind"] == "back" and "grad_norm" in said["ground"] and said["judged"]


def test_the_one_command_reports_a_path_and_knows_every_subcommand(tmp_path, capsys):
    (tmp_path / "a.log").write_text(SPIKE)
    assert command.main([str(tmp_path / "a.log"), "--fail-on", "found"]) == 1
    said = capsys.readouterr().out
    assert command.main(["report", str(tmp_path / "a.log"), "--fail-on", "found"]) == 1
    assert capsys.readouterr().out == said and "Step 40" in said
    assert command.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"gradloc {name} " in shown for name in ("watch", "health", "check", "compare", "mismatch", "cure"))
    assert all(name in shown or name == "report" for name in COMMANDS)
