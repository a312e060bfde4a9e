# SPDX-License-Identifier: Apache-2.0
"""Where to resume: a checkpoint is named where it is the run's own, from before the spike, and there."""

import json
import os

import pytest

from gradloc.report.pages.exports import to_markdown
from gradloc.report.pages.page import render
from gradloc.report.runs.diagnosis import diagnose
from gradloc.report.runs.effects import aftermath
from gradloc.report.runs.run import read_run
from tests.report.builder import REPO
from tests.report.logs.made import QUIET, console

DATA = REPO / "tests" / "data"
LOG = console([*QUIET, 300.0]) + "\n"
"""Its last step, 31, is a spike."""
CONFIG = "{'trainer': {'project_name': 'p', 'experiment_name': 'x', 'default_local_dir': 'checkpoints/p/x'}}\n"


def saved(folder, *steps, prefix="global_step_", empty=False):
    """Checkpoints of these steps."""
    for step in steps:
        (folder / f"{prefix}{step}").mkdir(parents=True)
        if not empty:
            (folder / f"{prefix}{step}" / "model.pt").touch()


@pytest.mark.parametrize(
    ("log", "places", "named"),
    [
        (LOG, ["checkpoints"], "checkpoints/global_step_20"),
        (LOG, ["."], "global_step_20"),
        (LOG, ["other/checkpoints"], None),
        (CONFIG + LOG, ["checkpoints/p/x", "checkpoints/p/y", "."], "checkpoints/p/x/global_step_20"),
        (CONFIG + LOG, ["checkpoints/p/y", "checkpoints", "."], None),
    ],
    ids=["beside", "with the log", "another run's", "by the config", "none by the config"],
)
def test_a_checkpoint_is_named_where_it_is_the_runs_own(tmp_path, shown, log, places, named):
    for place in places:
        saved(tmp_path / place, 10, 20, 40)
        saved(tmp_path / place, 30, empty=True)
    (tmp_path / "train.log").write_text(log)
    where = tmp_path / named if named else "CHECKPOINTS/global_step_N"
    assert f"trainer.resume_from_path={where} +gradloc=observe" in shown(tmp_path / "train.log")


def test_a_checkpoint_is_not_named_where_another_log_lies_beside_it_or_where_it_is_newer_than_the_log(tmp_path, shown):
    saved(tmp_path, 20)
    log, other = tmp_path / "train.log", tmp_path / "b.log"
    log.write_text(LOG)
    other.write_text(LOG)
    assert "resume_from_path=CHECKPOINTS" in shown(log)
    other.unlink()
    assert "global_step_20 +gradloc" in shown(log)
    os.utime(log, (1e9, 1e9))
    assert "resume_from_path=CHECKPOINTS" in shown(log)


def test_where_every_checkpoint_is_later_than_the_spike_none_is_named(tmp_path, shown):
    saved(tmp_path, 31, 40)
    (tmp_path / "train.log").write_text(LOG)
    said = shown(tmp_path / "train.log")
    assert "31, 40" in said and "resume_from_path" not in said


def test_a_trainers_checkpoint_is_named_in_its_own_words(tmp_path, shown):
    saved(tmp_path, 20, 40, prefix="checkpoint-")
    norms = [*QUIET, 300.0, *QUIET]
    history = [{"step": at, "grad_norm": norm, "loss": 0.1 + (at > 31)} for at, norm in enumerate(norms, 1)]
    log = tmp_path / "checkpoint-40" / "trainer_state.json"
    log.write_text(json.dumps({"log_history": history}))
    said = shown(log)
    assert f'trainer.train(resume_from_checkpoint="{tmp_path}/checkpoint-20")' in said and "trainer.resume" not in said


def test_what_followed_a_spike_is_drawn_and_the_curve_has_steps_below_it_and_its_metric_s_last_value(shown):
    log = DATA / "logs" / "console" / "ray.log"
    worst = diagnose(read_run(log).runs[0]).worst
    parts = aftermath(worst)
    assert [(part.title, part.is_worse) for part in parts] == [
        ("reward", True),
        ("entropy", True),
        ("response length", False),
    ]
    for part in parts:
        assert [at for at, _ in part.points] == list(range(27, 61)), "20 steps before it, and what there is after it"
    lines = shown(log, columns=72).splitlines()
    at = next(at for at, line in enumerate(lines) if "◆ flagged" in line)
    ticks, legend = lines[at - 1], lines[at]
    assert [ticks.index(f"|{step}") for step in (20, 40, 60)] == [
        19,
        39,
        59,
    ] and "actor/grad_norm, last 0.518" in legend


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        ({"gradloc/spikes": 0.0}, "a run's first steps have no threshold"),
        ({"gradloc/spikes": 0.0, "gradloc/threshold": 5e3}, "its threshold is higher"),
        ({"gradloc/spikes": 1.0, "gradloc/threshold": 5.0}, "name the folder of its events"),
    ],
)
def test_a_loop_s_spike_without_an_event_is_no_event_s_and_not_verl_s(tmp_path, ours, says):
    norms = [0.5 + 0.01 * (step % 3) for step in range(30)]
    norms[10] = 1937.0
    rows = [
        {"step": step, "data": {"actor/grad_norm": norm, "grad_norm_max": norm, "gradloc/failures": 0.0, **ours}}
        for step, norm in enumerate(norms, 1)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made,) = read_run(path).diagnoses
    assert any(says in sentence for sentence in made.sentences)
    assert "verl" not in made.run.format and "trainer.resume" not in made.command


