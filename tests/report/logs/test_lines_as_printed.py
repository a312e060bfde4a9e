# SPDX-License-Identifier: Apache-2.0
"""Lines as loops of all kinds print them: one run, its steps and its spike, whatever else the lines say."""

import json
import os
import re
import subprocess

import pytest

from gradloc.report.logs.formats import read
from gradloc.report.runs.diagnosis import diagnose
from gradloc.report.runs.run import read_run

NUM, AT = 60, 40


def norms():
    """Of each step from 1: about a half, and 1,903 at step 40."""
    return [(step, 1903.0 if step == AT else 0.5 + (step * 7 % 11) / 100) for step in range(1, NUM + 1)]


def plain(line):
    return [line.format(step=step, norm=norm) for step, norm in norms()]


@pytest.fixture
def log(tmp_path):
    return tmp_path / "a.log"


def runs_in(log, lines):
    """The runs of a log with these lines."""
    log.write_text("".join(f"{line}\n" for line in lines))
    return read([log])[0]


LOSS = "step {step} | loss: 2.0 | grad_norm: {norm}"


@pytest.mark.parametrize("has_bar", [True, False])
def test_a_trainer_s_bar_says_the_step_of_its_lines_and_a_counted_one_names_no_checkpoint(log, has_bar):
    bar = " 40%|####      | {}/600 [00:40<01:00, 10.0it/s]\n" if has_bar else ""
    dicts = [
        f"{{'loss': {2 + (s > AT)}, 'grad_norm': {norm}, 'learning_rate': 1e-05, 'epoch': {s / 60:.2f}}}"
        for s, norm in norms()
    ]
    for step in (100, 300, 600):
        (log.parent / f"checkpoint-{step}").mkdir()
        (log.parent / f"checkpoint-{step}" / "weights").write_text("x")
        os.utime(log.parent / f"checkpoint-{step}", (0, 0))
    (run,) = runs_in(log, (bar.format(10 * at) + line for at, line in enumerate(dicts, 1)))
    said = diagnose(run)
    assert said.worst.peak.step == (400 if has_bar else 40) and run.unit == ("step" if has_bar else "row")
    assert ("checkpoint-300" in said.command) == has_bar and "checkpoint-100" not in said.command


@pytest.mark.parametrize("num_lines", [1, 2])
def test_steps_are_counted_as_long_as_one_process_s_bar_does_not_say_them(log, num_lines):
    line = "\n".join(["(A pid=1) {{'grad_norm': {n}}}", *["(B pid=2) {{'grad_norm': {n}}}"] * num_lines])
    bars = (f" 40%|####      | {10 * s}/600 [00:40<01:00, 10.0it/s]\n{line.format(n=n)}" for s, n in norms())
    assert {run.unit for run in runs_in(log, bars)} == {"row" if num_lines == 2 else "step"}


def test_where_a_log_gives_no_step_each_view_names_the_row(log, shown):
    log.write_text("".join(f"{{'loss': {2 + s // AT}, 'grad_norm': {n}, 'epoch': {s / 60:.2f}}}\n" for s, n in norms()))
    views = [(), ("--format", "md"), ("--json",)]
    said = [shown(log, *view) for view in views] + [shown(command, log) for command in ("health", "trigger")]
    assert all("row 40" in each.lower() for each in said[:4]) and "rows 1 to 60" in said[4]
    assert not re.search(r"\bsteps? \d", "".join(said), re.IGNORECASE)
    assert "before row 40 (epoch 0.67). The log gives no steps, so find it by its epoch" in said[0]
    units = [json.loads(said[2])["diagnoses"][0], *(json.loads(shown(c, log, "--json")) for c in ("health", "trigger"))]
    assert {each["unit"] for each in units} == {"row"}
    page = log.parent / "page.html"
    shown(log, "-o", page)
    assert '"unit":"row","axis":"row"' in page.read_text()
    (log.parent / "b.log").write_text("\n".join(plain(LOSS)))
    assert "cannot be compared" in shown("compare", log, log.parent / "b.log")


def test_a_loop_of_one_s_own_is_neither_verl_nor_a_trainer(log):
    log.write_text("\n".join(plain("at {step} it was {norm}")))
    run = read_run(log, pattern=r"at (?P<step>\d+) it was (?P<value>\S+)").runs[0]
    assert run.trainer == "other" and not diagnose(run).command
    (run,) = runs_in(log, plain('{{"num_updates": {step}, "gnorm": {norm}, "loss": 2.0}}'))
    assert run.trainer == "other"


