# SPDX-License-Identifier: Apache-2.0
"""docs/logs.md says what the tests read, and what the command prints."""

from tests.report.logs.table import PAGE, ROOT, page


def test_the_table_of_formats_is_that_of_the_collection():
    assert PAGE.read_text(encoding="utf-8") == page(), "make it anew: python -m tests.report.logs.table"


def test_the_printed_example_is_what_the_command_prints(shown, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, *lines = PAGE.read_text(encoding="utf-8").split("    $ gradloc-report ")[1].split("\n\n")[0].splitlines()
    printed = shown(command)
    for line in lines:
        assert line.strip() == "..." or line.strip() in printed
