# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: what it prints, writes, refuses."""

import json
import os
import subprocess
import sys

import pytest

from gradloc.report.cli import main
from gradloc.report.commands import COMMANDS
from tests.report.builder import HOSTILE, REPO, make_culprit, make_event, make_metrics, write_run

FIRST, SECOND = "step000005-epoch0-mini0", "step000009-epoch0-mini0"


@pytest.fixture
def folder(tmp_path):
    events = [make_event(5), make_event(9, [make_culprit(token=HOSTILE[7])])]
    return write_run(tmp_path / "run", events, metrics=make_metrics(20, (5, 9)))


def test_a_run_alone_prints_a_summary_and_what_to_do_next(folder, shown):
    out = shown(folder, columns=120)
    for words in ("tests / report", FIRST, "extreme advantage", "20 steps in metrics.jsonl"):
        assert words in out
    assert f"gradloc-report {folder} -o report.html" in out
    assert f"gradloc-report show {folder} --event {FIRST}" in out
    assert "\x1b[31m" not in out


def test_one_event_is_told_with_its_verdict_and_what_to_do_next(folder, shown):
    out = shown(folder, "--event", SECOND)
    assert "One token made the step-9 spike." in out and "\x1b[31m" not in out
    assert "trainer.rollout_data_dir=rollouts" in out and "python -m gradloc.replay" in out


def test_a_run_of_0_2_0_opens(tmp_path, shown):
    """Its demo's shares add up to 1.855, which is said; the page has the token."""
    run, page = REPO / "tests/data/run-0.2.0", tmp_path / "report.html"
    out = shown(run)
    assert "One token made the step-5 spike." in out and "their sum is 1.855" in out
    shown(run, "-o", page)
    assert "aef9727d" in page.read_text(encoding="utf-8")


def test_list_names_the_events_one_a_line(folder, shown):
    assert shown(folder, "--list").split() == [FIRST, SECOND]


def test_the_page_is_written_and_its_path_printed(folder, tmp_path, shown):
    out = tmp_path / "report.html"
    assert shown(folder, "-o", out).strip() == str(out)
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "run"]


@pytest.mark.parametrize("kind", ["md", "json", "csv"])
def test_every_format_is_printed_or_written(folder, tmp_path, shown, kind):
    printed, out = shown(folder, "--format", kind), tmp_path / f"report.{kind}"
    shown(folder, "--format", kind, "-o", out)
    assert out.read_text(encoding="utf-8") == printed


def test_one_event_can_be_exported_alone(folder, shown):
    document = json.loads(shown(folder, "--format", "json", "--event", SECOND))
    assert [event["step"]["global_step"] for event in document["events"]] == [9]


@pytest.mark.parametrize("arguments", [[], ["--format", "json"], ["--format", "md"]])
def test_two_runs_are_compared(folder, tmp_path, shown, arguments):
    other = write_run(tmp_path / "other", metrics=make_metrics())
    assert "largest" in shown("compare", folder, other, *arguments)


def test_a_comparison_can_be_a_page(folder, tmp_path, shown):
    shown("compare", folder, folder, "-o", tmp_path / "compare.html")
    assert "Two runs side by side" in (tmp_path / "compare.html").read_text(encoding="utf-8")


def test_a_log_has_a_page_that_tells_the_explosion_and_what_was_overwritten(tmp_path, shown):
    shown(REPO / "tests/data/logs/console/resumed.log", "-o", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Step 47: gradient norm 903, 1,856 times normal" in text and "overwritten, from step 41" in text
    assert "No spike" not in text


def test_notes_go_to_standard_error(folder, capsys):
    path = folder / "gradloc" / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-50])
    assert main([str(folder), "--format", "csv"]) == 0
    captured = capsys.readouterr()
    assert "is cut off and was left out" in captured.err and "cut off" not in captured.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --event nope", "has no event 'nope': there are step000005-epoch0-mini0"),
        ("run --event step00005-epoch0-mini0", "did you mean step000005-epoch0-mini0?"),
        ("./missing", "missing does not exist: name a run's log"),
        (".", "holds no run's log"),
        ("runn", "runn does not exist: did you mean run?"),
        ("health ../HERE/rnu", "../HERE/rnu does not exist: did you mean run?"),
        ("heath run", "heath does not exist: did you mean health?"),
        ("run --metrcs x", "show does not take --metrcs: did you mean --metrics?"),
        ("show run --fromat=md", "show does not take --fromat=md: did you mean --format?"),
        ("compare run run run", "compare does not take run."),
        ("watch run --serve --port 99999", "--port must be from 0 to 65535, found 99999."),
        ("run -o .", "-o names the file to write"),
        ("run -o no/report.html", "Make it with: mkdir -p no"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line_with_a_guess(folder, monkeypatch, refused, words, said):
    monkeypatch.chdir(folder.parent)
    here = folder.parent.name
    if words == ".":
        folder.rename(folder.parent.parent / "elsewhere")
        (folder.parent / "a.txt").write_text("")
    assert said.replace("HERE", here) in refused(*words.replace("HERE", here).split())


def test_an_unknown_format_and_no_arguments_at_all_are_refused(folder, capsys):
    for words, said in (([], "COMMAND"), ([str(folder), "--format", "jsn"], "invalid choice: 'jsn'")):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_names_it(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0 and name in capsys.readouterr().out


def test_a_terminal_that_speaks_ascii_only_gets_a_summary(folder):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "gradloc.report", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert FIRST.encode() in done.stdout


def test_a_reader_that_has_seen_enough_is_no_error(folder):
    command = f"{sys.executable} -m gradloc.report {folder} --format json | head -c 10"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, shell=True, env=environment, capture_output=True)
    assert done.stderr == b""
