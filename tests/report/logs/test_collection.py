# SPDX-License-Identifier: Apache-2.0
"""Every kind of log in tests/data/logs is answered by what was planted in it.

docs/logs.md says what these tests read, and what the command prints.
"""

import pytest

from gradloc.report.cli import main
from gradloc.report.runs.diagnosis import diagnose
from gradloc.report.runs.run import read_run
from tests.report.logs.table import ANSWERS, LOGS, PAGE, ROOT, page


@pytest.mark.parametrize("name", ANSWERS)
def test_a_log_is_answered_with_what_was_planted_in_it(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    answer = ANSWERS[name]
    code = main([str(LOGS / name)])
    said = capsys.readouterr()
    if answer.get("refused"):
        assert code == 2 and said.out == "" and said.err.count("\n") == 1 and answer["says"][0] in said.err
        return
    assert code == 0 and not said.err.startswith("gradloc: ")
    assert f"({answer['format']})" in said.out.splitlines()[0]
    for sentence in answer["says"]:
        assert sentence in said.out + said.err
    if "settings" in answer:
        settings = read_run(LOGS / name).runs[0].config
        assert {key: settings.get(key) for key in answer["settings"]} == answer["settings"]


@pytest.mark.parametrize("name", [name for name in ANSWERS if "Step 47: gradient norm 903," in ANSWERS[name]["says"]])
def test_nothing_but_the_planted_spike_is_told(name):
    found = diagnose(read_run(LOGS / name).runs[0])
    assert [explosion.first for explosion in found.explosions] == [47]
    assert 1700 < found.worst.times < 2000, "the other norms of the log are to be about 0.49"


def test_every_log_of_a_trainer_has_its_answer():
    logs = {f"trainers/{path.name}" for path in (LOGS / "trainers").iterdir()}
    assert logs <= ANSWERS.keys(), "say in answers.json what these are answered by"


def test_the_table_of_formats_is_that_of_the_collection():
    assert PAGE.read_text(encoding="utf-8") == page(), "make it anew: python -m tests.report.logs.table"


def test_the_printed_example_is_what_the_command_prints(shown, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, *lines = PAGE.read_text(encoding="utf-8").split("    $ gradloc ")[1].split("\n\n")[0].splitlines()
    printed = shown(command)
    for line in lines:
        assert line.strip() == "..." or line.strip() in printed
