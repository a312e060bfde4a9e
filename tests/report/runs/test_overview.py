# SPDX-License-Identifier: Apache-2.0
"""What each main metric of a run did, as the terminal, the page, Markdown and JSON show it."""

import json
import math
import re

import pytest

from gradloc.report.runs.overview import Course, overview
from gradloc.report.runs.run import read_run


@pytest.fixture
def log(tmp_path):
    """A log of 60 steps: a loss with a peak and a NaN, every tenth step's validation, a reward that is always 0."""
    path = tmp_path / "train.jsonl"
    with path.open("w") as sink:
        for step in range(60):
            loss = {30: 9.5, 59: math.nan}.get(step, 3.0 - 0.02 * step)
            row = {"step": step, "loss": loss, "lr": 1e-3, "reward/format": 0.0}
            sink.write(json.dumps(row | ({"eval_loss": 3.5 - 0.01 * step} if step % 10 == 0 else {})) + "\n")
    return path


def test_every_way_to_show_a_log_has_the_same_numbers(log, shown, tmp_path):
    loss, evaluation = json.loads(shown(log, "--json"))["diagnoses"][0]["metrics"]
    assert loss == {
        "name": "loss",
        "rows": 60,
        "not_finite": 1,
        "first": 3.0,
        "lowest": pytest.approx(1.84),
        "lowest_at": 58,
        "highest": 9.5,
        "highest_at": 30,
        "last": "NaN",
    }
    assert (evaluation["name"], evaluation["rows"], evaluation["last"]) == ("eval_loss", 6, 3.0)
    row = ["loss", "60, 1 NaN/∞", "3", "1.84", "58", "9.5", "30", "NaN"]
    assert " ".join(row) in re.sub(" +", " ", shown(log))
    assert "| " + " | ".join(row) + " |" in shown(log, "--format", "md")
    page = tmp_path / "page.html"
    shown(log, "-o", page)
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page.read_text(encoding="utf-8"))
    assert cells[:8] == row


def test_a_page_draws_the_losses_of_a_log_without_norms_to_its_last_step(log, shown, tmp_path):
    page = tmp_path / "page.html"
    shown(log, "-o", page)
    chart = json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page.read_text())[1])["charts"]
    assert [panel["title"] for panel in chart["run"]["panels"]] == ["loss", "eval_loss"]
    assert chart["run"]["bands"][-1][1] == 59


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([1.0, 2.0, 3.0, 4.0], "▁▃▆█"),
        ([1.0, 10.0, 100.0], "▁▅█"),
        ([5.0, 5.0], "▄▄"),
        ([math.inf, math.nan], "××"),
        ([4.0, 4.0, 1.0, 1.0, 2.5, 2.5, math.nan, 1.0], "█▁▅×"),
    ],
    ids=["rises", "by factors", "constant", "never finite", "parts"],
)
def test_a_course_is_drawn_from_its_lowest_to_its_highest(values, bars):
    assert Course("loss", [*enumerate(values)]).bars(4) == bars


@pytest.mark.parametrize("names", ["step,G_GAN,D", "learning_rate_0.1,learning_rate_0.5"])
def test_names_that_say_little_are_shown_where_they_are_all_that_there_is(tmp_path, names):
    rows = (",".join(str(at if name == "step" else 2.0 + 0.9**at) for name in names.split(",")) for at in range(60))
    (tmp_path / "run.csv").write_text("\n".join([names, *rows]) + "\n")
    (run,) = read_run(tmp_path / "run.csv").runs
    assert {course.name for course in overview(run.metrics)} == {*names.split(",")} - {"step"}
