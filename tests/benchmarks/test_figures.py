# SPDX-License-Identifier: Apache-2.0
"""`make figures`: what is present is kept, what failed stays as it was, each record has a command that exists."""

import importlib.util
import json
import sys

import pytest

from lab.benchmarks import figures


@pytest.fixture
def results(monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "COMMANDS", {"one": ("made", "--n", "3"), "two": ("made", "--n", "0")})
    return tmp_path


def test_what_is_missing_is_measured_and_what_fails_is_left(results, monkeypatch, capfd):
    """Replace the benchmarks, which take hours, by one of two lines."""
    fake = (
        "import sys, json, pathlib; n, out = sys.argv[2], pathlib.Path(sys.argv[4]);"
        "(out / 'made.json').write_text(json.dumps({'core_sha256': n}));"
        "sys.exit(n == '0')"
    )
    run = figures.subprocess.run
    monkeypatch.setattr(
        figures.subprocess, "run", lambda call, **how: run([sys.executable, "-c", fake, *call[3:]], **how)
    )
    (results / "two.json").write_text("{}")
    assert figures.main([]) == 1
    assert json.loads((results / "one.json").read_text()) == {"core_sha256": "3"}
    assert (results / "two.json").read_text() == "{}" and "two is not replaced" in capfd.readouterr().err


def test_a_record_of_the_present_sources_is_kept(results, capsys):
    (results / "one.json").write_text(json.dumps({"core_sha256": figures.digest()}))
    assert figures.main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines() == ["one: present", "two: to be measured"]


@pytest.mark.parametrize("module", sorted({call[0] for call in figures.COMMANDS.values()}))
def test_every_command_is_a_benchmark_that_takes_a_folder(module):
    assert importlib.util.find_spec(f"lab.benchmarks.{module}")
