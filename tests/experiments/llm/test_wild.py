# SPDX-License-Identifier: Apache-2.0
"""The table of `wild`, from runs on disk."""

from lab.experiments.llm import wild
from tests.experiments.conftest import write_lines, write_steps, write_suite
from tests.report.builder import make_culprit, make_event


def write(folder, norms, events=()):
    write_steps(
        folder,
        (
            {"actor/grad_norm_max": norm, "critic/score/mean": 0.1 * step, "response_length/mean": 9}
            for step, norm in enumerate(norms, start=1)
        ),
    )
    write_lines(folder / "gradloc" / "events.jsonl", events)


def test_a_row_says_what_spiked_and_a_healthy_run_that_nothing_did(tmp_path, capsys):
    event = make_event(2, [make_culprit(3), make_culprit(5)])
    write(tmp_path / "healthy-seed1", [3.0, 5.0, 4.0])
    write(tmp_path / "odd-seed1", [3.0, 90.0, 4.0], [event])
    write_suite(tmp_path, healthy_seed1=0, odd_seed1=0, late_seed1=1)
    assert wild.main([str(tmp_path)]) == 0
    assert "without late-seed1, which did not end well" in capsys.readouterr().out
    head, _, healthy, odd = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (tmp_path / "summary.md").read_text().splitlines()
    )
    row = dict(zip(head, odd, strict=True))
    assert dict(zip(head, healthy, strict=True))["first event: norm / threshold"] == "no event"
    assert (row["arm"], row["norm: median"], row["largest (step)"], row["events"]) == ("odd", "4", "90 (2)", "1")
    assert row["minutes"] == "1.5"
    assert row["reward: first, last"] == "0.1, 0.3"
    assert row["named"].startswith("2 in 1: ")
    assert row["certificate"] == event["certificate"]["verdict"] and row["done"] == event["action"]["taken"]
