# SPDX-License-Identifier: Apache-2.0
"""The first screen's words: what, why, did it hurt, what now; and nothing that nobody measured."""

import json

import pytest

from gradloc.record import Event
from gradloc.report.runs import story
from gradloc.report.runs.events import convert
from gradloc.report.runs.metrics import Metrics, build
from gradloc.report.runs.run import read_run
from tests.report.builder import UNTRUSTED, make_culprit, make_event, make_metrics, write_run


def event(**changes) -> Event:
    return convert(make_event(**changes), Event)


def metrics(num_steps: int = 20) -> Metrics:
    return build({entry["step"]: entry["data"] for entry in make_metrics(num_steps)}, "metrics.jsonl")


def certified(verdict: str) -> Event:
    return event(certificate=make_event()["certificate"] | {"verdict": verdict})


def triggered(**changes) -> Event:
    return event(trigger=make_event()["trigger"] | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "One token made the step-5 spike"),
        ({"culprits": [make_culprit(at) for at in (1, 2)]}, "Two tokens made the step-5 spike"),
        ({"culprits": [make_culprit(at) for at in range(14)]}, "14 tokens made the step-5 spike"),
        ({"culprits": [make_culprit(span="sequence")] * 3}, "Three responses made the step-5 spike"),
        ({"culprits": [make_culprit(span="segment")]}, "One span of tokens made the step-5 spike"),
        ({"culprits": [make_culprit(span="segment")] * 2}, "Two spans of tokens made the step-5 spike"),
        ({"culprits": [make_culprit(), make_culprit(span="sequence")]}, "Two culprits made the step-5 spike"),
        ({"culprits": []}, "Nothing was found that made the spike at step 5"),
    ],
    ids=["one", "two", "many", "responses", "span", "spans", "mixed", "none"],
)
def test_the_headline_names_who_in_one_sentence(changes, said):
    assert story.headline(event(**changes)) == said


def test_the_headline_claims_no_more_than_the_certificate():
    partly = "One token made part of the step-5 spike; something else spikes, too"
    assert story.headline(certified("not_explained")) == partly
    assert story.headline(certified("undecided")) == "One token may have made the step-5 spike"
    assert story.headline(triggered(grad_norm="NaN")) == "One token made the gradient of step 5 not finite"
    assert "a rehearsal" in story.headline(triggered(kind="forced"))


def test_clipping_is_told_with_what_it_left_of_the_healthy_part():
    [said] = story.tell(event(), 1.0, Metrics()).consequence
    # 747.66 clipped to 1; the rest, of norm 0.77, would have passed unclipped
    assert said == (
        "Clipping to 1 scaled the whole step to 1/748, and the optimizer took it. "
        "That left the healthy part 0.13% of its usual size."
    )
    [said] = story.tell(event(), 0.5, Metrics()).consequence
    assert "0.1% of its usual size" in said  # (0.5 / 747.66) / (0.5 / 0.77)
    [said] = story.tell(certified("not_explained"), 1.0, Metrics()).consequence
    assert "healthy" not in said


def test_an_unknown_clip_limit_is_not_made_up():
    assert story.tell(event(), None, Metrics()).consequence == ["The optimizer took the step with the spike in it."]


@pytest.mark.parametrize(
    ("taken", "said"),
    [
        ("mask", "The optimizer took the step without it, of norm 0.77."),
        ("skip", "The optimizer took no step: this mini-batch was skipped."),
        ("abort", "The run was stopped before the step was taken."),
    ],
)
def test_an_action_is_told_as_what_the_step_became(taken, said):
    found = event(action={"requested": taken, "taken": taken, "reason": ""})
    assert story.tell(found, 1.0, Metrics()).consequence == [said]


def test_what_came_after_is_told_where_the_metrics_know_it():
    said = story.tell(event(), None, metrics()).consequence
    assert said[1] == "The next step's norm was 1.17, back at the usual 1.25."
    assert said[2] == "Mean reward: 0.525 over the 4 steps before, 0.58 over the 5 after."
    assert len(story.tell(event(), None, metrics(5)).consequence) == 1


@pytest.mark.parametrize(
    ("norm", "said"), [(1.8, "back at"), (2.5, "2 times"), (9.0, "far above")], ids=["like it", "twice", "much more"]
)
def test_a_norm_is_back_at_the_usual_only_where_it_is(norm, said):
    entries = {entry["step"]: entry["data"] for entry in make_metrics(20)}
    entries[6] |= {name: norm for name in entries[6] if name.startswith("actor/grad_norm")}
    told = story.tell(event(), None, build(entries, "metrics.jsonl")).consequence[1]
    assert told == f"The next step's norm was {norm:g}, {said} the usual 1.25."


