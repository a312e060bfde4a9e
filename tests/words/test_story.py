# SPDX-License-Identifier: Apache-2.0
"""The first screen's words: what, why, did it hurt, what now; and nothing that nobody measured."""

import pytest

from gradloc.record import Event
from gradloc.words import story
from tests.report.builder import UNTRUSTED, make_culprit
from tests.words import event


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
    assert story.headline(event(certificate={"verdict": "not_explained"})) == partly
    assert story.headline(event(certificate={"verdict": "undecided"})) == "One token may have made the step-5 spike"
    assert story.headline(event(trigger={"grad_norm": "NaN"})) == "One token made the gradient of step 5 not finite"
    assert "a rehearsal" in story.headline(event(trigger={"kind": "forced"}))


def test_clipping_is_told_with_what_it_left_of_the_healthy_part():
    # 747.66 clipped to 1; the rest, of norm 0.77, would have passed unclipped
    assert story.given(event(), 1.0) == (
        "Clipping to 1 scaled the whole step to 1/748, and 75% of what the optimizer took was that token's. "
        "That left the healthy part 0.13% of its usual size."
    )
    assert "0.1% of its usual size" in story.given(event(), 0.5)  # (0.5 / 747.66) / (0.5 / 0.77)
    assert "healthy" not in story.given(event(certificate={"verdict": "not_explained"}), 1.0)


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
    assert story.given(found, 1.0) == said


def test_the_lede_has_the_number_that_makes_the_cause_one():
    said = story.lede(event())
    assert said == "It carries 75% of the gradient. The advantage is extreme: 14,578 times typical."
    moved = make_culprit(cause={"label": "token_mismatch", "numbers": {"ratio_over_typical": 62.6}})
    told = story.lede(event(culprits=[moved]))
    assert told.endswith("The policy moved away from the old one at a token: its ratio is 62.6 times typical.")
    bare = event(culprits=[make_culprit(share=None, cause={"label": "brand_new", "numbers": {}})])
    assert story.lede(bare) == "No single factor stands out."


def test_a_share_is_told_with_its_error_and_only_where_it_is_trusted_or_was_measured_by_itself():
    of_tokens, exact = make_culprit(is_exact=False, share_error=0.004), make_culprit(share_error=0.004)
    consequence = {"grad_clip": 1.0, "clip_scale": 0.00134, "culprit_share": 0.75, "healthy_norm": 0.001}
    for culprit, shares in ((of_tokens, {}), (exact, UNTRUSTED)):
        found = event(culprits=[culprit], consequence=consequence, shares=shares)
        assert story.lede(found).startswith("It carries 75% +- 0.4% of the gradient. ")
        assert "75% +- 0.4% of what the optimizer took was that token's" in story.given(found)
    found = event(culprits=[of_tokens], consequence=consequence, shares=UNTRUSTED)
    assert story.lede(found).startswith("The advantage is extreme")
    assert "and the optimizer took it." in story.given(found)
    two = [make_culprit(share=0.2, share_error=0.03), make_culprit(7, share=0.79, share_error=0.04)]
    assert story.lede(event(culprits=two)).startswith("Together they carry 99% +- 5% of the gradient. ")


@pytest.mark.parametrize(
    ("is_taken", "said"),
    [
        (True, "The optimizer took the step, so the weights are not finite any more."),
        (False, "The trainer skipped the step, because its norm was not finite."),
        (None, "The trainer skipped the step, because its norm was not finite."),
    ],
)
def test_what_became_of_a_step_that_is_not_finite_is_a_fact_of_the_record(is_taken, said):
    broken = {"grad_norm": "NaN"}
    assert story.given(event(trigger=broken, consequence={"grad_clip": 1.0, "is_taken": is_taken})) == said
    assert "skipped the step" in story.given(event(trigger=broken), 1.0)


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
    found = event(certificate={"error_bound": bound})
    assert story.figures(found)[1] == figure


def test_the_norm_of_a_masked_step_is_told_as_well_as_it_is_known():
    action = {"requested": "mask", "taken": "mask", "reason": ""}
    found = event(action=action, certificate={"error_bound": 0.5})
    assert story.given(found) == "The optimizer took the step without it, of norm at most 1.27."


def test_culprits_that_carry_more_than_the_gradient_are_told_with_what_pulls_the_other_way():
    found = event(culprits=[make_culprit(share=1.2)])
    assert story.lede(found).startswith("It carries 120% of the gradient; the other tokens pull the other way. ")
    assert "%" not in story.given(found, 1.0).partition(" That left")[0]


# ---- the whole story


