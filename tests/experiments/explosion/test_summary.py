# SPDX-License-Identifier: Apache-2.0
"""The explosion's summary: every number of the table against one computed by hand."""

import json
import math
import statistics

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")

from lab.experiments import suite, summaries  # noqa: E402
from lab.experiments.explosion import summary  # noqa: E402
from tests.experiments.conftest import write_lines, write_steps, write_suite  # noqa: E402

NORMS = {"healthy": [1.0, 2.0, 1.5, 1.2, 1.1, 1.3], "loud": [1.0, 2.0, 14.0, 250.0, 1.1, 1.3]}
PLANTED = [{"step": step, "uid": "u", "rollout_index": 2, "positions": [5], "token_ids": [9]} for step in (3, 4)]
EVENT = {
    "step": {"global_step": 4},
    "certificate": {"norm_after": 1.4551},
    "culprits": [
        {
            "positions": [5],
            "sequence_id": "u:2",
            "values": {"log_prob": 0.0, "old_log_prob_used": -math.log(93_000.4)},
            "cause": {"label": "token_mismatch"},
        }
    ],
}


def weights(name, step):
    """Two parameters whose values are known for each run and step."""
    slope = {"healthy": 1.0, "loud": 3.0}[name]
    return {
        "b": np.full((2, 2), 0.1 * step * slope, dtype=np.float32),
        "a": np.array([slope * step, -1.0], dtype=np.float32),
    }


ANSWERS = {
    "healthy": [("p", 1.0), ("p", 1.0), ("q", 1.0), ("q", 0.2), ("r", 0.2), ("r", 0.2)],
    "loud": [("p", 1.0), ("p", 0.0), ("q", 1.0), ("q", 1.0), ("r", 0.2), ("r", 0.0)],
}


def write_run(folder, name, spike_metrics=None, event=EVENT, limit=1e9):
    from safetensors.numpy import save_file

    steps = [{"actor/grad_norm_max": norm, "critic/score/mean": 0.1} for norm in NORMS[name]]
    steps[3] |= spike_metrics or {}
    write_steps(folder, steps)
    (folder / "knobs.json").write_text(json.dumps({"max_grad_norm": limit}))
    write_lines(folder / "planted.jsonl", PLANTED)
    if event is not None:
        write_lines(folder / "gradloc" / "events.jsonl", [event])
    (folder / "weights").mkdir()
    for step in range(len(NORMS[name]) + 1):
        save_file(weights(name, step), folder / "weights" / f"{step + 1:04d}.safetensors")
    answers = ({"input": text, "score": score} for text, score in ANSWERS[name])
    write_lines(folder / "validation" / "6.jsonl", answers)
    # An older one that must not be read.
    write_lines(folder / "validation" / "5.jsonl", [{"input": "p", "score": 0.9}])


@pytest.fixture
def suite_dir(tmp_path):
    write_run(tmp_path / "healthy", "healthy", event=None)
    write_run(tmp_path / "loud", "loud")
    write_suite(tmp_path, healthy=0, loud=0, broken=1)
    return tmp_path


def cells_of(suite_dir, name):
    """A run's cells, by column."""
    runs = [(suite_dir / cell["folder"], cell) for cell in suite.read(suite_dir)["cells"] if cell["exit_code"] == 0]
    ((head, *rows),) = summary.make(runs, suite_dir)
    return dict(zip(head, next(row for row in rows if row[0] == name), strict=True))


def slow_distance(one, other):
    """The L2 norm, element by element."""
    pairs = (zip(one[name].ravel().tolist(), other[name].ravel().tolist(), strict=True) for name in one)
    return math.sqrt(sum((a - b) ** 2 for parts in pairs for a, b in parts))


