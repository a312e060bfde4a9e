# SPDX-License-Identifier: Apache-2.0
"""``gradloc buckets``: what it reads, what it writes, and what it says when it cannot."""

import csv
import json
import struct
from pathlib import Path

import pytest

from gradloc.report.cli import main
from gradloc.report.commands import buckets
from gradloc.report.figures.buckets import FIGURES
from gradloc.report.runs.buckets import from_metrics, read_analyses
from tests.report.buckets.builder import DEVIATIONS, metrics, write_record, write_table
from tests.report.builder import make_metrics, write_run

pytestmark = pytest.mark.full


NAMES = ["summary", "plots", "loss_plots", "reward_std", "normed_grads"]


def expected_files(step):
    return {
        *(f"gradient_analysis_{name}_step_{step}.png" for name in NAMES),
        f"gradient_analysis_metrics_step_{step}.json",
        f"gradient_analysis_bucket_rv_table_step_{step}.csv",
    }


def size(png):
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_the_guides_seven_files_are_written_for_each_step_the_same_bytes_each_time(tmp_path, shown):
    write_record(tmp_path, 51, scale=2.0)
    out, again = tmp_path / "out", tmp_path / "again"
    assert len(shown("buckets", tmp_path, "--output-dir", out).splitlines()) == 7
    assert {path.name for path in out.iterdir()} == expected_files(51)
    for path in out.glob("*.png"):
        assert min(size(path)) > 150
    shown("buckets", tmp_path, "--output-dir", again)
    assert all(path.read_bytes() == (again / path.name).read_bytes() for path in out.iterdir())
    data = json.loads((out / "gradient_analysis_metrics_step_51.json").read_text())
    assert list(data["buckets"]) == ["bucket_1", "bucket_2", "bucket_10", "all"]
    assert data["buckets"]["bucket_2"]["task"] == 4.0
    with (out / "gradient_analysis_bucket_rv_table_step_51.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["bucket", "reward_std"] and len(rows) == 6
    told = json.loads(shown("buckets", tmp_path, "--json"))["steps"]
    assert [{name: step.pop(name) for name in data} for step in told] == [data]
    assert [{name: str(value) for name, value in group.items()} for group in told[0]["groups"]] == rows


def test_steps_are_listed_and_chosen_and_the_default_folder_is_the_guides(tmp_path, monkeypatch, shown):
    monkeypatch.chdir(tmp_path)
    for step in (1, 51, 101):
        write_record(tmp_path / "run-7", step)
    said = shown("buckets", "run-7", "--list-steps")
    assert said.splitlines() == [f"step {step}: 3 buckets, 24 rows" for step in (1, 51, 101)]
    shown("buckets", "run-7", "--step", "51")
    assert {path.name for path in Path("gradient_analysis_outputs/run-7").iterdir()} == expected_files(51)


def test_a_run_without_our_files_is_read_from_verls_log(tmp_path):
    steps = {1: metrics(), 2: {"actor/grad_norm": 1.0}, 51: metrics(scale=2.0)}
    write_run(tmp_path, metrics=[{"step": step, "data": row} for step, row in steps.items()])
    write_table(tmp_path, 51)
    analyses, notes = read_analyses(tmp_path)
    assert list(analyses) == [1, 51]
    assert not notes
    assert analyses[1].table == []
    assert analyses[51].table == [(b, d) for b, ds in DEVIATIONS.items() for d in ds]
    assert analyses[51].cosines["bucket_2", "bucket_1"] == -0.25


def test_a_file_that_was_cut_off_is_noted_and_the_others_are_read(tmp_path, capsys):
    write_record(tmp_path, 1)
    broken = write_record(tmp_path, 51)
    broken.write_text(broken.read_text()[:100])
    assert main(["buckets", str(tmp_path), "--list-steps"]) == 0
    said = capsys.readouterr()
    assert "step_51.json cannot be read" in said.err and said.out == "step 1: 3 buckets, 24 rows\n"


LACKING = [
    {name: value for name, value in metrics().items() if "/all/" not in name},
    {name: value for name, value in metrics().items() if "/loss/" not in name},
    {name: (0.0 if "reward_std" in name else v) for name, v in metrics().items()},
    {**metrics(), "grad_norm/bucket_1/task": float("nan")},
    {name: (0.0 if name.endswith("/task") else v) for name, v in metrics().items()},
]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(metrics(terms=("task",)), marks=pytest.mark.slow),
        {"grad_norm/bucket_1/task": 1.0},
        *(pytest.param(row, marks=pytest.mark.slow) for row in LACKING),
    ],
    ids=["task only", "next to nothing", "no all", "no losses", "rewards all equal", "NaN", "zeros"],
)
def test_figures_are_drawn_of_whatever_there_is(tmp_path, row):
    written = buckets.write(from_metrics(1, row), tmp_path)
    assert {path.name for path in written} == expected_files(1)
    data = json.loads((tmp_path / "gradient_analysis_metrics_step_1.json").read_text())
    assert data["step"] == 1


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["@run", "--step", "2"], "step 2 was not analysed; those that were: 1, 51."),
        (["@empty"], "holds no gradient analysis: none was due, or trainer.gradient_analysis_mode"),
        (["@run/nothing"], "is not a folder: name the folder of a run."),
        ([], "name one run: its folder, or --wandb-path ENTITY/PROJECT/RUN_ID."),
        (["@run", "--wandb-path", "a/b/c"], "name one run: its folder, or --wandb-path"),
        (["@run", "--mode", "ppo"], "name no run."),
        (["--wandb-path", "a/b"], "--wandb-path a/b must be ENTITY/PROJECT/RUN_ID."),
        (["--mode", "ppo", "--step0-dir", "@empty"], "also needs --step20-dir, --step40-dir, --out."),
        (
            ["--mode=ppo", "--step0-dir=@empty", "--step20-dir=@run", "--step40-dir=@run", "--out=x"],
            "holds 0 gradient_analysis_metrics_step_*.json: name a folder with one",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_said_in_a_sentence(tmp_path, refused, arguments, sentence):
    write_record(tmp_path / "run", 1)
    write_record(tmp_path / "run", 51)
    (tmp_path / "empty").mkdir()
    for word, place in {"@run": tmp_path / "run", "@empty": tmp_path / "empty"}.items():
        arguments = [argument.replace(word, str(place)) for argument in arguments]
    assert sentence in refused("buckets", *arguments)


def test_three_steps_make_one_figure_of_their_common_buckets(tmp_path, monkeypatch, shown):
    monkeypatch.setattr("gradloc.report.figures.buckets.FIGURES", {})  # each step's own are not what is drawn here
    out, names = tmp_path / "figures" / "ppo.png", []
    for step in (0, 20, 40):
        run, files = tmp_path / f"run{step}", tmp_path / f"files{step}"
        write_record(run, step, terms=("task",) if step == 0 else ("task", "kl"))
        shown("buckets", run, "--output-dir", files)
        names.append(f"--step{step}-dir={files}")
    shown("buckets", "--mode", "ppo", *names, "--out", out)
    assert min(size(out)) > 200
    assert (
        shown("buckets", "--mode", "ppo", *names, "--out", out.with_name("other")) == f"{out.with_name('other.png')}\n"
    )


def test_steps_with_no_common_bucket_are_refused(tmp_path, refused):
    names = []
    for step in (0, 20, 40):
        data = {"step": step, "buckets": {f"bucket_{step}": {"task": 1.0}}, "task_cosines": {}}
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / "metrics.json").write_text(json.dumps(data))
        names.append(f"--step{step}-dir={tmp_path / str(step)}")
    said = refused("buckets", "--mode", "grpo", *names, "--out", tmp_path / "x.png")
    assert "the three steps have no bucket in common." in said


def test_the_html_report_shows_the_same_figures(tmp_path, shown, monkeypatch):
    drawn = {name: of for name, of in FIGURES.items() if of[0] == "Per sample and per token"}
    monkeypatch.setattr("gradloc.report.figures.buckets.FIGURES", drawn)  # one of them: drawing is most of the time
    for step in (1, 51):
        write_record(tmp_path, step)
    write_run(tmp_path, metrics=make_metrics(60))
    shown(tmp_path, "-o", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "Gradient by reward variance" in text
    assert text.index("Step 51: 3 buckets of 24 rows") < text.index("Step 1: 3 buckets of 24 rows")
    assert text.count('aria-label="Per sample and per token"') == 4  # region and picture, two steps
    assert "<image" not in text
