# SPDX-License-Identifier: Apache-2.0
"""The tables of `wild`, `wild-long` and `tool-loop`, from runs on disk."""

import json

import pytest

from lab.experiments import catalog, summaries
from lab.experiments.llm import natural
from tests.experiments.conftest import write_lines, write_steps, write_suite
from tests.report.builder import make_culprit, make_event


def write(folder, norms, events=()):
    """A run's metrics and events."""
    steps = enumerate(norms, start=1)
    write_steps(folder, ({"actor/grad_norm_max": norm, "critic/score/mean": 0.1 * step} for step, norm in steps))
    write_lines(folder / "gradloc" / "events.jsonl", events)


def cure(name, verdict, norm, forwards=4):
    measured = {"error_bound": 0.1, "kept": 0.9, "forwards": forwards, "backwards": forwards}
    return {"name": name, "line": "x=1", "verdict": verdict, "norm_after": norm, "changed_tokens": 0.5, **measured}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The record of a suite: an arm that spikes three times, the same with mask, and its twin."""
    tmp_path = tmp_path_factory.mktemp("suite")
    answer = make_culprit(3, span="sequence", positions=tuple(range(3, 9)), share=0.2)
    found = [
        make_event(
            2,
            [make_culprit(3, share=0.6), make_culprit(5, share=-0.7, log_prob=-0.1, advantage="NaN")],
            cures=[cure("dual_clip", "healed", 3.0), cure("clip_ratios", "not_healed", 40.0)],
        ),
        make_event(3, [answer], cures=[cure("clip_ratios", "not_healed", 50.0), cure("gpg", "no_change", 90.0, 0)]),
        make_event(4, [], shares=None),
    ]
    write(tmp_path / "no-clip-seed1", [3.0, 90.0, 4.0], found)
    write(tmp_path / "no-clip-mask-seed1", [3.0, 80.0], found[:1])
    write(tmp_path / "no-clip-twin-seed1", [3.0, 5.0])
    write(tmp_path / "healthy-seed1", [3.0, 5.0])
    write_suite(tmp_path, no_clip_seed1=0, no_clip_mask_seed1=0, no_clip_twin_seed1=0, healthy_seed1=0, rate_seed1=1)
    assert summaries.main([natural.__name__, str(tmp_path)]) == 0
    assert (tmp_path / "natural.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((tmp_path / "natural.json").read_text())


def line(table, *begins):
    """The one line of a table that begins with these cells, by column."""
    head, *body = table
    (found,) = [cells for cells in body if cells[: len(begins)] == list(begins)]
    return dict(zip(head, found, strict=True))


def test_an_arm_s_events_are_counted_where_the_run_only_observes(found):
    cells = line(natural.composition_table(found), "no-clip")
    assert (cells["runs"], cells["events"], cells["explained"]) == ("1", "3", "3")
    assert [cells[kind] for kind in natural.KINDS] == ["0", "1", "1", "1"]
    assert cells["shares trusted"] == "2 of 2"
    assert line(natural.composition_table(found), "all")["events"] == "3"
    # 24 forwards and as many backwards of 4 micro-batches: (24 + 48) / 12
    assert (cells["updates a search: median"], cells["most"]) == ("6", "6")


def test_an_arm_without_a_spike_has_its_largest_norm(found):
    assert line(natural.composition_table(found), "healthy")["events"] == "0"
    assert line(natural.effects_table(found), "healthy", "1")["largest norm: observe"] == "5"


def test_a_norm_that_is_no_number_is_a_word_in_the_table_and_no_point_of_the_figure(tmp_path, capsys):
    event = make_event(1, [], shares=None)
    event["trigger"]["grad_norm"] = "Infinity"
    write(tmp_path / "hot-seed1", [float("inf"), 3.0], [event, make_event(2, [make_culprit(3)])])
    write_suite(tmp_path, hot_seed1=0)
    assert summaries.main([natural.__name__, str(tmp_path)]) == 0
    assert "Infinity / " in capsys.readouterr().out and (tmp_path / "natural.png").exists()


def test_an_event_s_line_is_about_the_culprit_with_the_largest_share(found):
    cells = line(natural.events_table(found), "no-clip", "1", "2")
    assert cells["named"] == "2 in 1" and cells["share"] == "-0.7"
    assert cells["p: old, now"] == "0.0101, 0.905" and cells["advantage"] == "-"
    assert line(natural.events_table(found), "no-clip", "1", "4")["named"] == "nothing"
    assert len(natural.events_table(found)) == 4


def test_what_was_measured_first_is_what_the_search_did_not_end_with(found):
    cells = line(natural.cures_table(found), "no-clip")
    assert (cells["events"], cells["healed"]) == ("3", "1")
    assert cells["the setting measured first"] == "2 clip_ratios"
    assert cells["not healed"] == "1/3: clip_ratios; 1/4: none measured"
    (event,) = [event for event in found["events"] if event["step"] == 2 and event["mode"] == "observe"]
    assert cells["norm under it / threshold"] == ", ".join([natural.number(3.0 / event["threshold"])] * 3)


def test_what_an_action_changed_is_compared_with_the_twin(found):
    cells = line(natural.effects_table(found), "no-clip", "1")
    assert list(cells.values())[2:] == ["90", "80", "5", "0.3", "0.2", "0.2"]


def test_every_arm_that_explodes_has_its_actions_and_its_twin():
    names = {arm.name for arm in catalog.load("wild-long").arms}
    exploding = {name for name in names if name.rpartition("-")[2] not in natural.MODES}
    assert len(exploding) >= 4
    assert names == exploding | {f"{name}-{mode}" for name in exploding for mode in natural.MODES[1:]}
