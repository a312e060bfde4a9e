# SPDX-License-Identifier: Apache-2.0
"""A wrong word on the command line gets a guess, in one sentence, and no traceback."""

import pytest

from gradloc.report.cli import main
from tests.report.builder import make_event, make_metrics, write_run


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "run", [make_event(5)], metrics=make_metrics())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["RUN", "--metrcs", "x"], "there is no option --metrcs: did you mean --metrics?"),
        (["show", "RUN", "--fromat=md"], "there is no option --fromat=md: did you mean --format?"),
        (["health", "RUN", "--jsno"], "there is no option --jsno: did you mean --json?"),
        (["RUN", "--format", "jsn"], "--format is one of md, json, csv, found jsn: did you mean json?"),
        (["RUN", "--zzz"], "there is no option --zzz."),
        (
            ["wtach", "x"],
            "there is no folder wtach and no command of that name: did you mean `gradloc-report watch x`?",
        ),
        (["rnu"], "did you mean"),
        (["health", "PARENT/rnu"], "PARENT/rnu does not exist: did you mean PARENT/run?"),
        (["RUN", "--event", "step00005-epoch0-mini0"], "did you mean step000005-epoch0-mini0?"),
        (["watch", "RUN", "--serve", "--port", "99999"], "port 99999 cannot be opened (it must be in 0 to 65535)"),
    ],
)
def test_a_wrong_word_gets_a_guess(folder, monkeypatch, capsys, words, said):
    monkeypatch.chdir(folder.parent)

    def filled(text: str) -> str:
        return text.replace("RUN", str(folder)).replace("PARENT", str(folder.parent))

    try:
        code = main([filled(word) for word in words])
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and filled(said) in error and "Traceback" not in error
