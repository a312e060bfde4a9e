# SPDX-License-Identifier: Apache-2.0
"""The driver completes what the ranks sent, and an event that cannot be written stops nothing."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from gradloc.config import EvidenceConfig
from gradloc.core.ranks import Ranks
from gradloc.loop.batch import BatchView
from gradloc.loop.gather import RawEntry, RawEvent, RowShare
from gradloc.loop.pictures import Album
from gradloc.loop.writer import (
    BUNDLE_KEYS,
    EventEnricher,
    EventWriter,
    _decoded,
    bundle_tensors,
    complete_event,
    keep_weights,
)
from gradloc.mismatch.verdict import FLOOR
from gradloc.record import BatchStatistics, Event, Run, Shares, StepCause, Trigger
from gradloc.record.bundle import BundleEntry, BundleMeta
from gradloc.record.bundle import Sequence as SequenceRecord
from tests.explain import a_culprit

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPT, RESPONSE = 4, 8
CULPRIT = a_culprit(row=1, positions=(2, 3), peak=3, log_prob=-1.0, old_log_prob_used=-2.0, grad_norm=9.0)


class Letters:
    """A tokenizer: the token 3 is a d."""

    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(LETTERS[token] for token in ids)


LETTERS_OF = Letters()
C = np.arange(1.0, 25.0, dtype=np.float32).reshape(3, 8)


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


def raw_of(*culprits, sequences=(), known=None, **event):
    event = Event(trigger=Trigger(grad_norm=50.0), culprits=culprits, batch=known or BatchStatistics(), **event)
    layout = [RawEntry(0, 0, [2, 0], C[:2], C[:2, :6]), RawEntry(1, 2, [1], C[2:, :6], C[2:])]
    return RawEvent(event, list(sequences), layout, BundleMeta(1.0, (), event))


def completed(batch, *culprits, context=3, tokenizer=LETTERS_OF, endings=None, over_run=None, **raw):
    made = raw_of(*culprits, **raw)
    return complete_event(made, "name", Run(), EventEnricher(batch, tokenizer, context), over_run, "last", endings)


def sequence_of(sequence, tokenizer=LETTERS_OF):
    return EventEnricher(batch_of(), tokenizer).sequence(sequence, Album())


def one(batch, culprit=CULPRIT, **more):
    (found,) = completed(batch, culprit, **more).culprits
    return found


def letters(row, first, last):
    """Return the text of a row's ids, from first to last."""
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
        found = one(batch, a_culprit(row=0, positions=(0,), peak=0))
        assert found.prompt == "a" * shown + "b"


# ---- numbers


def test_numbers_are_those_at_the_peak():
    found = one(batch_of({"data_source": ["x", "y", "z"], "sequence_id": ["p:0", "p:1", "q:0"]}))
    assert (found.sequence_id, found.data_source, found.at("advantage")) == ("p:1", "y", 11.0)
    assert found.at("old_log_prob") == pytest.approx(-1.1) and found.at("rollout_log_prob") == pytest.approx(-1.6)
    assert found.at("ref_log_prob") == pytest.approx(-0.11) and found.at("is_weight") is None and found.reward == 2.0
    assert found.at("ratio") == pytest.approx(math.e)
    assert found.at("ratio_to_rollout") == pytest.approx(math.exp(0.5)) and found.at("gap") == pytest.approx(0.6)


def test_the_siblings_are_the_other_rows_of_the_prompt():
    found = one(batch_of())
    (sibling,) = found.siblings
    assert (sibling.row, sibling.reward, sibling.advantage, sibling.num_tokens) == (0, 2.0, 0.0, 8)
    assert one(batch_of(), a_culprit(CULPRIT, row=2)).siblings == ()
    assert one(BatchView(batch_of().tensors, {})).siblings is None
    scores = {name: of for name, of in batch_of().tensors.items() if name != "token_level_scores"}
    without = one(BatchView(scores, {"uid": ["p"] * 3}))
    assert [found.reward for found in without.siblings] == [None, None] and without.reward is None