def test_norms_that_stay_high_for_long_and_come_back_are_no_new_level(tmp_path):
    norms = [0.5 + 0.01 * (step % 3) for step in range(400)]
    for step in range(150, 220):
        norms[step] *= 20
    path = tmp_path / "train.csv"
    path.write_text("step,grad_norm,loss\n" + "".join(f"{at},{norm},{2 - at / 400}\n" for at, norm in enumerate(norms)))
    (made,) = read_run(path).diagnoses
    assert made.kind == "back" and not made.is_unrecovered and "came back" in made.headline
    until = int(made.headline.partition("up to step ")[2].partition(",")[0])
    assert abs(until - 219) < 8


def test_a_loss_that_went_on_falling_after_it_scattered_did_not_rise_for_good(tmp_path):
    values = [(0.5, 4.0 - 0.005 * step + 0.3 * (step % 2)) for step in range(400)]
    values[150], values[155] = (500.0, values[150][1]), (0.5, 5.0)
    path = tmp_path / "train.csv"
    path.write_text("step,grad_norm,loss\n" + "".join(f"{at},{n},{loss}\n" for at, (n, loss) in enumerate(values)))
    (made,) = read_run(path).diagnoses
    assert made.kind == "back" and "came back" in " ".join(made.sentences)


def test_a_spike_that_a_resume_got_past_is_not_said_to_be_the_run_s_end(shown):
    said = shown(DATA / "logs" / "console" / "resumed.log")
    assert "Kind: a spike, and the run did not recover, until it was resumed." in said
    assert "got past step 47: continue" in said and said.count("903") <= 4  # headline, curve, health
    found = read_run(DATA / "logs" / "console" / "resumed.log")
    assert not found.diagnoses[0].is_unrecovered
    assert "Without what a resume overwrote: no fault in 60 steps" in render(found)
    assert "Kind: a spike" in to_markdown(found, []) and "Judged from 60 rows" in to_markdown(found, [])


def test_a_step_that_failed_at_each_resume_is_not_resumed_from_there_again(shown):
    said = shown(DATA / "pieces" / "three-tries-to-get-past-a-nan.log")
    assert "(401-433) were logged 3 times" in said and "logged twice" not in said
    assert "failed like this 3 times at step 431" in said
    assert "Change something before the next resume" in said and "checkpoint before step 400" in said


