# SPDX-License-Identifier: Apache-2.0
"""docs/logs.md says what the tests read, and what the command prints."""

from gradloc.report.cli import main
from tests.report.logs.table import PAGE, ROOT, page


def test_the_table_of_formats_is_that_of_the_collection():
    assert PAGE.read_text(encoding="utf-8") == page(), "make it anew: python -m tests.report.logs.table"


def test_the_printed_example_is_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(ROOT)
    shown = PAGE.read_text(encoding="utf-8").split("    $ gradloc-report ")[1].split("\n\n")[0].splitlines()
    assert main([shown[0]]) == 0
    printed = capsys.readouterr().out
    for line in shown[1:]:
        assert line.strip() == "..." or line.strip() in printed
