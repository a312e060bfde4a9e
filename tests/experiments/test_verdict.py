# SPDX-License-Identifier: Apache-2.0
"""The demo's verdict: what it says, and every way in which it says no."""

import json

import pytest

from lab.experiments import verdict
from tests.experiments.conftest import write_lines

PLANTED = {
    "seed": 1,
    "step": 5,
    "uid": "abc",
    "rollout_index": 2,
    "row": 52,
    "num_rows": 64,
    "position": 12,
    "token_id": 21,
}
CULPRIT = {
    "rank": 1,
    "micro_batch": 5,
    "micro_batch_row": 0,
    "sequence_id": "abc:2",
    "positions": [12],
    "token_ids": [21],
    "tokens": [" is"],
    "text_before": "so the answer",
    "text_after": " 60.",
    "advantage": 300000.0,
    "share": 0.99995,
    "cause": {"label": "extreme_advantage"},
}
STEP = {"global_step": 5, "num_mini_batches": 1, "num_micro_batches": 8, "dp_size": 2, "world_size": 2}
EVENT = {
    "step": STEP,
    "verdict": "One token made the step-5 spike.",
    "search": {"strategy": "bisect", "backwards": 24, "seconds": 0.5},
    "culprits": [CULPRIT],
    "certificate": {"verdict": "explained"},
    "action": {"taken": "observe"},
}


def found(**changes):
    """The event with its culprit changed."""
    return {**EVENT, "culprits": [{**CULPRIT, **changes}]}


def at_step(number):
    return {**EVENT, "step": {**STEP, "global_step": number}}


def run_dir(tmp_path, events=(EVENT,), planted=PLANTED):
    if events is not None:
        write_lines(tmp_path / "gradloc" / "events.jsonl", events)
    if planted is not None:
        (tmp_path / "planted.json").write_text(json.dumps(planted))
    return tmp_path


@pytest.mark.parametrize(
    ("left_out", "whose"),
    [((), "rollout 2 of prompt abc"), (("uid", "rollout_index"), "row 52 of the batch")],
    ids=["verl", "TRL, which names no prompts"],
)
def test_the_planted_token_named_alone_and_explained_is_a_yes(tmp_path, capsys, left_out, whose):
    planted = {name: value for name, value in PLANTED.items() if name not in left_out}
    assert verdict.main([str(run_dir(tmp_path, planted=planted))]) == 0
    said = capsys.readouterr().out
    assert "FOUND: the event names exactly the token that was planted" in said
    assert f"step 5, {whose}, response position 12, token id 21 (seed 1)" in said
    for part in (
        EVENT["verdict"],
        "rank 1, micro-batch 5, row 0 of it, response position 12",
        "'so the answer>>> is<<< 60.'",
        "bisect took 24 probes and 0.5 s; action: observe",
    ):
        assert part in said


@pytest.mark.parametrize(
    "events, problem",
    [
        ([], "no event was written"),
        ([at_step(4)], "no event is at step 5"),
        ([EVENT, at_step(7)], "one event was expected, 2 were written"),
        ([{**EVENT, "culprits": []}], "one culprit was expected, 0 are named"),
        ([{**EVENT, "culprits": [CULPRIT, CULPRIT]}], "one culprit was expected, 2"),
        ([found(sequence_id="abc:1")], "sequence_id is abc:1"),
        ([found(positions=[11])], "positions is [11], and [12] was planted"),
        ([found(positions=[12, 13])], "positions is [12, 13]"),
        ([found(token_ids=[22])], "token_ids is [22]"),
        ([found(rank=0)], "rank is 0, and 1 was planted"),
        ([found(micro_batch=4)], "micro_batch is 4"),
        ([found(micro_batch_row=1)], "micro_batch_row is 1"),
        ([{**EVENT, "certificate": {"verdict": "undecided"}}], "the certificate says undecided"),
    ],
)
def test_anything_else_is_a_no_with_its_reason(tmp_path, capsys, events, problem):
    assert verdict.main([str(run_dir(tmp_path, events))]) == 1
    said = capsys.readouterr().out
    assert "NOT FOUND AS PLANTED" in said and problem in said


def test_a_run_without_events_or_without_a_plant_is_a_no(tmp_path, capsys):
    assert verdict.main([str(run_dir(tmp_path, events=None))]) == 1
    assert "no event was written" in capsys.readouterr().out
    (tmp_path / "planted.json").unlink()
    assert verdict.main([str(tmp_path)]) == 1
    assert "nothing was planted" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gradloc/events.jsonl", "planted.json"])
def test_a_file_that_was_cut_off_is_a_no(tmp_path, capsys, name):
    path = run_dir(tmp_path) / name
    path.write_text(path.read_text()[:-20])
    assert verdict.main([str(tmp_path)]) == 1
    assert "is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    "row, num_mini_batches, place", [(0, 1, (0, 0, 0)), (32, 1, (1, 0, 0)), (63, 1, (1, 7, 3)), (16 + 5, 2, (0, 1, 1))]
)
def test_the_row_says_rank_and_micro_batch_of_its_mini_batch(row, num_mini_batches, place):
    step = STEP | {"num_mini_batches": num_mini_batches, "num_micro_batches": 8 // num_mini_batches}
    wanted = verdict.expected({**PLANTED, "row": row}, step)
    assert (wanted["rank"], wanted["micro_batch"], wanted["micro_batch_row"]) == place
