# SPDX-License-Identifier: Apache-2.0
"""What was measured of single settings, over a whole run."""

from gradloc.record import Cured
from gradloc.report.cli import main
from gradloc.report.commands.cure import tally
from tests import words
from tests.report.builder import make_event, write_run


def event(**verdicts: str):
    cures = [{"name": name, "line": f"{name}=1", "norm_after": 1.0, "verdict": of} for name, of in verdicts.items()]
    return words.event(cures=cures)


def test_the_setting_that_heals_most_events_comes_first():
    events = [
        event(clip="healed", dual="healed"),
        event(clip="no_change", dual="healed"),
        event(clip="not_healed", kl="undecided"),
    ]
    assert isinstance(events[0].cures[0], Cured)
    assert tally(events) == [("dual=1", 2, 0), ("clip=1", 1, 2), ("kl=1", 0, 0)]


def test_a_run_that_no_setting_would_have_changed_says_so(tmp_path, capsys):
    write_run(tmp_path, [make_event(cures=[])])
    assert main(["cure", str(tmp_path)]) == 0
    assert "No setting that this trainer has would have changed 1 event" in " ".join(capsys.readouterr().out.split())
