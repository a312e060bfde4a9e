# SPDX-License-Identifier: Apache-2.0
"""The health command and the strip in the page, as a user meets them."""

import json
import re
import shutil
from pathlib import Path

import pytest

from gradloc.report.logs.recording import build
from gradloc.report.runs.health import judge
from gradloc.report.runs.run import read_run
from tests.health.histories import healthy
from tests.report.builder import REPO, make_event, write_run

RECORDINGS = Path(__file__).parent / "recordings"


@pytest.fixture
def run_of(tmp_path):
    """A run's folder with the metrics of a recording, or with those that are given."""

    def make(source):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        if isinstance(source, str):
            shutil.copy(RECORDINGS / f"{source}.jsonl", folder / "metrics.jsonl")
        else:
            lines = [json.dumps({"step": step, "data": row}) for step, row in source]
            (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return folder

    return make


def test_the_terminal_tells_the_state_the_strip_the_reasons_and_what_people_do(run_of, shown):
    out = shown("health", run_of("spiking"))
    assert "1 of 24 steps was not healthy: step 20 (danger). At the last step (24): healthy." in out
    assert "step      1  ···················X····" in out
    assert "X gradient_jump  danger at step 20" in out
    assert "119 times its own median of 1.03 (limit 100 times)" in out
    assert "actor_rollout_ref.actor.gradloc.action.mode=mask" in out
    assert "Not checked, because the run does not log their metrics: head_norm, mismatch_weight" in out
    assert "\x1b[" not in out
    out = shown("health", run_of("collapsed"))
    assert out.count("actor_rollout_ref.rollout.n=16") == 1 and "- and what is listed above" in out
    assert "X no_gradient  at steps 12, 16-30; danger first at step 18" in out


def test_json_has_every_step_and_nothing_that_json_does_not_know(run_of, shown):
    rows = [(step, healthy(step)) for step in range(1, 31)]
    rows[-1][1].update({"actor/grad_norm_max": float("inf"), "rollout_corr/rollout_is_mean": 0.0})
    found = json.loads(shown("health", run_of(rows), "--json"), parse_constant=pytest.fail)
    assert len(found["steps"]) == 30 and found["state"] == "warning"
    assert found["worst"] == {"state": "warning", "step": 30}
    reasons = {reason["name"]: reason for reason in found["steps"][-1]["reasons"]}
    assert reasons["mismatch_weight"]["found"] == "Infinity"
    assert reasons["non_finite"]["metric"] == "actor/grad_norm_max"
    assert set(found["advice"]) == set(reasons) and found["not_judged"] == []


def test_thresholds_and_the_clip_limit_can_be_named(run_of, shown):
    folder = run_of("healthy")

    def states(*options):
        steps = json.loads(shown("health", folder, "--json", *options))["steps"]
        return {reason["name"] for step in steps for reason in step["reasons"]}

    assert states() == set()
    assert states("--grad-clip", "0.1") == {"clip_share"}
    assert states("--grad-clip", "0") == set()
    assert states("--set", "truncation=[0.01,null]") == {"truncation"}
    assert states("--set", "trainer.health.truncation=[0.01,null]", "--set", "recent=30") == set()


def test_no_clip_limit_is_assumed_of_a_log_that_is_not_verl_s(tmp_path, shown):
    log, rows = tmp_path / "own.jsonl", ({"step": step, "grad_norm": 2.0 + step % 3 / 10} for step in range(60))
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def states(*options):
        steps = json.loads(shown("health", log, "--json", *options))["steps"]
        return {reason["name"] for step in steps for reason in step["reasons"]}

    assert states() == set() and states("--grad-clip", "1") == {"clip_share"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--set", "truncation"], "--set truncation cannot be read: write KEY=VALUE with a number"),
        (["--set", "truncation=much"], "--set truncation=much cannot be read"),
        (["--set", "truncation=[2,1]"], "trainer.health.truncation must be [warning, danger] in"),
        (["--set", "nonsense=1"], "unknown setting trainer.health.nonsense: there are enable,"),
        (["--grad-clip", "-1"], "--grad-clip must be a norm or 0 for none, found -1.0."),
        (["--grad-clip", "nan"], "--grad-clip must be a norm or 0 for none, found nan."),
    ],
)
def test_a_wrong_option_is_refused_with_a_sentence(run_of, refused, options, sentence):
    assert sentence in refused("health", run_of("healthy"), *options)


def test_a_run_without_metrics_that_can_be_judged_is_refused_with_a_sentence(run_of, tmp_path, refused):
    assert "logs no gradient norm" in refused("health", run_of([(1, {"val-core/acc": 0.5})]))
    told = "does not exist: name a run's log, or the folder that holds it."
    assert told in refused("health", tmp_path / "nowhere")
    events = write_run(tmp_path / "events", [make_event()])
    assert "has no metrics that can be judged" in refused("health", events)