@pytest.mark.parametrize(
    ("index", "row"), [([4, 7, 9], 7), ([0, 0, 0], None), (["a", "b", "c"], None), (None, None)]
)  # verl writes 0 for none
def test_the_row_of_the_data_set_is_what_its_rows_say(index, row):
    assert one(batch_of(None if index is None else {"index": index})).data_row == row


def test_a_culprit_says_which_weights_sampled_its_answer():
    assert one(batch_of({"versions": [None, (3, 4), None]})).versions == (3, 4)
    assert one(batch_of({"versions": [None] * 3})).versions is None and one(batch_of()).versions is None


TURNS = [1, 1, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(("position", "turn"), [(1, (1, 2, 0)), (5, (2, 2, 3)), (7, (2, 2, 3))])
def test_the_turn_is_the_one_that_the_span_begins_in(position, turn):
    batch = batch_of(response_mask=torch.tensor([TURNS] * 3))
    found = one(batch, a_culprit(row=0, positions=(position,), peak=position)).turn
    assert (found.number, found.num_turns, found.num_before) == turn
    assert one(batch_of()).turn is None


def test_a_critic_s_culprit_has_its_target_and_no_log_probs():
    batch = replace(batch_of(values=torch.zeros(3, 8), returns=torch.full((3, 8), 5.0)), is_critics=True)
    found = one(batch)
    assert found.at("value_target") == 5.0 and found.at("old_log_prob") is None and found.at("advantage") == 11.0
    event = completed(batch, CULPRIT)
    assert event.batch.value_error == 5.0 and event.batch.one_minus_prob == 0.0


def test_a_distilled_culprit_has_the_teachers_log_prob_and_no_advantage():
    old = batch_of().tensors["old_log_probs"]
    batch = replace(batch_of(teacher_log_probs=old - 2.0), is_distilled=True)
    found, event = one(batch), completed(batch, CULPRIT)
    assert (
        found.at("teacher_log_prob") == pytest.approx(found.at("old_log_prob") - 2.0) and found.at("advantage") is None
    )
    assert event.is_distilled and event.batch.teacher_gap == pytest.approx(2.0) and event.batch.advantage == 0.0
    assert not completed(batch_of(), CULPRIT).is_distilled


# ---- the batch, and what is the step's own


def test_what_is_typical_of_the_batch_leaves_the_odd_ones_out():
    advantages = torch.full((3, 8), -2.0)
    advantages[0, 0], advantages[0, 1], advantages[1, 7] = math.nan, 0.0, 1e9  # the last is no response token
    ranks = BatchStatistics(jacobian=6.0, low_entropy=0.25)
    found = completed(batch_of(advantages=advantages), CULPRIT, known=ranks).batch
    assert found.advantage == 2.0 and found.jacobian == 6.0 and found.low_entropy == 0.25, "the last two as they were"
    mask, old = batch_of().tensors["response_mask"].bool(), batch_of().tensors["old_log_probs"]
    assert found.one_minus_prob == pytest.approx(1 - float(old[mask].exp().mean()))
    assert found.over_run is None


@pytest.mark.parametrize(
    ("terms", "label"),
    [((None, 2.9), "unknown"), ((None, 3.0), "entropy_term"), ((5.0, 4.0), "kl_term")],
)
def test_without_a_token_a_term_that_leads_is_the_step_s_cause(terms, label):
    statistics = BatchStatistics(kl_over_policy=terms[0], entropy_over_policy=terms[1])
    cause = completed(batch_of(), known=statistics, over_run={"advantage": 2.0}).cause
    assert (cause.label or "unknown") == label and cause.numbers["advantage_over_run"] == 2.0
    if label != "unknown":
        most = max(term or 0.0 for term in terms)
        assert f"{most:g} times the policy term's" in cause.reason and cause.numbers[f"{label}_over_policy"] == most


def test_the_largest_culprit_s_cause_is_the_step_s_unless_the_ranks_found_another():
    small = a_culprit(CULPRIT, row=0, grad_norm=1.0)
    large = a_culprit(CULPRIT, coefficient=math.nan)
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
    return a_culprit(row=0, positions=(position,), peak=position, log_prob=-9.0, old_log_prob_used=-9.0, grad_norm=9.0)


def test_how_many_events_a_token_that_was_never_sampled_ended_is_counted():
    stored = torch.full((3, 8), -9.0)
    written = torch.full((3, 8), -8.9)
    written[0, 1] = written[0, 6] = 0.0  # what fills in a log-prob that nobody sampled
    batch = batch_of(response_mask=torch.tensor([TURNS] * 3), old_log_probs=stored, rollout_log_probs=written)
    endings = Counter()
    sequence = SequenceRecord(row=0, columns={"log_prob": (-9.0,) * 8})
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
    moved = a_culprit(never_sampled(1), log_prob=-2.0)
    sequence = SequenceRecord(row=0, columns={"log_prob": (-2.0,) * 8})
    (found,) = completed(batch, moved, sequences=[sequence]).culprits
    assert found.cause.label == label
    if not engines_as_old:
        assert found.cause.numbers["drift"] == 11.0 and found.cause.numbers["engine_gap_of_response"] == 0.0


# ---- sequences and the bundle


def test_a_sequence_is_kept_up_to_its_end_with_what_the_batch_says_of_each_token():
    sequence = SequenceRecord(row=1, columns={"log_prob": tuple(range(8))})
    found = sequence_of(sequence)
    columns = found.columns
    assert columns["log_prob"] == (0, 1, 2, 3, 4, 5) and len(found.token_ids) == 6
    assert not {"share", "is_weight"} & {*columns}
    assert "".join(found.tokens) == letters(1, 4, 9) and found.prompt == letters(1, 2, 3)
    assert columns["old_log_prob"] == pytest.approx([-(8 + at) / 10 for at in range(6)])
    assert columns["response_mask"] == (1,) * 6 and found.pictures is None
    found = sequence_of(sequence, tokenizer=None)
    assert found.token_ids is found.tokens is found.prompt is None and found.columns["log_prob"]


def test_a_bundle_has_the_listed_rows_one_after_the_other():
    tensors, layout, note = bundle_tensors(raw_of(), batch_of())
    assert note is None and layout == (BundleEntry(0, 0, (0, 2)), BundleEntry(1, 2, (2, 3)))
    assert torch.equal(tensors["responses"], batch_of().tensors["responses"][[2, 0, 1]])
    # each rank pads to its own longest
    assert tensors["log_prob_coefficients"].tolist() == [*C[:2].tolist(), [*C[2, :6].tolist(), 0.0, 0.0]]
    assert tensors["entropy_coefficients"].tolist() == [
        *([*row[:6], 0.0, 0.0] for row in C[:2].tolist()),
        C[2].tolist(),
    ]
    kept = {name for name in tensors if not name.endswith("_coefficients")}
    assert kept == {*BUNDLE_KEYS} & batch_of().tensors.keys() and "token_level_scores" not in kept
    without = replace(raw_of(), layout=[RawEntry(0, 0, [1], C[:1])])
    assert "entropy_coefficients" not in bundle_tensors(without, batch_of())[0]


# ---- on disk


def writer_to(root, tokenizer=None, **evidence):
    settings = SimpleNamespace(root=str(root), evidence=EvidenceConfig(**{"bundle": "off", **evidence}))
    return EventWriter(settings, Run(), tokenizer, {}, "actor")


@pytest.mark.parametrize("bundle", ["off", "full"])
def test_without_text_and_bundle_the_disk_has_no_token_ids_but_the_culprits_own(bundle, tmp_path):
    ids = batch_of().tensors["input_ids"] + 900_000
    batch = batch_of(input_ids=ids, responses=ids[:, PROMPT:])
    writer, sequence = writer_to(tmp_path, LETTERS_OF, text="off", bundle=bundle), {"log_prob": (0.0,) * 8}
    event, _ = writer.write(raw_of(CULPRIT, sequences=[SequenceRecord(row=1, columns=sequence)]), batch, {})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert writer.num_failures == 0 and ("batch.safetensors" in {path.name for path in files}) == (bundle == "full")
    found = {int(number) for path in files for number in re.findall(rb"\b9000\d\d\b", path.read_bytes())}
    (culprit,) = event.culprits
    assert found == set(culprit.token_ids) == set(ids[1, PROMPT + 2 : PROMPT + 4].tolist())


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("odd")], ids=lambda e: type(e).__name__
)
def test_what_fails_costs_an_event_its_words_and_not_its_line(error, caplog, monkeypatch, tmp_path):
    writer = writer_to(tmp_path / "run")
    monkeypatch.setattr("gradloc.loop.writer.EventEnricher", Mock(side_effect=error))
    found, why = writer.write(raw_of(CULPRIT), None, {})
    (record,) = caplog.records
    assert not why and writer.num_failures == 1 and f"{tmp_path}/run failed" in record.getMessage()
    assert bool(record.exc_info) == isinstance(error, ValueError)
    (line,) = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert json.loads(line)["event_id"] == found.event_id and len(json.loads(line)["culprits"]) == 1
    assert not any((tmp_path / "run" / "events").iterdir())


