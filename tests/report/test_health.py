# SPDX-License-Identifier: Apache-2.0
"""Lead time: a rule that warns before every explosion leads, one that always complains does not. Advice of health:
nothing that a run has already, and no cut of the sampling; one that is on is told.
"""

import re
from pathlib import Path

from gradloc.explain.advice import actions_of
from gradloc.report.logs.recording import MEAN, Recording
from gradloc.report.logs.segments import runs_of
from gradloc.report.runs.health import judge
from gradloc.report.runs.run import read_run
from lab.benchmarks.lead import HORIZON, lead, main

SERIES = Path(__file__).resolve().parents[2] / "docs" / "series"


def runs(kl, count=6, length=120):
    """Runs with an explosion at step 80 and a KL that is a function of the step."""
    made = []
    for at in range(count):
        rows = [(s, {MEAN: 300.0 if s == 80 else 1.0 + s % 3 / 10, "actor/ppo_kl": kl(s)}) for s in range(1, length)]
        made += runs_of([[Recording(f"{at}.log", rows=rows)]])
    return made


def policy_kl(kl):
    return next(rule for rule in lead(runs(kl))[0] if rule.name == "policy_kl")


def test_a_rule_that_warns_before_each_explosion_leads():
    rule = policy_kl(lambda step: 0.5 if step in (70, 71) else 0.0)
    assert rule.ahead == [10] * 6 and rule.leads and rule.num_false == 0
    assert rule.row[1:3] == ["6 of 6", "10 (10 to 10)"]


def test_one_that_always_complains_is_right_by_luck():
    rule = policy_kl(lambda step: 0.5)
    assert rule.ahead == [HORIZON] * 6 and not rule.leads and rule.verdict == "no better than luck"


def test_one_that_speaks_at_the_explosion_or_long_before_does_not_warn_of_it():
    assert policy_kl(lambda step: 0.5 if step >= 80 else 0.0).verdict == "never warned before one"
    early = policy_kl(lambda step: 0.5 if step == 30 else 0.0)
    assert not early.ahead and early.num_false == 6


def test_all_rules_are_told_that_any_log_feeds(capsys):
    main([*map(str, sorted(SERIES.glob("*.json")))])
    said = capsys.readouterr().out
    assert said.startswith("3 runs, ") and re.findall(r"\.json \| (\d+) \|", said) == "50 54 58 70 16 23 25".split()
    assert set(re.findall(r"^\| `(\w+)`", said, re.M)) == {"gradient_jump", "clip_share", "non_finite", "no_gradient"}


def test_what_a_run_has_already_is_left_out():
    settings = {"actor_rollout_ref.actor.optim.lr": 2e-7, "actor_rollout_ref.actor.use_kl_loss": True}
    told = [line for _, line in actions_of(["smaller_steps", "use_kl", "keep_rollouts"], "verl 0.9.1", settings)]
    assert told == ["actor_rollout_ref.actor.optim.lr=1e-07", "trainer.rollout_data_dir=rollouts"]


def test_a_run_with_events_is_not_advised_to_turn_gradloc_on():
    folder = read_run(Path("examples/demo"))
    for finding in judge(folder.runs[0].parts).findings:
        said = folder.advice(finding.worst, finding.worst_step)
        assert said and not any("spike_detection" in line for _, line in said)


def test_health_advises_on_a_spike_what_the_report_of_its_event_does(shown):
    found = read_run(Path("examples/demo"))
    do = found.next_step(found.events[0])
    for finding in judge(found.runs[0].parts).findings:
        assert found.advice(finding.worst, finding.worst_step) == [(do.do, line) for line in do.lines.values()]
    said = shown("health", "examples/demo")
    assert said.count(do.do) == 1 and "ppo_epochs" not in said and "grad_clip" not in said


def test_health_does_not_advise_to_go_back_where_the_report_does_not(shown):
    said = shown("health", "tests/data/logs/console/nan.log")
    assert "before step 47" in said and "Resume from an earlier checkpoint" not in said