def test_what_comes_next_reads_the_log_as_it_was_read(tmp_path, log, shown, refused):
    log.write_text("\n".join(plain("step {step} | loss: 2.0 | size: {norm}")))
    assert f"gradloc health {log} --metric size" in shown(log, "--metric", "size")
    assert "--metric" in shown("health", log) and "--metrics" not in shown("health", log)
    log.write_text("step 1 | speed: 2.0 | reward_std: 0.5\nstep 2 | speed: 2.0 | reward_std: 0.5\n")
    assert "--metric" in refused("health", log) and "--metrics" not in refused("health", log)
    runs_in(tmp_path / "b.log", (LOSS.format(step=step, norm=0.5) for step, _ in norms()))
    runs_in(log, plain(LOSS))
    assert f"gradloc health {log}\n" in shown(tmp_path / "b.log", log)


def test_runs_of_one_name_in_two_folders_are_two_in_the_trigger_s_list(tmp_path, shown):
    for folder, factor in (("a", 1), ("b", 1000)):
        (tmp_path / folder).mkdir()
        for seed in (1, 2):
            rows = (LOSS.format(step=step, norm=seed * norm / factor) for step, norm in norms())
            runs_in(tmp_path / folder / f"s{seed}.log", rows)
    said = shown("trigger", tmp_path / "a", tmp_path / "b", tmp_path / "b")
    assert said.count("The rule flagged") == 6


def test_output_goes_into_a_pipe(tmp_path, log, shown):
    runs_in(log, plain(LOSS))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        shown(log, "--format", "md", "-o", pipe)
        assert "Step 40" in reader.stdout.read() and pipe.is_fifo()


def test_an_export_of_a_log_says_what_happened(log, shown):
    runs_in(log, plain(LOSS))
    (said,) = json.loads(shown(log, "--format", "json"))["diagnoses"]
    assert said["kind"] == "back" and said["headline"].startswith("Step 40")


def test_what_no_rule_judges_is_said_once_by_both(tmp_path, shown):
    log = tmp_path / "a.log"
    log.write_text("\n".join(f"step {step}: loss 2.{step % 3}01" for step in range(1, 41)))
    assert "did not fall" in shown("health", log) and "not judged here" not in shown(log)
    log.write_text("\n".join(f"step {step}: loss 2.{step}" for step in range(1, 6)))
    for command in ([log], ["health", log]):
        assert shown(*command, code=2).count("Too short to judge") == 1


def test_a_step_between_a_name_and_its_value_leaves_the_line_s_other_values(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("\n".join(f"loss at step {step}: 2.{step}, grad_norm: 0.{step}" for step in range(1, 31)))
    metrics = read_run(log).runs[0].metrics
    assert metrics.norms[:2] == [0.1, 0.2] and [value for _, value in metrics.known("loss")][:2] == [2.1, 2.2]
    log.write_text("\n".join(f"Cost after epoch {epoch}: 0.{epoch}" for epoch in range(1, 31)))
    assert read_run(log).runs[0].unit == "epoch"


@pytest.mark.parametrize(("head", "line"), [("", "step {} loss: 2.5 grad_norm: {}"), ("step,grad_norm\n", "{},{}")])
def test_only_a_number_that_the_file_s_end_may_have_cut_is_left_out(head, line, log):
    rows = "".join(line.format(step, f"0.48{step}1\n") for step in range(1, 10))

    def last_norm(end):
        log.write_text(head + rows + line.format(10, end))
        return read_run(log).runs[0].metrics.norms[-1]

    assert last_norm("0.4712") == 0.4712 and last_norm("0.47") == 0.4891
    assert head or last_norm("0.47 | lr: 1e-0") == 0.47


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ids.txt", "\n".join(map(str, range(100, 140)))),
        ("grid.csv", "lr,device,final_loss\n" + "".join(f"0.{at},cuda,1.{at}\n" for at in range(10, 40))),
        ("notes.txt", "\n".join(f"version: 1.{at}" for at in range(5))),
    ],
    ids=["whole numbers", "a row for each experiment", "too few"],
)
def test_numbers_that_are_no_training_are_refused(tmp_path, refused, name, text):
    (tmp_path / name).write_text(text)
    assert name in refused(tmp_path / name)


def test_clearml_s_description_of_its_task_is_no_log(tmp_path):
    (tmp_path / "task.json").write_text(json.dumps({"diff": "{'loss': 2.0, 'grad_norm': nan, 'epoch': 1.0}"}))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 2.5}}\n' for step in range(9)))
    assert [run.source for run in read_run(tmp_path).runs] == ["metrics.jsonl"]
