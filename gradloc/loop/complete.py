# SPDX-License-Identifier: Apache-2.0
"""From raw numbers to an event that can be read: text, log-probs, ratios, cause. Runs on the driver.

The driver holds the whole batch, the tokenizer and the rewards, so the actor sends only what it alone knows.

Shapes: R rows of the batch, P prompt positions, T response positions.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from ..record import (
    BatchStatistics,
    BundleEntry,
    Culprit,
    Event,
    Ratios,
    Run,
    SequenceFile,
    Sibling,
    StepCause,
    Turn,
    turns_in,
)
from ..record import Sequence as SequenceRecord
from ..words.causes import classify
from ..words.culprits import leader
from ..words.numbers import number
from ..words.verdict import verdict_sentences
from .batch import BatchView
from .gather import ratio
from .pictures import Album, inputs_of, kept_inputs
from .wire import RawEvent

BUNDLE_KEYS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "responses",
    "response_mask",
    "old_log_probs",
    "advantages",
    "ref_log_prob",
    "rollout_log_probs",
    "rollout_is_weights",
    "teacher_log_probs",
    "lopti_mask",
    "num_items_in_batch",
)

_FROM_RANKS = ("log_prob", "entropy", "coefficient", "share", "value")
"""Fields of a sequence's record that the ranks filled."""
_COLUMNS = {
    "response_mask": "response_mask",
    "advantage": "advantages",
    "old_log_prob": "old_log_probs",
    "rollout_log_prob": "rollout_log_probs",
    "ref_log_prob": "ref_log_prob",
    "is_weight": "rollout_is_weights",
}
"""Further ones, and the batch's tensors (R, T) that they come from."""
_CRITICS_COLUMNS = {"response_mask": "response_mask", "advantage": "advantages", "value_target": "returns"}
"""Those that say something of a critic's gradient."""
_DISTILLED_COLUMNS = {
    **{name: key for name, key in _COLUMNS.items() if name not in ("advantage", "ref_log_prob")},
    "teacher_log_prob": "teacher_log_probs",
}
"""Likewise where distillation is the whole loss."""
_TERMS = {"entropy_term": "entropy term", "kl_term": "KL term"}
_PLACEHOLDERS = 8
"""More equal tokens in a row than these, in a prompt with a picture, stand for the picture and are shown as one."""
_LEADS = 3.0
"""A term whose coefficients are this many times the others' carries the gradient."""


def complete_event(
    raw: RawEvent,
    event_id: str,
    run: Run,
    batch: BatchView,
    tokenizer: Any,
    context: int,
    over_run: dict[str, float] | None = None,
    last_checkpoint: str | None = None,
    endings: Counter[int] | None = None,
) -> Event:
    """Turn what the ranks sent into the record that goes to disk.

    Args:
        tokenizer: decodes the text; None keeps text and prompts out.
        context: tokens of text to keep on either side of a culprit.
        over_run: how many times what is typical of the run the batch's robust numbers are.
        last_checkpoint: the newest before this step.
        endings: of each token that was never sampled, in how many events it ended a turn; this one is added.
    """
    statistics = replace(_statistics(batch, raw), over_run=over_run or None)
    texts = _Texts(tokenizer, batch, context)
    now = {sequence.row: sequence.log_prob or () for sequence in raw.sequences}
    made_by = run if raw.event.step.stage is None else None  # a stage of Lopti's has some of the advantages
    culprits = []
    for culprit in raw.event.culprits:
        completed = _complete_culprit(culprit, batch, texts)
        cause = classify(completed, statistics, _by_engine(batch, completed.row, now.get(culprit.row, ())), made_by)
        culprits.append(replace(completed, cause=cause))
    culprits = _counted_endings(culprits, batch, Counter() if endings is None else endings)
    event = replace(raw.event, event_id=event_id, run=run, culprits=tuple(culprits), batch=statistics)
    if event.consequence is not None:
        event = replace(event, consequence=replace(event.consequence, last_checkpoint=last_checkpoint))
    event = replace(event, cause=_step_cause(event, batch.tensors))
    return replace(event, verdict=verdict_sentences(event))


def complete_sequences(raw: RawEvent, event_id: str, batch: BatchView, tokenizer: Any, album: Album) -> SequenceFile:
    """The sequences that hold culprits, token by token: what the report shades. ``album`` receives their pictures."""
    texts = _Texts(tokenizer, batch, 0)
    completed = [_complete_sequence(sequence, batch, texts, album) for sequence in raw.sequences]
    return SequenceFile(event_id=event_id, sequences=tuple(completed))


