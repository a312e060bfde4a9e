# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side, and what was measured of single settings over a whole run."""

import json
import re

import pytest

from gradloc.explain.numbers import number
from gradloc.record import Cured
from gradloc.report.cli import main
from gradloc.report.commands.cure import tally
from gradloc.report.runs.comparison import compare
from gradloc.report.runs.run import read_run
from tests import explain
from tests.report.builder import REPO, make_event, make_metrics, write_run
from tests.report.logs.made import NAN, console


def test_two_runs_are_put_side_by_side(tmp_path):
    first = read_run(write_run(tmp_path / "a", [make_event(5)], metrics=make_metrics()))
    second = read_run(write_run(tmp_path / "b", metrics=make_metrics(10, ())))
    found = compare(first, second)
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["steps"] == ["20", "10"]
    assert rows["events"] == ["1", "0"]
    assert rows["causes"] == ["extreme advantage 1", "–"]
    assert rows["gradient norm, largest"][0] == "747 at step 5"
    assert found.steps == [["5", "747.7 ( is)", "–"]]


def test_two_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = [read_run(write_run(tmp_path / name, [make_event(5)])) for name in "ab"]
    assert compare(*runs).names == ["tests / report (a)", "tests / report (b)"]
    again = compare(runs[0], runs[0])
    assert again.names == [f"tests / report ({tmp_path / 'a'})"] * 2
    assert not [row for row in again.rows if {*row[1:]} == {"–"}]


def test_two_runs_do_not_part_where_one_took_longer(tmp_path):
    for name, seconds in (("a", 0.1), ("b", 0.2)):
        (tmp_path / name).mkdir()
        rows = ({"step": step, "actor/grad_norm": 1.0, "gradloc/seconds": seconds * step} for step in range(1, 30))
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "the same in all" in compare(*(read_run(tmp_path / name) for name in "ab")).parted


def write_log(path, norms, seed=1):
    """A console log that begins with its settings, as verl prints them."""
    path.write_text(f"{{'data': {{'seed': {seed}}}, 'actor': {{'lr': 1e-06}}}}\n{console(norms)}\n")
    return path


FIVE = [1.0 + at % 5 / 10 for at in range(60)]
SEVEN = [1.05 + at % 7 / 10 for at in range(60)]
SCATTERED = [0.4 if at % 2 else 2.0 for at in range(60)], [2.0 if at % 3 else 0.4 for at in range(60)]


@pytest.mark.parametrize(
    ("first", "second", "step"),
    [
        (FIVE, FIVE, "60"),  # the same in all of their common steps
        (FIVE, [*FIVE[:30], *(norm + 0.01 for norm in FIVE[30:])], "31"),  # any metric differs
        (FIVE, SEVEN, "1"),  # two seeds
        (FIVE, [*SEVEN[:40], *(norm * 30 for norm in SEVEN[40:])], "41"),  # leaves the scatter of two seeds
        (SCATTERED[0], [*SCATTERED[1][:47], 413.0, *SCATTERED[1][48:]], "48"),  # explodes, however much they scatter
    ],
)
def test_where_two_logs_part(tmp_path, first, second, step):
    runs = [read_run(write_log(tmp_path / name, norms)) for name, norms in (("a.log", first), ("b.log", second))]
    said = compare(*runs).parted
    assert re.search(r"(?:At step|part at step|from step|all of their) (\d+)", said)[1] == step
    if step not in ("60", "1"):
        at = int(step) - 1
        assert f"{number(first[at], 3)} in a.log and {number(second[at], 3)} in b.log" in said


APART = (
    [95.2 if step == 24 else 1.03 + step % 3 / 100 for step in range(1, 33)],
    [903.0 if step == 47 else 0.48 + step % 4 / 100 for step in range(1, 61)],
)
"""Norms of two runs that never were together, the second twice as long."""


def test_two_runs_that_never_were_together_are_different_throughout(tmp_path):
    runs = [read_run(write_log(tmp_path / f"{len(norms)}.log", norms)) for norms in APART]
    found = compare(*runs)
    assert "differ throughout: the median of actor/grad_norm is 1.04 in 32.log and 0.495 in 60.log" in found.parted
    assert "apart at step 24, where actor/grad_norm is 95.2 in 32.log and 0.48 in 60.log" in found.parted
    assert " part at" not in found.parted
    assert "Only the 32 steps that both runs logged (1 to 32) were compared; the tables cover" in found.parted
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["gradient norm, largest"] == ["95.2 at step 24", "903 at step 47"]
    assert [(step, a.split(" (")[0], b.split(" (")[0]) for step, a, b in found.steps] == [
        ("24", "95.2", "–"),
        ("47", "not in its log", "903"),
    ]


