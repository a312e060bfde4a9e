# SPDX-License-Identifier: Apache-2.0
"""What is said of a run by its log: the worst first, what it did, and where to resume."""

import pytest

from gradloc.report.logs.recording import Recording
from gradloc.report.logs.segments import runs_of
from gradloc.report.runs.diagnosis import diagnose
from gradloc.report.runs.metrics import MEAN


def run_of(norms, first=1, source="a.log", **others):
    """A run with these norms, and other metrics as lists."""
    rows = [(first + at, {MEAN: norm}) for at, norm in enumerate(norms)]
    for name, values in others.items():
        for (_, row), value in zip(rows, values, strict=True):
            row[name] = value
    (run,) = runs_of([[Recording(source, "verl's console log", rows=rows)]])
    return run


QUIET = [1.0, 1.1, 0.9, 1.05, 0.95] * 6


def test_a_quiet_run_says_how_near_its_largest_norm_came():
    found = diagnose(run_of([*QUIET, 1.6]))
    assert found.worst is None and "1.6 at step 31, is 1.6 times the run's median of 1." in found.headline


def test_an_explosion_that_grows_is_one_and_its_beginning_is_where_to_resume():
    found = diagnose(run_of([*QUIET, 20.0, 200.0, 50.0, *QUIET]))
    assert found.headline == "Step 32: gradient norm 200, 200 times normal (1). It began at step 31."
    assert "global_step_30 +gradloc=observe" in found.command and len(found.explosions) == 1


def test_norms_that_stay_without_a_number_are_worse_than_a_spike():
    found = diagnose(run_of([*QUIET, 50.0, *QUIET, *[float("nan")] * 5]))
    assert found.headline == "Step 62: gradient norm NaN. It stayed so for 5 steps (62-66)."
    assert "1 other spike: step 31 (50)." in found.sentences


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ([0.6] * 31 + [0.5, 0.3, 0.05] + [0.02] * 27, "Reward fell from 0.6 to 0.02 within 3 steps."),
        ([0.6] * 31 + [0.3, 0.1] + [0.6] * 28, "Reward fell from 0.6 to 0.1 within 2 steps and came back."),
        ([0.6, 0.62] * 30 + [0.6], "Reward held in the 30 steps after it."),
    ],
)
def test_what_it_did_to_the_reward(reward, said):
    found = diagnose(run_of([*QUIET, 300.0, *QUIET], **{"critic/score/mean": reward}))
    assert said in found.sentences


def test_a_checkpoint_beside_the_log_is_named(tmp_path, shown):
    for step in (10, 20, 40):
        (tmp_path / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    norms = [*QUIET, 300.0]
    log = tmp_path / "train.log"
    log.write_text("".join(f"step:{at} - actor/grad_norm:{norm}\n" for at, norm in enumerate(norms, 1)))
    assert f"trainer.resume_from_path={tmp_path}/checkpoints/global_step_20 +gradloc=observe" in shown(log)


def test_a_spike_in_the_warm_up_is_told_with_the_limit_of_the_rule(tmp_path, shown):
    found = diagnose(run_of([*QUIET[:11], 903.0, *QUIET]))
    assert found.headline == "Step 12: gradient norm 903, 903 times normal (1)."
    assert any("Steps 1 to 16 are the warm-up" in limit for limit in found.limits)
    short = tmp_path / "short.log"
    short.write_text("".join(f"step:{at} - actor/grad_norm:{903 if at == 5 else 0.5}\n" for at in range(1, 8)))
    for command in ([], ["health"], ["watch", "--once"]):
        said = " ".join(shown(*command[:1], short, *command[1:]).split())
        assert "Step 5: gradient norm 903" in said and "Healthy" not in said and "No spike" not in said
    critic = [950.0, 820.0, 176.0, 117.0, 85.0, *[60.0] * 30]
    start = diagnose(run_of(critic))
    assert start.worst.is_start and "norms often start high" in " ".join(start.sentences)
