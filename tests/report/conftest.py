# SPDX-License-Identifier: Apache-2.0
"""What a command prints or refuses. Browser tests run when they are asked for by name, and never by the way."""

import pytest

from gradloc.report.cli import main


def pytest_collection_modifyitems(config, items):
    if "browser" in (config.option.markexpr or ""):
        return
    skip = pytest.mark.skip(reason="opens a browser: run `pytest -m browser`")
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(skip)


@pytest.fixture
def shown(capsys, monkeypatch):
    """What a command prints."""

    def show(*words, columns=300, code=0):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main([str(word) for word in words]) == code
        return capsys.readouterr().out

    return show


@pytest.fixture
def refused(capsys):
    """The one line in which a command is refused."""

    def refuse(*words):
        capsys.readouterr()  # what came before
        assert main([str(word) for word in words]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("gradloc: ") and said.err.count("\n") == 1 and said.out == ""
        return said.err

    return refuse
