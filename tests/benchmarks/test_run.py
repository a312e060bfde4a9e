# SPDX-License-Identifier: Apache-2.0
"""What a benchmark's run says of itself."""

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


def test_a_command_is_told_without_the_place_of_its_output():
    assert run.as_typed("driver", ["--rows", "3", "--out", "there"]) == "python -m lab.benchmarks.driver --rows 3"
