# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: what it prints, writes, refuses."""

import json
import os
import re
import subprocess
import sys

import pytest

from gradloc import command
from gradloc.report.cli import main
from gradloc.report.commands import COMMANDS
from tests.report.builder import HOSTILE, REPO, make_culprit, make_event, make_metrics, write_run

FIRST, SECOND = "step000005-epoch0-mini0", "step000009-epoch0-mini0"


LOG = "run/metrics.jsonl"
ON_A_LOG = (f"report {LOG}", f"compare run {LOG}", f"trigger {LOG}", f"mismatch {LOG}")


@pytest.fixture
def folder(tmp_path):
    events = [make_event(5), make_event(9, [make_culprit(token=HOSTILE[7])])]
    return write_run(tmp_path / "run", events, metrics=make_metrics(20, (5, 9)))


def test_a_run_is_summarized_listed_and_told_event_by_event_without_a_token_s_escapes(folder, shown):
    out = shown(folder, columns=120)
    assert f"gradloc {folder} -o report.html" in out and f"report {folder} --event {FIRST}" in out
    assert shown(folder, "--list").split() == [FIRST, SECOND]
    lines = [line.strip() for line in out.splitlines()]
    assert lines[1] == "The worst of 2 events:" and lines[2].startswith("One token made the step-")
    assert lines.index("What to do now") < lines.index(next(line for line in lines if line.startswith("event ")))
    assert "\x1b[31m" not in out + shown(folder, "--event", SECOND)


def test_a_run_of_0_2_0_opens(tmp_path, shown):
    """Its demo's shares add up to 1.855, which is said; the page has the token."""
    run, page = REPO / "tests/data/run-0.2.0", tmp_path / "report.html"
    assert "1.855" in shown(run)
    shown(run, "-o", page)
    assert "aef9727d" in page.read_text(encoding="utf-8")


def test_the_page_is_written_and_its_path_printed(folder, tmp_path, shown):
    out = tmp_path / "report.html"
    assert shown(folder, "-o", out).strip() == str(out)
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "run"]


@pytest.mark.parametrize("kind", ["md", "json", "csv"])
def test_every_format_is_printed_or_written_of_all_events_or_of_one(folder, tmp_path, shown, kind):
    printed, out = shown(folder, "--format", kind), tmp_path / f"report.{kind}"
    shown(folder, "--format", kind, "-o", out)
    assert out.read_text(encoding="utf-8") == printed
    alone = shown(folder, "--format", kind, "--event", SECOND)
    assert len(alone) < len(printed)
    assert kind != "json" or [event["event_id"] for event in json.loads(alone)["events"]] == [SECOND]


def test_the_places_of_an_event_name_its_run_and_are_noted_among_several(folder, shown, capsys, monkeypatch):
    whole, one = shown(folder, "--list"), folder / "gradloc" / "events"
    monkeypatch.chdir(one)
    assert shown(".", "--list") == shown(one, "--list") == shown(folder, "--list") == whole
    assert shown(one / FIRST / "meta.json", "--list").split() == [FIRST]
    assert main([str(folder), str(folder / "metrics.jsonl")]) == 0
    assert f"{folder} has events: name it alone to see them." in capsys.readouterr().err


def test_two_runs_are_compared(folder, tmp_path, shown):
    other = write_run(tmp_path / "other", metrics=make_metrics())
    for arguments in ([], ["--format", "json"], ["--format", "md"]):
        assert "largest" in shown("compare", folder, other, *arguments)
    shown("compare", folder, folder, "-o", tmp_path / "compare.html")
    assert "<h1" in (tmp_path / "compare.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", ["report", "show", "watch --once", "compare {}", "cure", "health", "trigger"])
def test_every_command_prints_json(folder, shown, words):
    assert json.loads(shown(*words.format(folder).split(), folder, "--json"))


def test_the_completion_on_the_report_s_page_knows_every_command():
    (line,) = re.findall(r'complete -f -W "(.*)" gradloc', (REPO / "docs" / "report.md").read_text("utf-8"))
    done = subprocess.run([sys.executable, "-m", "gradloc.command", "--help"], cwd=REPO, capture_output=True, text=True)
    named = {*re.findall(r"^ +gradloc ([a-z]+) ", done.stdout, re.M), *COMMANDS}
    assert {*line.split()} == named