def test_the_lede_has_the_number_that_makes_the_cause_one():
    said = story.tell(event(), None, Metrics()).lede
    assert said == "It carries 75% of the gradient. The advantage is extreme: 14,578 times typical."
    moved = make_culprit(cause={"label": "token_mismatch", "numbers": {"ratio_over_typical": 62.6}})
    told = story.tell(event(culprits=[moved]), None, Metrics()).lede
    assert told.endswith("The policy moved away from the old one at a token: its ratio is 62.6 times typical.")
    bare = event(culprits=[make_culprit(share=None, cause={"label": "brand_new", "numbers": {}})])
    assert story.tell(bare, None, Metrics()).lede == "No single factor stands out."


def test_the_lede_has_the_share_s_error_and_no_share_that_is_not_trusted():
    culprit = make_culprit(is_exact=False, share_error=0.004)
    said = story.tell(event(culprits=[culprit]), None, Metrics()).lede
    assert said.startswith("It carries 75% +- 0.4% of the gradient. ")
    said = story.tell(event(culprits=[culprit], shares=UNTRUSTED), None, Metrics()).lede
    assert said.startswith("The advantage is extreme")


def test_the_optimizer_s_part_is_told_with_its_error_and_only_where_it_is_trusted():
    culprit = make_culprit(is_exact=False, share_error=0.004)
    given = {"grad_clip": 1.0, "clip_scale": 0.00134, "culprit_share": 0.75, "healthy_norm": 0.001}
    [said] = story.tell(event(culprits=[culprit], consequence=given), 1.0, Metrics()).consequence
    assert "75% +- 0.4% of what the optimizer took was that token's" in said
    [said] = story.tell(event(culprits=[culprit], consequence=given, shares=UNTRUSTED), 1.0, Metrics()).consequence
    assert "and the optimizer took it." in said


@pytest.mark.parametrize(
    ("bound", "figure"),
    [
        (0.0007, ("0.77", "without it", "measured (within 0.0007)")),
        (0.385, ("0.77", "without it", "measured (within 0.39)")),
        (0.5, ("at most 1.27", "without it", "measured")),
        (None, ("0.77", "without it", "swap")),
    ],
)
def test_the_norm_without_it_is_told_as_well_as_it_is_known(bound, figure):
    found = event(certificate=make_event()["certificate"] | {"error_bound": bound})
    assert story.tell(found, None, Metrics()).figures[1] == figure


def test_the_norm_of_a_masked_step_is_told_as_well_as_it_is_known():
    action = {"requested": "mask", "taken": "mask", "reason": ""}
    found = event(action=action, certificate=make_event()["certificate"] | {"error_bound": 0.5})
    assert story.tell(found, None, Metrics()).consequence == [
        "The optimizer took the step without it, of norm at most 1.27."
    ]


@pytest.mark.parametrize(
    ("strategy", "said", "line"),
    [
        ("auto", "Let the search cost more updates: it ran out of them.", "gradloc.search.max_steps=8"),
        ("share", "Let the search cost more updates: it ran out of them.", "gradloc.search.max_steps=8"),
        ("bisect", "Give the search more probes: it ran out of them.", "bisect_budget_steps=512"),
    ],
)
def test_a_search_that_ran_out_is_given_more_of_what_limits_it(strategy, said, line):
    search = make_event()["search"] | {"status": "budget_exhausted", "strategy": strategy}
    found = event(culprits=[], search=search)
    assert story.tell(found, None, Metrics()).action == (said, f"actor_rollout_ref.actor.{line}")


def test_the_action_is_the_first_advice_that_the_run_does_not_follow_already():
    culprits = [make_culprit(cause={"label": "token_mismatch", "numbers": {}})]
    found = event(culprits=culprits)
    assert story.tell(found, None, Metrics()).action[1].endswith("action.mode=mask")
    masked = event(culprits=culprits, action={"requested": "mask", "taken": "mask", "reason": ""})
    assert story.tell(masked, None, Metrics()).action[1].endswith("token_clip.mode=clamp")


def test_the_clip_limit_comes_from_the_bundle_or_from_nowhere(tmp_path):
    run = read_run(write_run(tmp_path, [make_event()]))
    [found] = run.events
    assert story.clip_of(run.events_root, found) is None
    meta = run.events_root / found.folder / "meta.json"
    known = {"actor": {"grad_clip": 0.5}}
    for content, clip in [(known, 0.5), ({"actor": {"grad_clip": 0}}, None), ({"actor": []}, None), ([], None)]:
        meta.write_text(json.dumps(content))
        assert story.clip_of(run.events_root, found) == clip
    meta.write_text("{")
    assert story.clip_of(run.events_root, found) is None