def bundle_tensors(
    raw: RawEvent, batch: BatchView
) -> tuple[dict[str, torch.Tensor], tuple[BundleEntry, ...], str | None]:
    """Cut the micro-batches that the actor listed out of the driver's batch.

    Returns:
        Tensors with the listed rows one after the other, plus one ``rng.<rank>.<micro_batch>`` each and the rows'
        multi-modal inputs; which rows of these tensors are whose; and why there are no multi-modal inputs, if so.
    """
    rows = [row for entry in raw.layout for row in entry.rows]
    tensors = {key: batch.tensors[key][rows].clone() for key in BUNDLE_KEYS if key in batch.tensors.keys()}
    layout, start = [], 0
    for entry in raw.layout:
        end = start + len(entry.rows)
        layout.append(BundleEntry(entry.rank, entry.micro_batch, (start, end)))
        tensors[f"rng.{entry.rank}.{entry.micro_batch}"] = torch.from_numpy(entry.rng.copy())
        start = end
    inputs, note = kept_inputs(batch, rows)
    return {**tensors, **inputs}, tuple(layout), note


def _step_cause(event: Event, tensors: Any) -> StepCause:
    """What the ranks found beside tokens, else the largest culprit's cause, else the loss term that carries it."""
    cause, batch, first = event.cause, event.batch, leader(event.culprits)
    over_run: dict[str, float | None] = {f"{name}_over_run": value for name, value in (batch.over_run or {}).items()}
    if cause is not None:
        names = cause.names or _not_finite_at(tensors, cause.places)
        return replace(cause, numbers={**cause.numbers, **over_run}, names=names)
    if first is not None:
        return StepCause(first.cause.label, numbers=first.cause.numbers)
    if event.first_not_finite is not None and event.first_not_finite.way == "backward":
        why = "log-probs, advantages and the loss's own derivative are finite, the backward through the model is not"
        return StepCause("non_finite_backward", why)
    terms = {"entropy_term": batch.entropy_over_policy or 0.0, "kl_term": batch.kl_over_policy or 0.0}
    label = max(terms, key=lambda name: terms[name])
    if terms[label] < _LEADS:
        return StepCause(numbers=over_run)
    why = f"the coefficients of the loss's {_TERMS[label]} are {number(terms[label], 3)} times the policy term's"
    return StepCause(label, why, {f"{label}_over_policy": terms[label], **over_run})


def _not_finite_at(tensors: Any, places: tuple[tuple[int | None, int], ...]) -> tuple[str, ...]:
    """The batch's tensors (R, T) that are not finite at one of these places."""
    known = [(row, position) for row, position in places if row is not None]
    if not known:
        return ()
    shape, at = tensors["response_mask"].shape, tuple(zip(*known, strict=True))
    keys = [key for key in BUNDLE_KEYS if key in tensors.keys() and tensors[key].shape == shape]
    return tuple(key for key in keys if not torch.isfinite(tensors[key][at]).all())


def _statistics(batch: BatchView, raw: RawEvent) -> BatchStatistics:
    tensors, mask = batch.tensors, batch.tensors["response_mask"].bool()
    name, values = batch.signal()
    sizes = values[mask].abs()
    sizes = sizes[torch.isfinite(sizes) & (sizes > 0)]
    has_old = "old_log_probs" in tensors.keys() and not batch.is_critics
    probs = tensors["old_log_probs"][mask].float().exp() if has_old else sizes[:0]
    norm_after, coefficient_norm = raw.event.certificate.norm_after, raw.residual_coefficient_norm
    has_jacobian = norm_after is not None and math.isfinite(norm_after) and 0 < coefficient_norm < math.inf
    layers = raw.event.layer_history
    typical: dict[str, Any] = {name: float(sizes.median()) if len(sizes) else 0.0}
    return BatchStatistics(
        **typical,
        one_minus_prob=float(1 - probs.nanmean()) if len(probs) else 0.0,
        jacobian=norm_after / coefficient_norm if norm_after is not None and has_jacobian else None,
        layer_spread=None if layers is None else layers.spread,
        low_entropy=raw.low_entropy,
        entropy_over_policy=_over_policy(raw, "entropy"),
        kl_over_policy=_over_policy(raw, "kl"),
    )


