# SPDX-License-Identifier: Apache-2.0
"""What the driver adds to what the ranks sent: text, log-probs, siblings, turns, and what the batch is like."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from gradloc.loop.batch import BatchView
from gradloc.loop.complete import BUNDLE_KEYS, bundle_tensors, complete_event, complete_sequences
from gradloc.loop.pictures import Album
from gradloc.loop.wire import RawEntry, RawEvent
from gradloc.record import (
    Certificate,
    Coefficients,
    Culprit,
    Event,
    Fingerprint,
    LayerHistory,
    Ratios,
    Run,
    StepCause,
    Trigger,
)
from gradloc.record import Sequence as SequenceRecord

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPT, RESPONSE = 4, 8
CULPRIT = Culprit(row=1, positions=(2, 3), peak=3, log_prob=-1.0, old_log_prob_used=-2.0, grad_norm=9.0)


class Letters:
    """A tokenizer: the token 3 is a d."""

    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(LETTERS[token] for token in ids)


LETTERS_OF = Letters()


def batch_of(labels=None, **tensors):
    """Three rows: prompts of 4, 2 and 4 tokens; responses of 8, 6 and 8."""
    ids = torch.arange(3 * (PROMPT + RESPONSE)).view(3, -1) % 26
    attended = torch.ones(3, PROMPT + RESPONSE, dtype=torch.long)
    attended[1, :2] = attended[1, -2:] = 0
    mask = attended[:, PROMPT:].clone()
    numbers = torch.arange(24.0).view(3, 8)
    given = {
        "input_ids": ids,
        "attention_mask": attended,
        "responses": ids[:, PROMPT:],
        "response_mask": mask,
        "old_log_probs": -numbers / 10,
        "rollout_log_probs": -numbers / 10 - 0.5,
        "ref_log_prob": -numbers / 100,
        "advantages": numbers * mask,
        "token_level_scores": torch.eye(3, RESPONSE) * 2,
    }
    return BatchView({**given, **tensors}, {"uid": ["p", "p", "q"], **(labels or {})})


def raw_of(*culprits, norm_after=1.0, residual=0.5, terms=(1.0, 0.0, 0.0), sequences=(), **event):
    return RawEvent(
        event=Event(
            trigger=Trigger(grad_norm=50.0),
            culprits=culprits,
            certificate=Certificate(norm_before=50.0, norm_after=norm_after),
            **event,
        ),
        sequences=list(sequences),
        residual_coefficient_norm=residual,
        term_norms=dict(zip(("policy", "kl", "entropy"), terms, strict=True)),
        low_entropy=0.25,
        layout=[RawEntry(0, 0, [2, 0], np.arange(3, dtype=np.uint8)), RawEntry(1, 2, [1], np.zeros(2, np.uint8))],
        temperature=1.0,
        on_policy=True,
        fingerprint=Fingerprint((0, 0.0, 0.0), None),
        checkpoint=None,
    )


def completed(batch, *culprits, context=3, tokenizer=LETTERS_OF, endings=None, over_run=None, **raw):
    made = raw_of(*culprits, **raw)
    return complete_event(made, "name", Run(), batch, tokenizer, context, over_run, "last", endings)


def one(batch, culprit=CULPRIT, **more):
    (found,) = completed(batch, culprit, **more).culprits
    return found


def letters(row, first, last):
    """Of a row's ids, from first to last."""
    return "".join(LETTERS[(row * 12 + at) % 26] for at in range(first, last + 1))


# ---- text


def test_the_text_is_the_span_s_with_what_stands_around_it():
    found = one(batch_of())
    assert "".join(found.tokens) == letters(1, 6, 7) and found.prompt == letters(1, 2, 3), "without the padding"
    assert found.token_ids == tuple(batch_of().tensors["responses"][1, 2:4].tolist())
    assert found.text_before == letters(1, 3, 5), "the prompt's end and the response up to it"
    assert found.text_after == letters(1, 8, 9), "up to where the response ends"
    assert one(batch_of(), context=1).text_after == letters(1, 8, 8)
    assert one(batch_of(), context=100).text_before == letters(1, 2, 5)


