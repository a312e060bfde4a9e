# SPDX-License-Identifier: Apache-2.0
"""kk-demo's table and plot, from folders like those that a suite leaves."""

import json
import statistics

import pytest

from experiments.kk import summary


def make_run(folder, rewards, final):
    folder.mkdir()
    lines = [{"step": i + 1, "data": {summary.SCORE: r}} for i, r in enumerate(rewards)]
    for key, value in final.items():
        lines[-1]["data"][f"val-aux/kk_logic2/{key}/mean@4"] = value
        lines[-1]["data"][f"val-aux/kk_logic2/{key}/std@4"] = 99.0
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)


@pytest.fixture
def suite_dir(tmp_path):
    """Two arms; one run of the second one failed."""
    cells = []
    for arm, seed, code in (("one", 1, 0), ("one", 2, 0), ("other", 1, 0), ("other", 2, 1)):
        name = f"{arm}-seed{seed}"
        cells.append({"arm": arm, "seed": seed, "folder": name, "exit_code": code})
        if code == 0:
            final = {"reward": float(seed), "acc": 0.5, "wrong_answer": 0.25, "format_error": 0.25}
            make_run(tmp_path / name, [-3.0, *[seed + 0.5] * summary.LAST_STEPS], final)
    (tmp_path / "suite.json").write_text(json.dumps({"experiment": "kk-demo", "cells": cells}))
    return tmp_path


def test_the_table_has_means_and_spreads_over_seeds(suite_dir, capsys):
    assert summary.main([str(suite_dir)]) == 0
    (head, one, other), failed = summary.read([suite_dir])
    assert failed == ["other-seed2"]
    spread = statistics.stdev([1.0, 2.0])
    assert one == ["one", "2", f"2.00 ± {spread:.2f}", f"1.50 ± {spread:.2f}", *one[4:]]
    assert one[4:] == ["0.50 ± 0.00", "0.25 ± 0.00", "0.25 ± 0.00"]
    assert other == ["other", "1", "1.50", "1.00", "0.50", "0.25", "0.25"]
    said = capsys.readouterr().out
    assert "without other-seed2, which did not end well" in said
    assert (suite_dir / "summary.md").read_text().count("\n") == 4
    assert (suite_dir / "summary.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_validation_leaves_a_dash(suite_dir):
    make_run(suite_dir / "more", [1.0, 2.0], {})
    one = summary.read_run(suite_dir / "more", "one", 1)
    assert summary.table([one, one])[1] == ["one", "2", "1.50 ± 0.00", "-", "-", "-", "-"]


def test_two_drawings_are_the_same_bytes(suite_dir):
    drawn = []
    for _ in range(2):
        summary.read([suite_dir])
        drawn.append((suite_dir / "summary.png").read_bytes())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda folder: (folder / "suite.json").unlink(), "has no suite.json"),
        (lambda folder: (folder / "one-seed1" / "metrics.jsonl").unlink(), "cannot be read"),
        (lambda folder: (folder / "one-seed1" / "metrics.jsonl").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "one-seed1" / "metrics.jsonl").write_text('{"data": {}}\n'), "has no step"),
    ],
)
def test_a_suite_that_cannot_be_read_is_refused_with_one_sentence(suite_dir, capsys, damage, said):
    damage(suite_dir)
    assert summary.main([str(suite_dir)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("summary: ") and said in error and len(error.splitlines()) == 1


def test_nothing_to_compare_is_said(suite_dir, capsys):
    suite = json.loads((suite_dir / "suite.json").read_text())
    for cell in suite["cells"]:
        cell["exit_code"] = 1
    (suite_dir / "suite.json").write_text(json.dumps(suite))
    assert summary.main([str(suite_dir)]) == 1
    assert "nothing to compare" in capsys.readouterr().err