@pytest.mark.parametrize("at", [1, 3])
def test_two_runs_part_at_a_spike_in_their_first_steps(tmp_path, at):
    spiked = [903.0 if step == at else norm for step, norm in enumerate(FIVE, 1)]
    later = [NAN if step == 47 else norm for step, norm in enumerate(SEVEN, 1)]
    runs = [read_run(write_log(tmp_path / name, norms)) for name, norms in (("a.log", spiked), ("b.log", later))]
    said = compare(*runs).parted
    assert f"part at step {at}: actor/grad_norm is 903 in a.log and {number(later[at - 1], 3)} in b.log" in said


def test_where_norms_part_another_metric_that_is_apart_throughout_does_not_hide_it(tmp_path):
    for name, norms, score in (("a", FIVE, 0.1), ("b", [*SEVEN[:40], *(norm * 30 for norm in SEVEN[40:])], 0.5)):
        rows = [
            {"step": step, "data": {"actor/grad_norm": norm, "critic/score/mean": score + step / 1000}}
            for step, norm in enumerate(norms, 1)
        ]
        write_run(tmp_path / name, metrics=rows)
    said = compare(*(read_run(tmp_path / name) for name in "ab")).parted
    assert "part at step 41: actor/grad_norm is 1 in a and" in said


def test_settings_that_differ_are_listed_where_both_logs_hold_theirs(tmp_path):
    runs = [read_run(write_log(tmp_path / f"{seed}.log", [1.0, 2.0], seed)) for seed in (1, 2)]
    assert compare(*runs).settings == [["data.seed", "1", "2"]]


def event(**verdicts: str):
    cures = [{"name": name, "line": f"{name}=1", "norm_after": 1.0, "verdict": of} for name, of in verdicts.items()]
    return explain.event(cures=cures)


def test_the_setting_that_heals_most_events_comes_first():
    events = [
        event(clip="healed", dual="healed"),
        event(clip="no_change", dual="healed"),
        event(clip="not_healed", kl="undecided"),
    ]
    assert isinstance(events[0].cures[0], Cured)
    assert tally(events) == [("dual=1", 2, 0), ("clip=1", 1, 2), ("kl=1", 0, 0)]


def test_a_run_that_no_setting_would_have_changed_says_so(tmp_path, shown):
    write_run(tmp_path, [make_event(cures=[])])
    said = " ".join(shown("cure", tmp_path).split())
    assert "No setting was tested for 1 event of this run: running the step again cannot test" in said
    assert json.loads(shown("cure", tmp_path, "--json"))["measured"] == 0


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("ms-swift-nan.log", "hf-trainer.log", "step 2: actor/grad_norm is NaN in ms-swift-nan.log and 2.3"),
        (
            "hf-trainer.log",
            "windows-nan.log",
            "step 41: actor/pg_loss is 1.7 in hf-trainer.log and NaN in windows-nan.log.",
        ),
        ("hf-trainer.log", "three-steps.log", "3 common steps are too few to say more."),
    ],
)
def test_a_value_that_is_not_finite_is_no_scatter(first, second, says, shown):
    folder = REPO / "tests" / "data" / "pieces"
    assert says in " ".join(shown("compare", folder / first, folder / second).split())


@pytest.mark.parametrize(("rows", "says"), [("2,9.0", "1 common step is too few"), ("3,1.0", "no step in common")])
def test_what_two_logs_do_not_share_is_named(tmp_path, shown, rows, says):
    for name, lines in (("one.csv", "1,1.0\n2,1.0"), ("two.csv", rows)):
        (tmp_path / name).write_text(f"step,loss\n{lines}\n")
    assert says in shown("compare", str(tmp_path / "one.csv"), str(tmp_path / "two.csv"))


def test_a_loop_s_cures_are_not_measured_for_a_reason_of_its_own(tmp_path, shown):
    write_run(tmp_path, [make_event(cures=None) | {"run": {"trainer": "loop"}}])
    assert "gradloc.Watch does not know how a loop makes its loss" in " ".join(shown("cure", tmp_path).split())


def test_last_rows_that_are_empty_are_said(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("step,loss,grad_norm\n1,1.0,0.5\n2,0.9,0.4\n3,,\n4,,\n5,,\n")
    main([str(tmp_path / "a.csv")])
    assert "The last 3 rows of a.csv are empty, as pandas writes NaN." in capsys.readouterr().err