def test_no_context_is_none_and_without_a_tokenizer_there_is_no_text():
    found = one(batch_of(), context=0)
    assert found.text_before == found.text_after == "" and found.tokens
    found = one(batch_of(), tokenizer=None)
    assert (found.tokens, found.prompt, found.text_before, found.text_after) == (None,) * 4 and found.token_ids


def test_ids_that_the_tokenizer_does_not_know_are_shown_as_numbers():
    ids = batch_of().tensors["responses"].clone()
    ids[1, 2] = 999
    assert one(batch_of(responses=ids)).tokens == ("<999>", letters(1, 7, 7))


@pytest.mark.parametrize(("length", "kept"), [(8, 8), (9, 1)])
def test_what_stands_for_a_picture_is_shown_as_one_token(length, kept):
    ids = torch.tensor([[0] * length + [1, 2, 3]])
    response = {"responses": ids[:, -2:], "response_mask": torch.ones(1, 2), "attention_mask": torch.ones_like(ids)}
    numbers = {name: torch.ones(1, 2) for name in ("old_log_probs", "advantages", "token_level_scores")}
    for inputs, shown in ((({"pixel_values": torch.ones(1)},), kept), (({},), length)):
        batch = BatchView({"input_ids": ids, **response, **numbers}, {"multi_modal_inputs": inputs})
        found = one(batch, Culprit(row=0, positions=(0,), peak=0))
        assert found.prompt == "a" * shown + "b"


# ---- numbers


def test_numbers_are_those_at_the_peak():
    found = one(batch_of({"data_source": ["x", "y", "z"], "sequence_id": ["p:0", "p:1", "q:0"]}))
    assert (found.sequence_id, found.data_source, found.advantage) == ("p:1", "y", 11.0)
    assert found.old_log_prob_stored == pytest.approx(-1.1) and found.rollout_log_prob == pytest.approx(-1.6)
    assert found.ref_log_prob == pytest.approx(-0.11) and found.is_weight is None and found.reward == 2.0
    ratios = found.ratios
    assert ratios.current_over_old == pytest.approx(math.e)
    assert ratios.current_over_rollout == pytest.approx(math.exp(0.6))
    assert ratios.old_over_rollout == pytest.approx(math.exp(0.5))


def test_the_siblings_are_the_other_rows_of_the_prompt():
    found = one(batch_of())
    (sibling,) = found.siblings
    assert (sibling.row, sibling.reward, sibling.advantage, sibling.num_tokens) == (0, 2.0, 0.0, 8)
    assert one(batch_of(), replace(CULPRIT, row=2)).siblings == ()
    assert one(BatchView(batch_of().tensors, {})).siblings is None
    scores = {name: of for name, of in batch_of().tensors.items() if name != "token_level_scores"}
    without = one(BatchView(scores, {"uid": ["p"] * 3}))
    assert [found.reward for found in without.siblings] == [None, None] and without.reward is None


@pytest.mark.parametrize(
    ("index", "row"), [([4, 7, 9], 7), ([0, 0, 0], None), (["a", "b", "c"], None), (None, None)]
)  # verl writes 0 for none
def test_the_row_of_the_data_set_is_what_its_rows_say(index, row):
    assert one(batch_of(None if index is None else {"index": index})).data_row == row


