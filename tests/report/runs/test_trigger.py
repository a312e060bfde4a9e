# SPDX-License-Identifier: Apache-2.0
"""``gradloc trigger``: every format that people have, the rule that training asks, and what it shows."""

import json
import math
import random
from pathlib import Path

import pytest

from gradloc.report.cli import main
from gradloc.trigger import AdaptiveThreshold
from tests.report.logs.made import console

SERIES = Path(__file__).resolve().parents[3] / "docs" / "series"
RNG = random.Random(3)
NORMS = [round(math.exp(RNG.gauss(0, 0.2)), 6) for _ in range(40)]
NORMS[30] = 54.25
NORMS[35] = math.nan


@pytest.fixture
def log(tmp_path):
    """A console log, which names the norm as verl does; what other formats hold, tests/report/logs reads."""
    path = tmp_path / "train.log"
    path.write_text(console(NORMS) + "\n")
    return path


def trigger(path, *arguments):
    """The steps that the command writes as JSON."""
    target = path.parent / "out.json"
    assert main(["trigger", str(path), "--json", "-o", str(target), *arguments]) == 0
    return json.loads(target.read_text())["steps"]


def test_every_step_has_its_norm_and_the_verdict_of_the_training_rule(log):
    steps, rule = trigger(log), AdaptiveThreshold()
    assert [step["step"] for step in steps] == list(range(1, 41))
    for step, norm in zip(steps, NORMS, strict=True):
        assert float(step["norm"]) == pytest.approx(norm, nan_ok=True)
        threshold = rule.threshold(0)
        assert step["threshold"] == (None if threshold is None else pytest.approx(threshold))
        assert [step["spike"]] == rule.observe([norm])
    assert [step["step"] for step in steps if step["spike"]] == [31, 36]


def test_settings_change_what_is_flagged_and_wrong_ones_are_refused(log, shown, refused):
    steps = trigger(log, "--set", "gradloc.trigger.warmup=8", "--set", "floor=1.2", "--set", "cap=1.2")
    assert sum(step["spike"] for step in steps) > 2 and steps[8]["threshold"] is not None
    assert "\ntrain, cap=6, floor=3\n" in "\n" + shown("trigger", log, "--set", "cap=6", "--set", "floor=3")
    for wrong, said in (
        ("floor=11", "floor must be at most cap (10), found 11: set both where one is not set."),
        ("window=4", "window must be an integer of at least 8"),
        ("deviations=3", "there are window, warmup, floor, cap"),
        ("cap", "write KEY=VALUE"),
    ):
        assert said in refused("trigger", log, "--set", wrong)


def test_a_run_with_a_norm_by_another_name_is_asked_for_it(tmp_path, refused):
    lines = [json.dumps({"step": i, "data": {"a/grad_norm": 1.0, "b/grad_norm": 2.0}}) for i in range(3)]
    (tmp_path / "m.jsonl").write_text("\n".join(lines) + "\n")
    assert "a/grad_norm, b/grad_norm" in refused("trigger", tmp_path / "m.jsonl")
    assert {step["norm"] for step in trigger(tmp_path / "m.jsonl", "--metric", "b/grad_norm")} == {2.0}


def test_the_parts_of_a_run_that_was_resumed_are_told_apart(tmp_path):
    lines = [f"step:{step} - actor/grad_norm:{norm}\n" for step, norm in ((1, 1.0), (2, 5), (2, 7))]
    (tmp_path / "l.log").write_text("".join(lines))
    steps = trigger(tmp_path / "l.log")
    assert [(step["step"], step["norm"], step["segment"]) for step in steps] == [(1, 1.0, 0), (2, 5.0, 0), (2, 7.0, 1)]


def test_the_terminal_shows_the_curve_the_flagged_steps_and_how_far_the_others_stayed_away(shown):
    said = " ".join(shown("trigger", SERIES / "verl-maze-actor.json").split())
    assert "◆" in said and "flagged 2 of 61 steps (3.28%)" in said
    assert "Of the steps not flagged, step " in said and "; the median step is at " in said


@pytest.mark.full
def test_the_committed_picture_is_what_the_command_draws(tmp_path, shown):
    target = tmp_path / "trigger.svg"
    shown("trigger", *sorted(SERIES.glob("*.json")), "-o", target)
    drawn, committed = target.read_text(), (SERIES.parent / "trigger.svg").read_text()
    names = [line for line in drawn.splitlines() if "steps flagged" in line]
    assert drawn.startswith("<?xml") and len(names) == 3 and all(line in committed for line in names)


@pytest.mark.full
def test_the_picture_can_be_on_a_page_and_is_nothing_else(tmp_path, shown, refused):
    both = [SERIES / "verl-maze-actor.json", SERIES / "trl-hotpotqa-grpo.json"]
    shown("trigger", *both, "-o", tmp_path / "t.html")
    assert "7 steps would have been flagged" in (tmp_path / "t.html").read_text()
    assert "must end in .html or .svg" in refused("trigger", *both, "-o", tmp_path / "t.png")


def test_of_several_runs_a_note_names_its_own(capsys):
    assert main(["trigger", *map(str, sorted(SERIES.glob("*.json")))]) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == sorted(path.stem for path in SERIES.glob("*.json"))


def test_another_threshold_that_the_run_had_is_said(shown):
    said = " ".join(shown("trigger", SERIES.parents[1] / "examples" / "demo").split())
    assert "the run itself used 18.6." in said
    said = " ".join(shown("trigger", SERIES / "verl-maze-actor.json").split())
    assert "the run itself used" not in said