def test_the_story_stands_around_the_largest_culprit_s_token():
    large = make_culprit(token=" is", text_before="1\n2\n3\n4\n" + "x" * 300 + "\nthe answer", text_after="y" * 300)
    told = story.tell(event(culprits=[make_culprit(share=0.1, grad_norm=9.0, token="no"), large]), 1.0)
    assert told.headline == "Two tokens made the step-5 spike" and told.token == " is"
    assert told.before == "x" * 188 + "↵\nthe answer" and told.after == "y" * 160
    assert (told.named, told.names) == ("", ())
    short = story.tell(event(culprits=[make_culprit(text_before="1\n2\n3\n4\n5")]))
    assert short.before.replace("↵", "") == "2\n3\n4\n5", "a chat's prompt has many short lines"
    assert [value for value, *_ in told.figures] == ["748", "0.77", "52.3"]
    assert told.figures[0][1:] == ("gradient norm", "14.3 times the threshold")
    assert told.given == [story.given(event(culprits=[make_culprit(share=0.1), large]), 1.0)]


def stepwide(label: str, reason: str = "of this", **cause) -> Event:
    return event(culprits=[], cause={"label": label, "reason": reason, **cause})


def test_a_story_without_culprits_has_no_token():
    told = story.tell(event(culprits=[]))
    assert (told.before, told.token, told.after) == ("", "", "")
    assert told.figures[1] == ("0", "culprits found", "found")


@pytest.mark.parametrize(("num", "more"), [(4, ()), (5, ("and 1 more",)), (7, ("and 3 more",))])
def test_what_made_it_where_no_token_did_is_named_up_to_four(num, more):
    names = [f"layer {at}" for at in range(num)]
    told = story.tell(stepwide("non_finite_weights", names=names, numbers={"parameters": num}))
    assert told.headline == "Weights that are not finite broke step 5; no token did" and told.named == "Not finite:"
    assert told.names == (*names[:4], *more)
    assert told.figures[1] == (str(num), "parameters not finite", "read before any forward")
    assert told.given[-1] == "Every further step will be like it until weights that are finite are loaded."
    assert len(told.given) == 2


def test_a_cause_beside_tokens_needs_a_reason_and_shares_the_step_with_culprits():
    assert story.headline(stepwide("batch_scale", reason="")) == "Nothing was found that made the spike at step 5"
    both = event(cause={"label": "not_tokens", "reason": "r"})
    assert story.headline(both) == "One token made part of the step-5 spike; the rest did not come from the tokens"
    assert story.figures(both)[1][1] == "without it", "the culprits' own figure"
    padded = event(cause={"label": "non_finite_padding", "reason": "r"})
    assert story.figures(padded)[1][1] == "without the padding"
    assert story.cause_of(both) == "not_tokens" and story.cause_of(event()) == "extreme_advantage"
    assert story.cause_of(event(culprits=[])) == ""


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("replicas_differ", "Replicas differ; no token made the step-5 spike"),
        ("batch_scale", "The whole batch made the step-5 spike: all of it is scaled, no token stands out"),
        ("transient", "The step-5 spike did not come back when it was run again"),
    ],
)
def test_the_headline_of_a_cause_beside_tokens_names_the_spike(label, said):
    assert story.headline(stepwide(label)) == said


def test_where_it_is_first_seen_is_told_and_whether_advantages_did_it():
    one = story.lede(stepwide("non_finite_padding", "a loss of 1.234e+10 is not finite", places=[[3, 7]]))
    assert "A loss of 1.23e10 is not finite. The first: row 3 of the batch, response position 7." in one
    two = story.lede(stepwide("non_finite_padding", places=[[None, 7], [1, 1], [2, 2]]))
    assert "Of this. The first: response position 7, and 2 more." in two
    for times, why in (
        (2.9, "the loss or the ratios scale it"),
        (3.0, "it is the rewards, or how they are normalized"),
    ):
        said = story.lede(stepwide("batch_scale", numbers={"advantage_over_run": times}))
        assert f"Its advantages are {times:g} times the run's usual: {why}." in said
    assert "Hardware or a race made it, not the data." in story.lede(stepwide("transient"))


def test_a_norm_within_the_limit_is_not_called_clipped():
    assert story.given(event(), 1000.0).endswith("its norm is within the clip limit of 1,000.")
    assert story.given(event(), 747.66).startswith("The optimizer took the step as it was")


def test_the_newest_checkpoint_is_named():
    found = event(consequence={"grad_clip": 1.0, "last_checkpoint": "/runs/a/global_step_4"})
    assert story.tell(found, 1.0).given[-1] == "The newest checkpoint before it: /runs/a/global_step_4."