def test_the_demo_s_page_is_as_small_as_the_report_s_page_says():
    (most,) = re.findall(
        r"a page of one event takes [\d.]+ s and under (\d+) kB", (REPO / "docs/report.md").read_text()
    )
    assert int(most) / 2 < (REPO / "examples" / "report.html").stat().st_size / 1000 < int(most)


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_a_page_or_a_format_goes_to_standard_output_whole(folder, tmp_path, shown, name):
    words = [sys.executable, "-m", "gradloc.report", str(folder), "-o", name]
    for more, begins, ends in (([], "<!DOCTYPE html>", "</html>"), (["--json"], "{\n", "\n}")):
        with (tmp_path / "out").open("w+", encoding="utf-8") as file:
            done = subprocess.run([*words, *more], cwd=REPO, stdout=file, stderr=subprocess.PIPE, text=True)
            written = (tmp_path / "out").read_text(encoding="utf-8")
        assert (
            written.startswith(begins) and written.rstrip().endswith(ends) and (done.returncode, done.stderr) == (0, "")
        )
    assert not (REPO / "-").exists()


def test_notes_go_to_standard_error(folder, capsys):
    path = folder / "gradloc" / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-50])
    for words in (["--format", "csv"], ["--list"], []):
        assert main([str(folder), *words]) == 0
        captured = capsys.readouterr()
        assert "is cut off and was left out" in captured.err and "cut off" not in captured.out


@pytest.mark.parametrize(
    ("word", "guess"),
    [("spike.log", "name a run's log"), ("resmed.log", "did you mean resumed.log?"), ("calm.log", "name a run's log")],
)
def test_a_file_is_guessed_by_its_name_and_not_by_an_ending_that_all_have(tmp_path, refused, word, guess):
    for name in ("inf.log", "resumed.log", "wrapped.log"):
        (tmp_path / name).touch()
    assert guess in refused(tmp_path / word)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --event nope", "has no event 'nope': it has step000005-epoch0-mini0"),
        ("run --event step00005-epoch0-mini0", "did you mean step000005-epoch0-mini0?"),
        ("health EMPTY", "one of the words is empty: a variable of the shell may have no value."),
        ("mismatch rnu", "rnu does not exist: did you mean run?"),
        ("mismatch MEANS --step 99", "has means alone, of all steps together: leave --step out."),
        ("./missing", "missing does not exist: name a run's log"),
        (".", "holds no run's log"),
        ("runn", "runn does not exist: did you mean run?"),
        ("health ../HERE/rnu", "../HERE/rnu does not exist: did you mean run?"),
        ("heath run", "heath does not exist: did you mean health?"),
        ("run --metrcs x", "report does not take --metrcs: did you mean --metrics?"),
        ("show run --fromat=md", "report does not take --fromat=md: did you mean --format?"),
        ("compare run run run", "compare takes RUN_A RUN_B alone, found run as well: quote a path that has blanks."),
        ("--json health run", "health is a subcommand, which is given once and first: see gradloc health --help."),
        ("health report run", "report is a subcommand, which is given once and first"),
        ("watch run --serve --port 99999", "--port must be from 0 to 65535, found 99999."),
        ("run --format jsn", "invalid choice: 'jsn'"),
        ("compare run", "the following arguments are required: RUN_B; see gradloc compare --help."),
        ("run --list --json", "argument --json: not allowed with argument --list"),
        ("run --list -o a.html", "--list prints the events' names and nothing else: leave -o out."),
        ("run/metrics.jsonl --metrics run", "run/metrics.jsonl is read as a log: leave it out."),
        ("run run --metrics run", "--metrics goes with the folder of one run"),
        ("watch - --once", "- is standard input: gradloc - reports it"),
        ("watch run --once --port 80", "--port goes with --serve."),
        ("watch run --once --interval inf", "at most a day, found inf."),
        ("watch run --serve --once", "--once prints once and ends, --serve goes on: give one of them."),
        ("run/metrics.jsonl --list", "is a log, and --list names the events that GradLoc wrote: leave it out."),
        ("compare - -", "- is standard input, which can be read once, found 2 times: name files."),
        ("run --event nope --json -o a.html", "a.html would hold json, not .html: name a.json"),
        ("run --format csv -o a.MD", "a.MD would hold csv, not .md: name a.csv"),
        ("compare run run --json -o a.htm", "a.htm would hold json, not .htm: name a.json"),
        ("trigger run --json -o a.svg", "a.svg would hold json, not .svg: name a.json"),
        ("mismatch MEANS --json -o a.html", "a.html would hold json, not .html: name a.json"),
        ("run -o .", "-o names the file to write"),
        ("run -o no/report.html", "Make it with: mkdir -p no"),
        *((f"{name} --json -o run/metrics.jsonl", "is what is to be read") for name in ON_A_LOG),
        ("run -o /proc/report.html", "gradloc: /proc/report.html: "),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line_with_a_guess(folder, monkeypatch, refused, words, said):
    monkeypatch.chdir(folder.parent)
    here = folder.parent.name
    if words == ".":
        folder.rename(folder.parent.parent / "elsewhere")
        (folder.parent / "a.txt").write_text("")
    words = words.replace("MEANS", str(REPO / "examples" / "demo"))
    given = ["" if word == "EMPTY" else word for word in words.replace("HERE", here).split()]
    assert said.replace("HERE", here) in refused(*given)