TURNS = [1, 1, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(("position", "turn"), [(1, (1, 2, 0)), (5, (2, 2, 3)), (7, (2, 2, 3))])
def test_the_turn_is_the_one_that_the_span_begins_in(position, turn):
    batch = batch_of(response_mask=torch.tensor([TURNS] * 3))
    found = one(batch, Culprit(row=0, positions=(position,), peak=position)).turn
    assert (found.number, found.num_turns, found.num_before) == turn
    assert one(batch_of()).turn is None


def test_a_critic_s_culprit_has_its_target_and_no_log_probs():
    batch = replace(batch_of(values=torch.zeros(3, 8), returns=torch.full((3, 8), 5.0)), is_critics=True)
    found = one(batch)
    assert found.value_target == 5.0 and found.old_log_prob_stored is None and found.advantage == 11.0
    event = completed(batch, CULPRIT)
    assert event.batch.value_error == 5.0 and event.batch.one_minus_prob == 0.0


def test_a_distilled_culprit_has_the_teachers_log_prob_and_no_advantage():
    old = batch_of().tensors["old_log_probs"]
    batch = replace(batch_of(teacher_log_probs=old - 2.0), is_distilled=True)
    found, event = one(batch), completed(batch, CULPRIT)
    assert found.teacher_log_prob == pytest.approx(found.old_log_prob_stored - 2.0) and found.advantage is None
    assert event.is_distilled and event.batch.teacher_gap == pytest.approx(2.0) and event.batch.advantage == 0.0
    assert not completed(batch_of(), CULPRIT).is_distilled


# ---- the batch, and what is the step's own


def test_what_is_typical_of_the_batch_leaves_the_odd_ones_out():
    advantages = torch.full((3, 8), -2.0)
    advantages[0, 0], advantages[0, 1], advantages[1, 7] = math.nan, 0.0, 1e9  # the last is no response token
    event = completed(batch_of(advantages=advantages), CULPRIT, norm_after=3.0, residual=0.5, terms=(2.0, 6.0, 0.0))
    found = event.batch
    assert found.advantage == 2.0 and found.jacobian == 6.0 and found.low_entropy == 0.25
    mask, old = batch_of().tensors["response_mask"].bool(), batch_of().tensors["old_log_probs"]
    assert found.one_minus_prob == pytest.approx(1 - float(old[mask].exp().mean()))
    assert found.kl_over_policy == 3.0 and found.entropy_over_policy is None
    assert found.layer_spread is None and found.over_run is None


@pytest.mark.parametrize(("after", "residual"), [(None, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf)])
def test_a_typical_jacobian_needs_a_norm_and_coefficients(after, residual):
    assert completed(batch_of(), CULPRIT, norm_after=after, residual=residual).batch.jacobian is None


@pytest.mark.parametrize(
    ("terms", "ratio"), [((0.0, 1.0, 0.0), None), ((math.inf, 1.0, 0), None), ((4.0, 2.0, 0), 0.5)]
)
def test_terms_are_compared_where_both_are_numbers(terms, ratio):
    assert completed(batch_of(), CULPRIT, terms=terms).batch.kl_over_policy == ratio


def test_a_spread_of_layers_is_taken_over():
    assert completed(batch_of(), CULPRIT, layer_history=LayerHistory(spread=7.0)).batch.layer_spread == 7.0


@pytest.mark.parametrize(
    ("terms", "label"),
    [((1.0, 0.0, 2.9), "unknown"), ((1.0, 0.0, 3.0), "entropy_term"), ((1.0, 5.0, 4.0), "kl_term")],
)
def test_without_a_token_a_term_that_leads_is_the_step_s_cause(terms, label):
    cause = completed(batch_of(), terms=terms, over_run={"advantage": 2.0}).cause
    assert (cause.label or "unknown") == label and cause.numbers["advantage_over_run"] == 2.0
    if label != "unknown":
        assert f"{max(terms[1:]):g} times the policy term's" in cause.reason
        assert cause.numbers[f"{label}_over_policy"] == max(terms[1:])


def test_the_largest_culprit_s_cause_is_the_step_s_unless_the_ranks_found_another():
    small = replace(CULPRIT, row=0, grad_norm=1.0)
    large = replace(CULPRIT, coefficients=Coefficients(log_prob=math.nan))
    event = completed(batch_of(), small, large)
    assert event.cause.label == event.culprits[1].cause.label == "non_finite" != event.culprits[0].cause.label
    found = completed(batch_of(), large, cause=StepCause("replicas_differ"), over_run={"length": 3.0}).cause
    assert found.label == "replicas_differ" and found.numbers == {"length_over_run": 3.0}


def test_tensors_that_are_not_finite_at_the_ranks_places_are_named():
    old = batch_of().tensors["old_log_probs"].clone()
    old[1, 3] = math.inf
    for places, names in ((((1, 3), (0, 0)), ("old_log_probs",)), (((1, 2), (None, 3)), ()), (((None, 3),), ())):
        cause = StepCause("non_finite_padding", places=places)
        assert completed(batch_of(old_log_probs=old), cause=cause).cause.names == names


# ---- a token that was never sampled, at the end of a turn


def never_sampled(position):
    return Culprit(row=0, positions=(position,), peak=position, log_prob=-9.0, old_log_prob_used=-9.0, grad_norm=9.0)


def test_how_many_events_a_token_that_was_never_sampled_ended_is_counted():
    stored = torch.full((3, 8), -9.0)
    written = torch.full((3, 8), -8.9)
    written[0, 1] = written[0, 6] = 0.0  # what fills in a log-prob that nobody sampled
    batch = batch_of(response_mask=torch.tensor([TURNS] * 3), old_log_probs=stored, rollout_log_probs=written)
    endings = Counter()
    sequence = SequenceRecord(row=0, log_prob=(-9.0,) * 8)
    counts = []
    for _ in range(2):
        found = completed(batch, *map(never_sampled, (1, 6)), endings=endings, sequences=[sequence]).culprits
        assert [culprit.cause.label for culprit in found] == ["not_sampled"] * 2
        counts.append([culprit.cause.numbers.get("events_ended") for culprit in found])
    assert counts == [[1.0, None], [2.0, None]], "the middle of a turn ends none"


@pytest.mark.parametrize(("engines_as_old", "label"), [(False, "not_sampled"), (True, "token_mismatch")])
def test_a_policy_that_moved_during_the_update_does_not_excuse_a_token_that_was_never_sampled(engines_as_old, label):
    old = torch.full((3, 8), -1.0)
    old[0, 1] = -13.0
    written = old.clone()
    written[0, 1] = 0.0
    batch = batch_of(old_log_probs=written if engines_as_old else old, rollout_log_probs=written)
    moved = replace(never_sampled(1), log_prob=-2.0, ratios=Ratios(current_over_old=math.exp(11.0)))
    sequence = SequenceRecord(row=0, log_prob=(-2.0,) * 8)
    (found,) = completed(batch, moved, sequences=[sequence]).culprits
    assert found.cause.label == label
    if not engines_as_old:
        assert found.cause.numbers["drift"] == 11.0 and found.cause.numbers["engine_gap_of_response"] == 0.0


# ---- sequences and the bundle


def test_a_sequence_is_kept_up_to_its_end_with_what_the_batch_says_of_each_token():
    sequence = SequenceRecord(row=1, log_prob=tuple(range(8)), share=None)
    (found,) = complete_sequences(raw_of(sequences=[sequence]), "name", batch_of(), Letters(), Album()).sequences
    assert found.log_prob == (0, 1, 2, 3, 4, 5) and found.share is None and len(found.token_ids) == 6
    assert "".join(found.tokens) == letters(1, 4, 9) and found.prompt == letters(1, 2, 3)
    assert found.old_log_prob == pytest.approx([-(8 + at) / 10 for at in range(6)]) and found.is_weight is None
    assert found.response_mask == (1,) * 6 and found.pictures is None
    (found,) = complete_sequences(raw_of(sequences=[sequence]), "name", batch_of(), None, Album()).sequences
    assert found.token_ids is found.tokens is found.prompt is None and found.log_prob


def test_a_bundle_has_the_listed_rows_one_after_the_other():
    tensors, layout, note = bundle_tensors(raw_of(), batch_of())
    assert note is None and [(entry.rank, entry.micro_batch, entry.rows) for entry in layout] == [
        (0, 0, (0, 2)),
        (1, 2, (2, 3)),
    ]
    assert torch.equal(tensors["responses"], batch_of().tensors["responses"][[2, 0, 1]])
    assert tensors["rng.0.0"].tolist() == [0, 1, 2] and tensors["rng.1.2"].tolist() == [0, 0]
    kept = {name for name in tensors if not name.startswith("rng.")}
    assert kept == {*BUNDLE_KEYS} & batch_of().tensors.keys() and "token_level_scores" not in kept
