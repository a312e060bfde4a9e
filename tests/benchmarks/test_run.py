# SPDX-License-Identifier: Apache-2.0
"""The digest and the command in a benchmark's record."""

from lab.benchmarks import run


def test_sources_are_the_same_where_only_words_about_them_have_changed(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "REPO", tmp_path)
    source = tmp_path / "gradloc" / "search" / "beside" / "one.py"
    source.parent.mkdir(parents=True)
    digests = []
    for text in ('"""What."""\nA = 1  # why\n', "A = 1\n", "A = 2\n"):
        source.write_text(text)
        digests.append(run.digest())
    assert digests[0] == digests[1] != digests[2]


def test_a_recorded_command_lacks_its_output_folder():
    made = run.Parser("driver", "What it measures.")
    made.add_argument("--rows")
    assert made.parse_args(["--rows", "3", "--out", "there"]).command == "python -m lab.benchmarks.driver --rows 3"
