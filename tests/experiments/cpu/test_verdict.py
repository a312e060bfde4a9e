# SPDX-License-Identifier: Apache-2.0
"""The demo's verdict: what it says, and every way in which it says no."""

import copy
import json

import pytest

from experiments.cpu import verdict

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
EVENT = {
    "step": {
        "global_step": 5,
        "mini_batch": 0,
        "num_mini_batches": 1,
        "num_micro_batches": 8,
        "dp_size": 2,
        "world_size": 2,
    },
    "trigger": {"kind": "fixed", "grad_norm": 117.98, "threshold": 18.77, "num_tokens": 1162},
    "search": {"strategy": "bisect", "status": "found", "stop_reason": "done", "backwards": 24, "seconds": 0.5},
    "culprits": [CULPRIT],
    "certificate": {"norm_before": 117.98, "norm_after": 0.836, "error_bound": 0.00017, "verdict": "explained"},
    "action": {"taken": "observe"},
}


def changed(event=EVENT, **path_values):
    """A copy of the event with `section__key` replaced."""
    made = copy.deepcopy(event)
    for path, value in path_values.items():
        *sections, key = path.split("__")
        place = made
        for section in sections:
            place = place[section]
        place[key] = value
    return made


def culprit(**changes):
    return {**CULPRIT, **changes}


def run_dir(tmp_path, events=(EVENT,), planted=PLANTED):
    if events is not None:
        (tmp_path / "gradloc").mkdir()
        text = "".join(json.dumps(event) + "\n" for event in events)
        (tmp_path / "gradloc" / "events.jsonl").write_text(text)
    if planted is not None:
        (tmp_path / "planted.json").write_text(json.dumps(planted))
    return tmp_path


def test_the_planted_token_named_alone_and_explained_is_a_yes(tmp_path, capsys):
    assert verdict.main([str(run_dir(tmp_path))]) == 0
    said = capsys.readouterr().out
    assert "FOUND: the event names exactly the token that was planted" in said


def test_the_story_has_step_rank_micro_batch_position_sentence_and_both_norms():
    said = verdict.tell(EVENT)
    for part in (
        "step 5, mini-batch 0",
        "rank 1, micro-batch 5, row 0 of it, response position 12",
        "so the answer>>> is<<< 60.",
        "extreme_advantage",
        "with it the norm is 118, without it 0.836",
        "explained",
        "24 probes",
        "action: observe",
    ):
        assert part in said


def test_a_norm_is_told_as_well_as_it_is_known():
    assert "without it 0.836 (within 0.00017): explained" in verdict.tell(EVENT)
    far = changed(certificate__norm_after=1.38, certificate__error_bound=2.562)
    assert "without it at most 3.942: explained" in verdict.tell(far)
    assert "without it NaN: explained" in verdict.tell(changed(certificate__norm_after="NaN"))


def test_a_span_a_newline_and_a_norm_that_is_no_number_can_be_told():
    event = changed(
        trigger__grad_norm="NaN", culprits=[culprit(positions=[3, 4, 5], text_before="a\nb", advantage=None)]
    )
    said = verdict.tell(event)
    assert "gradient norm NaN" in said and "position 3..5" in said and r"a\nb" in said


def test_a_search_that_found_nothing_says_how_far_it_came():
    event = changed(culprits=[], search__status="not_found", search__stop_reason="spread out")
    assert "no culprit was named: not_found, spread out" in verdict.tell(event)


@pytest.mark.parametrize(
    "events, problem",
    [
        ([], "no event was written"),
        ([changed(step__global_step=4)], "no event is at step 5"),
        ([EVENT, changed(step__global_step=7)], "one event was expected, 2 were written"),
        ([changed(culprits=[])], "one culprit was expected, 0 are named"),
        ([changed(culprits=[CULPRIT, culprit(positions=[3])])], "one culprit was expected, 2"),
        ([changed(culprits=[culprit(sequence_id="abc:1")])], "sequence_id is abc:1"),
        ([changed(culprits=[culprit(positions=[11])])], "positions is [11], and [12] was planted"),
        ([changed(culprits=[culprit(positions=[12, 13])])], "positions is [12, 13]"),
        ([changed(culprits=[culprit(token_ids=[22])])], "token_ids is [22]"),
        ([changed(culprits=[culprit(rank=0)])], "rank is 0, and 1 was planted"),
        ([changed(culprits=[culprit(micro_batch=4)])], "micro_batch is 4"),
        ([changed(culprits=[culprit(micro_batch_row=1)])], "micro_batch_row is 1"),
        ([changed(certificate__verdict="undecided")], "the certificate says undecided"),
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
    "row, num_mini_batches, place",
    [
        (0, 1, (0, 0, 0)),
        (31, 1, (0, 7, 3)),
        (32, 1, (1, 0, 0)),
        (52, 1, (1, 5, 0)),
        (63, 1, (1, 7, 3)),
        (16 + 5, 2, (0, 1, 1)),
    ],
)
def test_the_row_says_rank_and_micro_batch_of_its_mini_batch(row, num_mini_batches, place):
    step = EVENT["step"] | {"num_mini_batches": num_mini_batches, "num_micro_batches": 8 // num_mini_batches}
    wanted = verdict.expected({**PLANTED, "row": row}, step)
    assert (wanted["rank"], wanted["micro_batch"], wanted["micro_batch_row"]) == place