def test_steps_that_were_logged_again_are_counted_once(tmp_path, shown):
    steps = [*range(1, 21), *range(16, 31), *range(26, 41), *range(29, 61)]
    path = tmp_path / "train.jsonl"
    rows = [{"step": step, "loss": 2.0 - row / 100} for row, step in enumerate(steps)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = "The run was resumed 3 times: 20 steps (16-20, 26-40) were logged up to 3 times."
    assert said in shown(path)


def test_health_marks_what_follows_a_fault_that_stays(shown):
    said = shown("health", DATA / "pieces" / "a-loss-that-is-two-fifths-higher.csv")
    assert "~~~~" in said and "did not recover" in said


def test_health_names_the_first_step_that_was_not_healthy_and_the_rule_that_found_it(shown):
    said = shown(DATA / "logs" / "console" / "nan.log")
    assert "the first at step 47 (warning); first danger at step 54" in said
    first, worst = (said.index(f"{rule}, step {step}:") for rule, step in (("non_finite", 47), ("entropy_rise", 54)))
    assert first < worst


def test_the_norms_of_all_rows_are_counted_as_read(shown):
    assert "2 rows; 2 of 2 gradient norms read" in shown(DATA / "pieces" / "fairseq1895.log")


@pytest.mark.parametrize("num_rows", [3, 4, 30])
def test_a_trainer_s_closing_summary_is_not_what_a_run_is_judged_from(tmp_path, shown, num_rows):
    rows = [{"loss": 2 - step / 50, "grad_norm": 0.5, "epoch": step / num_rows} for step in range(num_rows)]
    rows[-1]["grad_norm"] = 90.0
    rows.append({"train_runtime": 30.1, "train_loss": 1.7, "epoch": 1.0})
    (tmp_path / "a.log").write_text("".join(f"{row}\n" for row in rows))
    code = 0 if num_rows > 3 else 2  # too short to judge
    assert f"Judged from {num_rows} rows of grad_norm, loss." in shown(tmp_path / "a.log", code=code)


def test_health_says_why_no_rule_found_a_spike_of_the_first_steps(shown):
    for command in ("report", "health"):
        said = shown(command, DATA / "logs" / "console" / "first.log")
        assert "Step 1: gradient norm 903" in said and "The spike at step 1 is in the first 10 steps" in said
        assert "the first 10 steps" not in shown(command, DATA / "logs" / "console" / "last.log")


def diagnosed(tmp_path, rows):
    (tmp_path / "run.jsonl").write_text(
        "".join(json.dumps({"step": step} | row) + "\n" for step, row in enumerate(rows))
    )
    return read_run(tmp_path / "run.jsonl").diagnoses[0]


def fitted(step):
    return 2.0 * 0.95**step + 0.05


@pytest.mark.parametrize(
    ("norm", "loss", "is_fault"),
    [
        (lambda step: 1.0 if step < 60 else 1e-5, lambda step: max(fitted(step), 0.8), True),
        (lambda step: 0.93**step, lambda step: 2.0 * 0.93**step, False),
        (lambda step: 1.0 if step < 60 else 0.2, lambda step: max(fitted(step), 0.8), False),
    ],
    ids=["norms alone", "with the loss", "a little"],
)
def test_a_gradient_that_vanishes_while_the_loss_stays_is_a_fault(tmp_path, norm, loss, is_fault):
    made = diagnosed(tmp_path, [{"loss": loss(s), "grad_norm": norm(s)} for s in range(160)])
    assert (made.kind == "vanish") == is_fault


@pytest.mark.parametrize(
    ("scale", "kind"),
    [
        (lambda step: 65536.0 if step < 50 else max(65536.0 * 0.5 ** (step - 49), 1.0), "skipped"),
        (lambda step: max(2.0**32 * 0.5**step, 65536.0), ""),
        (lambda step: 65536.0 / (1 + (step > 60)), ""),
    ],
    ids=["lost", "searched", "halved once"],
)
def test_a_loss_scale_that_falls_far_is_a_fault_and_a_scaler_s_search_is_none(tmp_path, scale, kind):
    made = diagnosed(tmp_path, [{"loss": fitted(s), "loss_scale": scale(s)} for s in range(100)])
    assert made.kind == kind and ("from 65,536 at step 49" in made.headline) == bool(kind)


@pytest.mark.parametrize(
    ("evaluation", "kind"),
    [
        (lambda step: fitted(step) + 0.02 * step, "overfit"),
        (lambda step: fitted(step) + 0.1, ""),
        (lambda step: 1.0 + 0.1 * (step // 10 % 2), ""),
    ],
    ids=["gets worse", "falls with it", "scatters"],
)
def test_an_evaluation_that_gets_worse_while_the_loss_falls_is_overfitting(tmp_path, evaluation, kind):
    rows = [{"loss": fitted(s)} | ({"eval_loss": evaluation(s)} if s % 10 == 0 else {}) for s in range(120)]
    made = diagnosed(tmp_path, rows)
    assert made.kind == kind and ("Take the checkpoint of about step" in made.advice) == bool(kind)


def test_a_loss_that_has_stopped_to_fall_is_said_to_be_level(tmp_path):
    made = diagnosed(tmp_path, [{"loss": max(4.0 - 0.1 * step, 2.0) + 0.01 * (step % 3)} for step in range(200)])
    assert "has been level since about step" in made.headline


@pytest.mark.parametrize(
    ("name", "loss", "is_fault"),
    [
        ("loss", lambda step: 0.0 if 40 <= step < 50 else 1.2345, True),
        ("loss", lambda step: round(0.001 * ((step + 1) % 4), 3), False),
        ("d_loss", lambda step: 0.0 if 40 <= step < 50 else 1.2345, False),
    ],
    ids=["of a NaN", "rounded", "a GAN's"],
)
def test_zeros_among_large_losses_are_taken_for_nan(tmp_path, name, loss, is_fault):
    made = diagnosed(tmp_path, [{name: loss(s)} for s in range(100)])
    said = " ".join([made.headline, *made.sentences])
    assert ("exactly 0 at steps 40-49" in said) == is_fault and ("exactly 0" in said) == is_fault
    assert "rose" not in said


def test_an_evaluation_s_few_rewards_do_not_hide_the_loss(tmp_path):
    made = diagnosed(tmp_path, [{"loss": fitted(s)} | ({"reward": 1.0} if s % 20 == 0 else {}) for s in range(80)])
    assert made.headline.startswith("loss went from 2.05")


def test_a_loss_below_0_that_rises_after_a_spike_has_not_held(tmp_path):
    rows = [{"loss": -3.0 + 0.01 * (s % 3), "grad_norm": 1.0 + 0.01 * (s % 5)} for s in range(120)]
    rows[60]["grad_norm"] = 500.0
    for row in rows[61:80]:
        row["loss"] += 2.0
    said = " ".join(diagnosed(tmp_path, rows).sentences)
    assert "Loss rose from -3 to" in said and "held" not in said


def test_a_step_that_is_logged_twice_at_the_end_of_an_epoch_is_no_resume(tmp_path, shown):
    steps = [*range(1, 21), *range(20, 41), *range(40, 61)]
    path = tmp_path / "train.jsonl"
    rows = [{"step": step, "loss": 2.0 - row / 100} for row, step in enumerate(steps)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = shown(path)
    assert "2 steps (20, 40) were logged twice." in said and "resumed" not in said
