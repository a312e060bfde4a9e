# SPDX-License-Identifier: Apache-2.0
"""kk-demo's table and plot, from folders like those that a suite leaves."""

import statistics

import pytest

from lab.experiments import summaries
from lab.experiments.kk import summary
from tests.experiments.conftest import write_steps, write_suite


def make_run(folder, rewards, final):
    steps = [{summary.SCORE: reward} for reward in rewards]
    for key, value in final.items():
        steps[-1] |= {f"val-aux/kk_logic2/{key}/mean@4": value, f"val-aux/kk_logic2/{key}/std@4": 99.0}
    write_steps(folder, steps)


@pytest.fixture
def suite_dir(tmp_path):
    """Two arms; one run of the second one failed."""
    write_suite(tmp_path, one_seed1=0, one_seed2=0, other_seed1=0, other_seed2=1)
    for name, seed in (("one-seed1", 1), ("one-seed2", 2), ("other-seed1", 1)):
        final = {"reward": float(seed), "acc": 0.5, "wrong_answer": 0.25, "format_error": 0.25}
        make_run(tmp_path / name, [-3.0, *[seed + 0.5] * summary.LAST_STEPS], final)
    return tmp_path


def test_the_table_has_means_and_spreads_over_seeds_and_a_plot_is_drawn(suite_dir, capsys):
    assert summaries.main([summary.__name__, str(suite_dir)]) == 0
    assert "without other-seed2, which did not end well" in capsys.readouterr().out
    lines = (suite_dir / "summary.md").read_text().splitlines()
    spread = f"{statistics.stdev([1.0, 2.0]):.2f}"
    assert lines[2] == f"| one | 2 | 2.00 ± {spread} | 1.50 ± {spread} | 0.50 ± 0.00 | 0.25 ± 0.00 | 0.25 ± 0.00 |"
    assert lines[3:] == ["| other | 1 | 1.50 | 1.00 | 0.50 | 0.25 | 0.25 |"]
    drawn = (suite_dir / "summary.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    summaries.main([summary.__name__, str(suite_dir)])
    assert (suite_dir / "summary.png").read_bytes() == drawn, "the same bytes again"


def test_a_run_without_a_validation_leaves_a_dash(tmp_path):
    make_run(tmp_path / "more", [1.0, 2.0], {})
    ((_, row),) = summary.make([(tmp_path / "more", {"arm": "one"})] * 2, tmp_path)
    assert row == ["one", "2", "1.50 ± 0.00", "-", "-", "-", "-"]