def test_paths_may_be_between_options_and_begin_with_a_hyphen(folder, shown, monkeypatch):
    assert "largest" in shown("compare", folder, "--format", "md", folder)
    monkeypatch.chdir(folder)
    (folder / "metrics.jsonl").rename(folder / "-a.jsonl")
    assert json.loads(shown("--json", "--", "-a.jsonl"))["run"] == "-a.jsonl"


@pytest.mark.parametrize("columns", [0, 1])
@pytest.mark.parametrize("words", ["report", "health", "cure", "watch --once", "trigger", "compare {}"])
def test_a_terminal_without_a_width_is_printed_to_as_one_of_eighty_columns(folder, shown, words, columns):
    words = [*words.format(folder).split(), folder]
    assert shown(*words, columns=columns) == shown(*words, columns=80) != ""


def test_health_fits_its_terminal_and_fills_no_line_with_blanks(folder, shown):
    lines = shown("health", folder, columns=50).splitlines()
    (strip,) = (line for line in lines if line.startswith("step "))
    assert "·" in strip and max(map(len, lines)) <= 50
    assert max(map(len, shown("health", folder, columns=5000).splitlines())) < 1000


@pytest.mark.parametrize("name", [*COMMANDS, "replay", "patch"])
def test_every_command_has_help_that_names_it_and_shows_an_example(name, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main([name, "--help"])
    said = capsys.readouterr().out
    assert caught.value.code == 0 and name in said and re.search(r"^examples?:\n  \S", said, re.M)


def test_a_terminal_of_ascii_gets_a_summary_and_a_reader_that_has_seen_enough_is_no_error(folder):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(REPO)}
    command = f"{sys.executable} -m gradloc.report {folder}; {sys.executable} -m gradloc.report {folder} --list | true"
    done = subprocess.run(command, shell=True, env=environment, capture_output=True)
    assert done.returncode == 0 and done.stderr == b"" and FIRST.encode() in done.stdout


@pytest.mark.parametrize(("words", "code"), [("health RUN", 0), ("RUN --fail-on found", 1), ("--help", 0)])
@pytest.mark.parametrize("end", ["| true", ">&-", "> /dev/full"])
def test_a_command_ends_with_its_own_code_where_nobody_reads_it(words, code, end, folder):
    started = f"{sys.executable} -m gradloc.command {words.replace('RUN', str(folder))} {end}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", started], cwd=REPO, capture_output=True, text=True)
    said = "gradloc: standard output: No space left on device.\n" if "full" in end else ""
    assert (done.returncode, done.stderr) == (2 if said else code, said)


def test_a_package_that_is_missing_is_named(tmp_path):
    (tmp_path / "train.log").write_text("step 1 loss 2.0\n")
    run = "import sys; sys.modules['rich'] = None; from gradloc.command import main; sys.exit(main(['train.log']))"
    made = subprocess.run([sys.executable, "-c", run], cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 2 and made.stderr.startswith("gradloc: rich") and "pip install rich" in made.stderr
    assert made.stderr.count("\n") == 1


def test_a_loss_is_not_taken_for_the_norm(tmp_path, refused):
    path = tmp_path / "train.log"
    path.write_text("".join(f"step {step} loss {2 - step / 50}\n" for step in range(20)))
    assert "loss is a loss, and --metric names the gradient norm" in refused(path, "--metric", "loss")