def _over_policy(raw: RawEvent, term: str) -> float | None:
    policy, other = raw.term_norms["policy"], raw.term_norms[term]
    return other / policy if policy > 0 and other > 0 and math.isfinite(policy + other) else None


class _Texts:
    """Decodes pieces of rows; None without a tokenizer, and token ids that it does not know are shown as numbers."""

    def __init__(self, tokenizer: Any, batch: BatchView, context: int):
        self._tokenizer, self._batch, self._context = tokenizer, batch, context

    def decode(self, ids: list[int]) -> str | None:
        if self._tokenizer is None:
            return None
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=False)
        except Exception:
            return " ".join(f"<{token}>" for token in ids)

    def tokens(self, ids: list[int]) -> tuple[str, ...] | None:
        """Each by itself."""
        return None if self._tokenizer is None else tuple(self.decode([token]) or "" for token in ids)

    def prompt_ids(self, row: int) -> list[int]:
        tensors = self._batch.tensors
        num_response = tensors["responses"].shape[1]
        attended = tensors["attention_mask"][row].bool()[:-num_response]
        ids = tensors["input_ids"][row][:-num_response][attended].tolist()
        if not inputs_of(self._batch, row):
            return ids
        runs = [(token, len(list(run))) for token, run in groupby(ids)]  # a picture takes hundreds of equal tokens
        return [token for token, length in runs for _ in range(1 if length > _PLACEHOLDERS else length)]

    def response_ids(self, row: int) -> list[int]:
        responses = self._batch.tensors["responses"][row]
        attended = self._batch.tensors["attention_mask"][row][-len(responses) :]
        return responses[: int(attended.sum())].tolist()

    def around(self, row: int, first: int, last: int) -> dict[str, Any]:
        """Text of a span of response positions ``first..last`` and what stands around it, as a culprit's fields."""
        responses = self._batch.tensors["responses"][row].tolist()
        prompt, span = self.prompt_ids(row), responses[first : last + 1]
        before = (prompt + responses[:first])[-self._context :] if self._context else []
        return {
            "token_ids": tuple(span),
            "tokens": self.tokens(span),
            "text_before": self.decode(before),
            "text_after": self.decode(self.response_ids(row)[last + 1 : last + 1 + self._context]),
            "prompt": self.decode(prompt),
        }


def _columns(batch: BatchView) -> dict[str, torch.Tensor]:
    """The batch's tensors (R, T) by the record's fields: those that there are, and that concern this model."""
    names = _CRITICS_COLUMNS if batch.is_critics else _DISTILLED_COLUMNS if batch.is_distilled else _COLUMNS
    return {name: batch.tensors[key] for name, key in names.items() if key in batch.tensors.keys()}


def _complete_sequence(sequence: SequenceRecord, batch: BatchView, texts: _Texts, album: Album) -> SequenceRecord:
    row = sequence.row
    assert row is not None  # the driver numbers the rows
    ids = texts.response_ids(row)
    tokens = texts.tokens(ids)
    numbers: dict[str, Any] = {name: getattr(sequence, name) for name in _FROM_RANKS}
    numbers |= {name: values[row].tolist() for name, values in _columns(batch).items()}
    numbers = {name: None if values is None else tuple(values[: len(ids)]) for name, values in numbers.items()}
    pictures, note = album.add(inputs_of(batch, row)) if tokens is not None else (None, None)
    return replace(
        sequence,
        sequence_id=_label(batch, "sequence_id", row),
        data_source=_label(batch, "data_source", row),
        prompt=texts.decode(texts.prompt_ids(row)),
        token_ids=None if tokens is None else tuple(ids),
        tokens=tokens,
        pictures=pictures,
        pictures_note=note,
        **numbers,
    )


def _counted_endings(culprits: list[Culprit], batch: BatchView, endings: Counter[int]) -> list[Culprit]:
    """Those that were never sampled and end a turn say in how many events the same token did."""
    tokens = [_unsampled_ending(culprit, batch.tensors) for culprit in culprits]
    endings.update({token for token in tokens if token is not None})
    counted = []
    for culprit, token in zip(culprits, tokens, strict=True):
        numbers = culprit.cause.numbers
        if token is not None:
            numbers = {**numbers, "events_ended": float(endings[token])}
        counted.append(replace(culprit, cause=replace(culprit.cause, numbers=numbers)))
    return counted


