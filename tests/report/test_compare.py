# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side: what each has, and where their spikes meet."""

from gradloc.report.runs.comparison import compare
from gradloc.report.runs.run import read_run
from tests.report.builder import make_event, make_metrics, write_run


def test_two_runs_are_put_side_by_side(tmp_path):
    first = read_run(write_run(tmp_path / "a", [make_event(5)], metrics=make_metrics()))
    second = read_run(write_run(tmp_path / "b", metrics=make_metrics(10, ())))
    found = compare(first, second)
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["steps"] == ["20", "10"]
    assert rows["events"] == ["1", "0"]
    assert rows["causes"] == ["extreme advantage 1", "–"]
    assert rows["gradient norm, largest"][0] == "747"
    assert found.steps == [["5", "747.7 ( is)", "–"]]


def test_two_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = [read_run(write_run(tmp_path / name, [make_event(5)])) for name in "ab"]
    assert compare(*runs).names == ["tests / report (a)", "tests / report (b)"]


def write_log(path, norms, seed=1):
    """A console log that begins with its settings, as verl prints them."""
    lines = [f"{{'data': {{'seed': {seed}}}, 'actor': {{'lr': 1e-06}}}}"]
    lines += [f"step:{at} - actor/grad_norm:{norm}" for at, norm in enumerate(norms, 1)]
    path.write_text("\n".join(lines) + "\n")
    return path


def parted(tmp_path, first, second):
    runs = [read_run(write_log(tmp_path / name, norms)) for name, norms in (("a.log", first), ("b.log", second))]
    return compare(*runs)


def test_two_logs_part_where_any_metric_first_differs(tmp_path):
    norms = [1.0 + at % 5 / 10 for at in range(40)]
    found = parted(tmp_path, norms, [*norms[:30], *(norm + 0.01 for norm in norms[30:])])
    assert found.parted.startswith("The two are the same until step 31, where actor/grad_norm is 1 and 1.01")
    assert parted(tmp_path, norms, norms).parted == "The two are the same in all of their 40 common steps."


def test_two_seeds_part_where_one_leaves_the_scatter_of_their_differences(tmp_path):
    first = [1.0 + at % 5 / 10 for at in range(60)]
    second = [1.05 + at % 7 / 10 for at in range(60)]
    assert parted(tmp_path, first, second).parted.endswith("as two seeds do; no metric leaves that scatter.")
    second[40:] = [norm * 30 for norm in second[40:]]
    assert parted(tmp_path, first, second).parted.startswith("The two part at step 41: actor/grad_norm is 1 and ")


def test_settings_that_differ_are_listed_where_both_logs_hold_theirs(tmp_path):
    runs = [read_run(write_log(tmp_path / f"{seed}.log", [1.0, 2.0], seed)) for seed in (1, 2)]
    assert compare(*runs).settings == [["data.seed", "1", "2"]]
