# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: what it prints, writes, refuses."""

import json
import os
import subprocess
import sys

import pytest

from gradloc.report.cli import COMMANDS, main
from tests.report.builder import HOSTILE, REPO, UNTRUSTED, make_culprit, make_event, make_metrics, write_run


@pytest.fixture
def folder(tmp_path):
    events = [make_event(5), make_event(9, [make_culprit(token=HOSTILE[7])])]
    return write_run(tmp_path / "run", events, metrics=make_metrics(20, (5, 9)))


def test_a_run_alone_prints_a_summary(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert "tests / report" in out
    assert "step000005-epoch0-mini0" in out
    assert "extreme advantage" in out
    assert "20 steps in metrics.jsonl" in out
    assert "\x1b[31m" not in out


def test_a_run_of_0_2_0_opens(tmp_path, capsys, monkeypatch):
    """Its demo's shares add up to 1.855, which is said; the page has the token."""
    monkeypatch.setenv("COLUMNS", "300")
    run, page = REPO / "tests/data/run-0.2.0", tmp_path / "report.html"
    assert main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "One token made the step-5 spike." in out and "their sum is 1.855" in out
    assert main([str(run), "-o", str(page)]) == 0
    assert "aef9727d" in page.read_text(encoding="utf-8")


def test_one_event_is_told_with_its_verdict(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert main([str(folder), "--event", "step000009-epoch0-mini0"]) == 0
    out = capsys.readouterr().out
    assert "One token made the step-9 spike." in out
    assert "\x1b[31m" not in out


def test_list_names_the_events_one_a_line(folder, capsys):
    assert main([str(folder), "--list"]) == 0
    assert capsys.readouterr().out.split() == ["step000005-epoch0-mini0", "step000009-epoch0-mini0"]


def test_the_page_is_written_and_its_path_printed(folder, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert main([str(folder), "-o", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "run"]


@pytest.mark.parametrize("kind", ["md", "json", "csv"])
def test_every_format_is_printed_or_written(folder, tmp_path, capsys, kind):
    assert main([str(folder), "--format", kind]) == 0
    printed = capsys.readouterr().out
    out = tmp_path / f"report.{kind}"
    assert main([str(folder), "--format", kind, "-o", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == printed


def test_one_event_can_be_exported_alone(folder, capsys):
    assert main([str(folder), "--format", "json", "--event", "step000009-epoch0-mini0"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [event["step"]["global_step"] for event in document["events"]] == [9]


def test_an_unknown_event_is_refused_with_the_names_there_are(folder, capsys):
    assert main([str(folder), "--event", "nope"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gradloc-report: ")
    assert "has no event 'nope': there are step000005-epoch0-mini0" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(("argument", "words"), [("missing", "does not exist"), ("", "holds no run's log")])
def test_what_is_no_run_is_refused_in_one_line(tmp_path, capsys, argument, words):
    (tmp_path / "a.txt").write_text("")
    assert main([str(tmp_path / argument)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_a_mistyped_command_is_asked_about(folder, capsys):
    assert main(["heath", str(folder)]) == 2
    error = capsys.readouterr().err
    assert f"did you mean `gradloc-report health {folder}`?" in error
    assert len(error.splitlines()) == 1


def test_the_summary_ends_with_what_to_do_next(folder, capsys):
    assert main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"gradloc-report {folder} -o report.html" in out
    assert f"gradloc-report show {folder} --event step000005-epoch0-mini0" in out
    assert main([str(folder), "--event", "step000005-epoch0-mini0"]) == 0
    out = capsys.readouterr().out
    assert "trainer.rollout_data_dir=rollouts" in out
    assert "python -m verl.gradloc.replay" in out


def test_the_terminal_tells_shares_as_well_as_they_are_known(tmp_path, capsys):
    culprits = [make_culprit(is_exact=False, share_error=0.004)]
    known = write_run(tmp_path / "known", [make_event(culprits=culprits)])
    assert main([str(known)]) == 0
    out = capsys.readouterr().out
    assert out.count("75% +- 0.4%") >= 2 and "The measured shares add up to 0.9998." in out
    unknown = write_run(tmp_path / "unknown", [make_event(culprits=culprits, shares=UNTRUSTED)])
    assert main([str(unknown)]) == 0
    out = capsys.readouterr().out
    assert "75%" not in out and "their sum is 1.855 +- 0.12, not 1." in " ".join(out.split())


def test_a_folder_as_output_is_refused(folder, tmp_path, capsys):
    assert main([str(folder), "-o", str(tmp_path)]) == 2
    assert "-o names the file to write" in capsys.readouterr().err


def test_an_output_in_a_folder_that_is_not_there_is_refused_in_one_line(folder, tmp_path, capsys):
    assert main([str(folder), "-o", str(tmp_path / "no" / "report.html")]) == 2
    error = capsys.readouterr().err
    assert "Make it with: mkdir -p" in error
    assert len(error.splitlines()) == 1


def test_notes_go_to_standard_error(folder, capsys):
    path = folder / "gradloc" / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-50])
    assert main([str(folder), "--format", "csv"]) == 0
    captured = capsys.readouterr()
    assert "is cut off and was left out" in captured.err
    assert "cut off" not in captured.out


@pytest.mark.parametrize("arguments", [[], ["--format", "json"], ["--format", "md"]])
def test_two_runs_are_compared(folder, tmp_path, capsys, arguments):
    other = write_run(tmp_path / "other", metrics=make_metrics())
    assert main(["compare", str(folder), str(other), *arguments]) == 0
    assert "largest" in capsys.readouterr().out


def test_a_comparison_can_be_a_page(folder, tmp_path, capsys):
    out = tmp_path / "compare.html"
    assert main(["compare", str(folder), str(folder), "-o", str(out)]) == 0
    assert "Two runs side by side" in out.read_text(encoding="utf-8")


def test_every_command_has_help_that_names_it(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0
        assert name in capsys.readouterr().out


def test_without_arguments_it_says_what_is_missing(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_a_terminal_that_speaks_ascii_only_gets_a_summary(folder):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "gradloc.report", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"step000005-epoch0-mini0" in done.stdout


def test_a_reader_that_has_seen_enough_is_no_error(folder):
    command = f"{sys.executable} -m gradloc.report {folder} --format json | head -c 10"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, shell=True, env=environment, capture_output=True)
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runn"], "there is no file or folder runn: did you mean run?"),
        (["events", "run"], "`gradloc-report run` shows a run; the commands are show,"),
        (["https://wandb.ai/a/b/runs/c"], "is an address, and this command reads files"),
        (["trigger", "run", "--metrics", "x"], "trigger takes no option --metrics: did you mean --metric?"),
        (["watch", "run", "--serve", "--port", "99999"], "--port must be from 0 to 65535, found 99999."),
    ],
)
def test_what_is_mistyped_is_answered_with_what_was_meant(folder, monkeypatch, capsys, words, said):
    monkeypatch.chdir(folder.parent)
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_log_has_a_page_that_tells_the_explosion_and_what_was_overwritten(tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main([str(REPO / "tests/data/logs/console/resumed.log"), "-o", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert "Step 47: gradient norm 903, 1,856 times normal" in text and "overwritten, from step 41" in text
    assert "No spike" not in text