def test_every_number_of_the_table_is_what_its_legend_says(suite_dir):
    cells = cells_of(suite_dir, "loud")
    questions = [0.5, 1.0, 0.1]
    error = statistics.stdev(questions) / math.sqrt(3)
    assert cells["final reward"] == f"{statistics.mean(questions):.2f} ± {error:.2f}"
    differences = [0.5 - 1.0, 1.0 - 0.6, 0.1 - 0.2]
    error = statistics.stdev(differences) / math.sqrt(3)
    assert cells["against twin"] == f"{statistics.mean(differences):+.2f} ± {error:.2f}"
    assert cells["norm before"] == "1.5" and cells["warning"] == "14" and cells["spike"] == "250"
    assert cells["named"] == "token_mismatch, ratio 93 000, as planted"
    assert cells["done at the spike"] == "nothing"
    start, end = (weights("healthy", step) for step in (0, 6))
    away = slow_distance(weights("loud", 6), end) / slow_distance(end, start)
    assert cells["from twin"] == f"{away:.0%}"
    assert cells["norm without it"] == "1.46"
    two_steps = slow_distance(weights("loud", 5), weights("loud", 3))
    twins_two = slow_distance(weights("healthy", 5), weights("healthy", 3))
    assert cells["moved at the spike"] == f"{two_steps / twins_two:.0%}"
    lately = slow_distance(weights("loud", 6), weights("loud", 1))
    twins_lately = slow_distance(end, weights("healthy", 1))
    assert cells["moved in the last 5"] == f"{lately / twins_lately:.0%}"


def test_the_healthy_twin_is_at_no_distance_from_itself(suite_dir):
    cells = cells_of(suite_dir, "healthy")
    assert (cells["from twin"], cells["moved in the last 5"]) == ("0%", "100%")
    assert cells["against twin"] == "+0.00 ± 0.00"
    assert cells["named"] == "no event"


@pytest.mark.parametrize(
    "metrics, limit, said",
    [
        ({"gradloc/mask": 1.0}, 1e9, "step without the culprit"),
        ({"gradloc/skip": 1.0}, 1e9, "step skipped"),
        ({"gradloc/skip_step/skipped": 1.0}, 1e9, "step skipped"),
        ({"gradloc/layer_clip/scale_min": 0.004}, 1e9, "layers scaled by down to 0.004"),
        ({"gradloc/token_clip/share": 0.001}, 1e9, "token left out"),
        ({"actor/pg_clipfrac": 0.002}, 1e9, "ratios clipped"),
        ({}, 1.0, "scaled by 0.004"),
        ({"gradloc/mask": 0.0, "gradloc/layer_clip/scale_min": 1.0}, 1e9, "nothing"),
    ],
)
def test_what_a_safeguard_did_is_read_from_its_metrics(tmp_path, metrics, limit, said):
    write_run(tmp_path / "run", "loud", metrics, limit=limit)
    assert summary.safeguards_at(summary.read(tmp_path / "run", "loud"), 4) == said


@pytest.mark.parametrize("change", [{"positions": [6]}, {"positions": [5, 6]}, {"sequence_id": "u:1"}])
def test_another_token_is_not_as_planted(tmp_path, change):
    event = {**EVENT, "culprits": [{**EVENT["culprits"][0], **change}]}
    write_run(tmp_path / "run", "loud", event=event)
    assert summary.culprit_at(summary.read(tmp_path / "run", "loud"), 4) == "token_mismatch, ratio 93 000"


def test_an_event_without_a_culprit_is_named_as_such(tmp_path):
    write_run(tmp_path / "run", "loud", event={**EVENT, "culprits": []})
    assert summary.culprit_at(summary.read(tmp_path / "run", "loud"), 4) == "no culprit"


def test_without_a_twin_of_the_same_seed_nothing_is_compared(suite_dir):
    (suite_dir / "healthy").rename(suite_dir / "healthy-seed3")
    write_suite(suite_dir, healthy_seed3=0, loud=0)
    cells = cells_of(suite_dir, "loud")
    columns = ("against twin", "from twin", "moved at the spike", "moved in the last 5")
    assert [cells[column] for column in columns] == ["-"] * 4


def test_the_summary_prints_the_table_and_writes_plot_and_markdown(suite_dir, capsys):
    assert summaries.main([summary.__name__, str(suite_dir)]) == 0
    said = capsys.readouterr().out
    assert "token_mismatch, ratio 93 000, as planted" in said and "without broken" in said
    assert (suite_dir / "summary.png").read_bytes()[:4] == b"\x89PNG"
    assert (suite_dir / "summary.md").read_text().startswith("| arm | final reward |")


def test_a_run_that_was_cut_off_is_one_sentence(suite_dir, capsys):
    (suite_dir / "loud" / "planted.jsonl").write_text('{"step"')
    assert summaries.main([summary.__name__, str(suite_dir)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("summary: line 1 of ") and "planted.jsonl is not JSON" in said