def test_a_folder_that_cannot_be_written_is_said_and_training_goes_on(caplog, tmp_path):
    (tmp_path / "file").write_text("")
    _, why = writer_to(tmp_path / "file" / "run").write(raw_of(CULPRIT), batch_of(), {})
    (record,) = caplog.records
    assert why.startswith("NotADirectoryError") and not record.exc_info


def test_ctrl_c_in_a_tokenizer_ends_the_run_and_keeps_the_event(tmp_path):
    writer = writer_to(tmp_path, SimpleNamespace(decode=Mock(side_effect=KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        writer.write(raw_of(CULPRIT), batch_of(), {})
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 1


def test_ctrl_c_while_a_line_goes_to_the_disk_writes_it_once(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        writer_to(tmp_path).write(raw_of(CULPRIT), batch_of(), {})
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (RuntimeError("broke"), "<7> <8>"),
        (SystemExit(3), "<7> <8>"),
        (RecursionError(), "<7> <8>"),
        ("a\ud800b", "a\ufffdb"),
        (b"abc\xff", "abc\ufffd"),
        (None, "None"),
        (["a"], "['a']"),
        ("x" * 10_000, "x" * 2_000),
    ],
)
def test_whatever_a_tokenizer_does_there_is_a_text(given, text):
    is_error = isinstance(given, BaseException)
    tokenizer = SimpleNamespace(decode=Mock(side_effect=given) if is_error else lambda ids: given)
    assert _decoded(tokenizer, [7, 8]) == text


@pytest.mark.parametrize(
    ("bundle", "is_there", "size_gb", "is_kept"),
    [("off", 1, 0.0, False), ("full", 0, 0.0, False), ("full", 1, 1.0, False), ("full", 1, 0.9, True)],
)
def test_a_bundle_is_written_where_it_is_on_the_ranks_sent_one_and_there_is_room(
    bundle, is_there, size_gb, is_kept, tmp_path
):
    writer, raw = writer_to(tmp_path, bundle=bundle, max_gb=1.0), raw_of(CULPRIT)
    writer.store.size_gb = lambda: size_gb
    event, _ = writer.write(replace(raw, layout=raw.layout * is_there), batch_of(), {})
    written = {path.name for path in (tmp_path / event.folder).iterdir()}
    assert ("batch.safetensors" in written) == ("meta.json" in written) == is_kept and "sequences.json" in written


@pytest.mark.parametrize(
    ("checkpoint", "max_gb", "is_kept"),
    [("before_step", 1e-9, True), ("before_step", 0.0, False), ("off", 20.0, False)],
)
def test_weights_are_kept_where_that_is_asked_for_and_the_folder_is_not_full(checkpoint, max_gb, is_kept, tmp_path):
    evidence = SimpleNamespace(checkpoint=checkpoint, max_gb=max_gb)
    written = []
    settings = SimpleNamespace(evidence=evidence, root=str(tmp_path))
    found = keep_weights(settings, 7, Ranks(), lambda: "weights", lambda *given: written.append(given))
    assert written == ([(found, "weights")] if is_kept else []) and (found is not None) == is_kept
    assert found is None or found.startswith(str(tmp_path))


# ---- what tokens carry at which engine and trainer differ


ROWS = (RowShare(0, 0.5, 0.09, 8), RowShare(1, -0.1, 0.16, 6), RowShare(2, 0.6, 0.0, 8))


def test_prompts_and_data_sources_carry_what_their_rows_do():
    raw = replace(raw_of(shares=Shares(closure=1.0)), row_shares=ROWS)
    batch = batch_of(labels={"data_source": ["a", "b", "a"]})
    found = complete_event(raw, "name", Run(), EventEnricher(batch, None)).shares
    told = [(part.name, part.share, part.num_rows, part.num_tokens) for part in (*found.prompts, *found.sources)]
    wanted = [("q", 0.6, 1, 8), ("p", 0.4, 2, 14), ("a", 1.1, 2, 16), ("b", -0.1, 1, 6)]
    assert [(name, pytest.approx(share), *counts) for name, share, *counts in wanted] == told
    assert found.prompts[1].share_error == pytest.approx(0.5) and found.closure == 1.0
    assert [part.name for part in found.rows] == ["2", "0", "1"]
    bare = BatchView(batch.tensors, {})
    alone = complete_event(raw, "name", Run(), EventEnricher(bare, None)).shares
    assert alone.prompts is alone.sources is None and alone.rows == found.rows
    many = replace(raw, row_shares=tuple(RowShare(row, row / 1e3, 0.0, 1) for row in range(40)))
    (first, *_, last) = complete_event(many, "name", Run(), EventEnricher(bare, None)).shares.rows
    assert (first.name, last.name) == ("39", "24"), "sixteen"
    assert completed(batch, shares=Shares(is_trusted=False)).shares == Shares(is_trusted=False)


def differing_batch(at=((1, 5), (2, 7)), **tensors):
    """Ten rows of thirty tokens with the noise of kernels, and a few tokens that differ by far more."""
    torch.manual_seed(0)
    old = -torch.rand(10, 30) * 3 - 0.5
    rollout = old + 0.02 * torch.randn(10, 30) * -torch.expm1(old)
    for row, position in at:
        rollout[row, position] = old[row, position] + 2.0
    rollout = rollout.clamp(max=0)
    given = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": torch.ones(10, 30)}
    given |= {name: torch.ones(10, 30) for name in ("advantages", "token_level_scores")}
    ids = torch.zeros(10, 32, dtype=torch.long)
    given |= {"input_ids": ids, "responses": ids[:, 2:], "attention_mask": torch.ones_like(ids)}
    return BatchView({**given, **tensors}, {})


def shares_of(row, **known):
    shares = tuple(known.get(f"at_{position}", 0.001) for position in range(30))
    return SequenceRecord(row=row, columns={"share": shares})


@pytest.mark.parametrize(
    ("at", "carried"), [(((1, 5), (2, 7)), 0.9), (((1, 5),), 0.6), (((1, 6),), 0.001), (((9, 0),), 0.0), ((), 0.0)]
)
def test_differing_tokens_carry_what_their_shares_add_up_to(at, carried):
    told = [shares_of(1, at_5=0.6), shares_of(2, at_7=0.3), SequenceRecord(row=3)]
    found = completed(differing_batch(at), sequences=told, shares=Shares(closure=1.0)).mismatch
    assert found.spike_share == pytest.approx(carried) and found.token_share == pytest.approx(len(at) / 300)
    assert 0.015 < found.noise < 0.025


def test_in_a_batch_that_differs_everywhere_noise_is_what_kernels_make():
    batch = differing_batch()
    stale = batch.tensors["old_log_probs"] - 0.5 * (torch.arange(300.0).view(10, 30) % 7 - 3)
    found = completed(differing_batch(rollout_log_probs=stale.clamp(max=0)), shares=Shares(closure=1.0)).mismatch
    assert found.noise == FLOOR and 0.2 < found.token_share < 0.7


@pytest.mark.parametrize("shares", [None, Shares(is_trusted=False)])
def test_without_shares_nothing_is_said_of_what_differing_tokens_carry(shares):
    assert completed(differing_batch(), shares=shares).mismatch is None


def test_nothing_is_said_where_the_trainer_takes_the_engines_log_probs_or_few_tokens_count():
    old = differing_batch().tensors["old_log_probs"]
    for tensors in ({"rollout_log_probs": old}, {"response_mask": (torch.arange(300) < 150).float().view(10, 30)}):
        assert completed(differing_batch(**tensors), shares=Shares(closure=1.0)).mismatch is None