def test_one_step_and_short_runs_say_that_most_rules_were_silent(run_of, shown):
    out = shown("health", run_of([(7, healthy(7))]), code=2)
    assert "Too short to judge: 1 step" in out and "Healthy" not in out
    assert out.count("need 11") == 1 and "To judge fewer than 11 steps: gradloc health" in out


def test_a_run_that_was_resumed_is_judged_with_what_its_later_values_replaced(run_of, shown):
    rows = [(step, healthy(step)) for step in [*range(1, 21), *range(16, 31)]]
    rows[17][1]["actor/ppo_kl"] = 5.0  # step 18 of the first try, which the second replaced
    folder = run_of(rows)
    metrics = read_run(folder).metrics
    assert [v.step for v in judge(metrics).verdicts] == list(range(1, 31))
    assert judge(metrics).num_unwell == 0
    found = json.loads(shown("health", folder, "--json"))
    assert [step["step"] for step in found["steps"]] == [*range(1, 21), *range(18, 31)], "what is the same is told once"
    assert found["worst"] == {"state": "danger", "step": 18}


def test_the_runs_own_monitor_may_have_had_other_thresholds(run_of, shown):
    rows = [(step, {**healthy(step), "health/state": int(step == 4)}) for step in range(1, 21)]
    out = shown("health", run_of(rows))
    assert "The run's own monitor judged 1 of 20 steps differently, first step 4" in out


def test_a_long_run_has_a_short_strip_in_which_no_danger_is_lost(run_of, shown):
    rows = [(step, healthy(step)) for step in range(1, 2001)]
    rows[1234][1]["actor/ppo_kl"] = 5.0
    out = shown("health", run_of(rows))
    strip = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(strip) <= 5 and sum(line.count("X") for line in strip) == 1
    assert "7 steps to a mark" in out


def test_spans_cover_every_step_once_and_keep_the_worst():
    rows = {step: healthy(step) for step in range(1, 301)}
    for step in (50, 51, 52, 200):
        rows[step]["actor/ppo_kl"] = 0.5 if step == 200 else 5.0
    found = judge(build(rows, "made"))
    exact = found.spans(300)
    assert [(s.first, s.last, s.state) for s in exact] == [
        (1, 49, "healthy"),
        (50, 52, "danger"),
        (53, 199, "healthy"),
        (200, 200, "warning"),
        (201, 300, "healthy"),
    ]
    few = found.spans(10)
    assert len(few) <= 10 and [s.state for s in few if s.note] == ["danger", "warning"]
    assert few[0].first == 1 and few[-1].last == 300
    assert all(a.last + 1 == b.first for a, b in zip(few, few[1:], strict=False))
    assert exact[1].note == "Steps 50-52: danger. policy_kl: actor/ppo_kl is 5 (limit 1)."


@pytest.fixture
def page_of(shown, tmp_path):
    def page(folder):
        shown(folder, "-o", tmp_path / "report.html")
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return page


def test_the_page_has_a_strip_with_reasons_and_the_same_in_text_and_without_metrics_none(run_of, page_of, tmp_path):
    text = page_of(run_of("collapsed"))
    payload = json.loads(re.search(r'id="payload">(.*?)</script>', text)[1])
    bands = payload["charts"]["run"]["bands"]
    notes = [note for _, _, _, note in bands if note]
    assert any(note.startswith("Steps 18-19: danger. no_gradient: ") for note in notes)
    assert len(notes) >= 7 and {state for _, _, state, _ in bands} == {"healthy", "warning", "danger"}
    assert "23 of 30 steps were not healthy" in text
    assert "<code>data.max_response_length=4096</code>" in text
    text = page_of(write_run(tmp_path / "events", [make_event()]))
    assert '"bands":[]' in text and "The run's health" not in text


@pytest.mark.parametrize("name", ["megatron-diverges.log", "fairseq-jump.log"])
def test_a_run_that_did_not_recover_is_not_called_healthy_at_its_end(name, shown):
    log = REPO / "tests" / "data" / "pieces" / name
    said = " ".join(shown("health", log, "--fail-on", "found", code=1).split())
    assert re.search(r"Step \d+: gradient norm .*(did not recover|ends at the spike)\.", said)
    assert "healthy" not in shown("watch", "--once", log).splitlines()[0]


def test_a_log_of_overflows_alone_is_answered_by_what_the_report_finds(shown):
    log = REPO / "tests" / "data" / "pieces" / "deepspeed-skips-all.log"
    assert "fp16 overflowed: the trainer counts" in " ".join(shown("health", log, "--fail-on", "found", code=1).split())


def test_a_run_with_an_event_has_a_headline_where_no_rule_found_fault(tmp_path, shown):
    write_run(tmp_path, [make_event()])
    rows = [{"step": step, "data": {"actor/grad_norm": 15.0 if step == 5 else 1.0}} for step in range(1, 41)]
    rows[-1]["data"]["gradloc/failures"] = 0.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert "No fault in 40 steps" in shown("health", tmp_path)