def _unsampled_ending(culprit: Culprit, tensors: Any) -> int | None:
    """The token, where it was never sampled and ends a turn."""
    turns = turns_in(tensors["response_mask"][culprit.row].tolist())
    is_last = any(turn.stop - 1 == culprit.peak for turn in turns)
    is_ending = is_last and culprit.cause.label == "not_sampled"
    return int(tensors["responses"][culprit.row, culprit.peak]) if is_ending else None


def _by_engine(batch: BatchView, row: int | None, now: Sequence[float]) -> list[tuple[float, float]]:
    """What trainer and rollout engine say of each token of a row in the loss; empty where the latter is not known.

    The trainer's log-probs are those before the update, since the policy moves during it, and ``now`` where the batch
    has none: bypass mode stores the engine's as the old ones.
    """
    tensors = batch.tensors
    if not now or "rollout_log_probs" not in tensors.keys():
        return []
    mask = tensors["response_mask"][row].bool()
    engines, trainers = tensors["rollout_log_probs"][row][mask], torch.tensor(now)[mask[: len(now)]]
    if "old_log_probs" in tensors.keys() and not torch.equal(tensors["old_log_probs"][row][mask], engines):
        trainers = tensors["old_log_probs"][row][mask]
    return list(zip(trainers.tolist(), engines.tolist(), strict=False))


def _complete_culprit(culprit: Culprit, batch: BatchView, texts: _Texts) -> Culprit:
    """All but the cause."""
    tensors, row, positions = batch.tensors, culprit.row, culprit.positions
    assert row is not None  # the driver numbers the rows
    at = {name: float(values[row, culprit.peak]) for name, values in _columns(batch).items()}
    stored, rollout = at.get("old_log_prob"), at.get("rollout_log_prob")
    return replace(
        culprit,
        sequence_id=_label(batch, "sequence_id", row),
        data_source=_label(batch, "data_source", row),
        data_row=_data_row(batch, row),
        reward=_reward(tensors, row),
        advantage=at.get("advantage"),
        value_target=at.get("value_target"),
        teacher_log_prob=at.get("teacher_log_prob"),
        old_log_prob_stored=stored,
        rollout_log_prob=rollout,
        ref_log_prob=at.get("ref_log_prob"),
        is_weight=at.get("is_weight"),
        ratios=Ratios(
            current_over_old=ratio(culprit.log_prob, culprit.old_log_prob_used),
            current_over_rollout=ratio(culprit.log_prob, rollout),
            old_over_rollout=ratio(stored, rollout),
            sequence_geometric_mean=culprit.ratios.sequence_geometric_mean,
        ),
        siblings=_siblings(batch, row),
        turn=_turn(tensors["response_mask"][row].tolist(), positions[0]),
        **texts.around(row, positions[0], positions[-1]),
    )


def _turn(mask: list[float], position: int) -> Turn | None:
    turns = turns_in(mask)
    if len(turns) < 2:
        return None
    number = next(at for at, turn in enumerate(turns) if position < turn.stop)
    end_before = turns[number - 1].stop if number else 0
    return Turn(number + 1, len(turns), turns[number].start - end_before)


def _siblings(batch: BatchView, row: int) -> tuple[Sibling, ...] | None:
    """The other rows of the same prompt, in the order of the batch; None where the batch has no uids."""
    tensors, uids = batch.tensors, batch.labels.get("uid")
    if uids is None:
        return None
    siblings = []
    for other in (at for at, uid in enumerate(uids) if uid == uids[row] and at != row):
        advantages = tensors["advantages"][other][tensors["response_mask"][other].bool()]
        siblings.append(
            Sibling(
                row=other,
                sequence_id=_label(batch, "sequence_id", other),
                reward=_reward(tensors, other),
                advantage=float(advantages[0]) if len(advantages) else None,
                num_tokens=len(advantages),
            )
        )
    return tuple(siblings)


def _reward(tensors: Any, row: int) -> float | None:
    return float(tensors["token_level_scores"][row].sum()) if "token_level_scores" in tensors.keys() else None


def _data_row(batch: BatchView, row: int) -> int | None:
    """None where the batch's rows say no index, or all the same: verl writes 0 for none."""
    known = batch.labels.get("index")
    if known is None or len({str(index) for index in known}) < 2 or not str(known[row]).isdecimal():
        return None
    return int(str(known[row]))


def _label(batch: BatchView, key: str, row: int) -> str | None:
    return str(batch.labels[key][row]) if key in batch.labels else None
