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
from ..words.leader import leader
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
    "lopti_mask",
    "num_items_in_batch",
)

_OF_FORWARD = ("log_prob", "entropy", "coefficient", "share", "value")
"""Fields of a sequence's record that the ranks filled."""
_OF_BATCH = {
    "response_mask": "response_mask",
    "old_log_prob": "old_log_probs",
    "rollout_log_prob": "rollout_log_probs",
    "ref_log_prob": "ref_log_prob",
    "advantage": "advantages",
    "is_weight": "rollout_is_weights",
}
"""Further ones, and the batch's tensors (R, T) that they come from."""
_OF_CRITICS = ("response_mask", "advantage")
_AT_CRITICS = ("advantages", "returns")
"""What among these says something of a critic's gradient."""


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
    culprits = tuple(
        _complete_culprit(culprit, batch, texts, statistics, now.get(culprit.row, ()), made_by)
        for culprit in raw.event.culprits
    )
    culprits = _counted_endings(culprits, batch, Counter() if endings is None else endings)
    event = replace(raw.event, event_id=event_id, run=run, culprits=culprits, batch=statistics)
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
    found, batch = event.cause, event.batch
    over_run = {f"{name}_over_run": value for name, value in (batch.over_run or {}).items()}
    if found is not None:
        numbers: dict[str, float | None] = {**found.numbers, **over_run}
        return replace(found, numbers=numbers, names=found.names or _not_finite_at(tensors, found.places))
    first = leader(event.culprits)
    if first is not None:
        return StepCause(first.cause.label, numbers=first.cause.numbers)
    if event.first_not_finite is not None and event.first_not_finite.way == "backward":
        why = "log-probs, advantages and the loss's own derivative are finite, the backward through the model is not"
        return StepCause("non_finite_backward", why)
    terms = {"entropy_term": batch.entropy_over_policy or 0.0, "kl_term": batch.kl_over_policy or 0.0}
    label = max(terms, key=lambda name: terms[name])
    if terms[label] >= _LEADS:
        why = f"the coefficients of the loss's {_TERMS[label]} are {number(terms[label], 3)} times the policy term's"
        return StepCause(label, why, {f"{label}_over_policy": terms[label], **over_run})
    return StepCause(numbers={**over_run})


def _not_finite_at(tensors: Any, places: tuple[tuple[int | None, int], ...]) -> tuple[str, ...]:
    """The batch's tensors (R, T) that are not finite at one of these places."""
    rows = [row for row, _ in places if row is not None]
    positions = [position for row, position in places if row is not None]
    shape = tensors["response_mask"].shape
    known = [key for key in BUNDLE_KEYS if key in tensors.keys() and tensors[key].shape == shape]
    return tuple(key for key in known if rows and not bool(torch.isfinite(tensors[key][rows, positions]).all()))


def _statistics(batch: BatchView, raw: RawEvent) -> BatchStatistics:
    tensors = batch.tensors
    mask = tensors["response_mask"].bool()
    name, values = batch.signal()
    sizes = values[mask].abs()
    sizes = sizes[torch.isfinite(sizes) & (sizes > 0)]
    has_old = "old_log_probs" in tensors.keys() and not batch.is_critics
    probs = tensors["old_log_probs"][mask].float().exp() if has_old else sizes[:0]
    norm_after, coefficient_norm = raw.event.certificate.norm_after, raw.residual_coefficient_norm
    jacobian = None
    if norm_after is not None and math.isfinite(norm_after) and 0 < coefficient_norm < math.inf:
        jacobian = norm_after / coefficient_norm
    layers = raw.event.layer_history
    typical: dict[str, Any] = {name: float(sizes.median()) if len(sizes) else 0.0}
    return BatchStatistics(
        **typical,
        one_minus_prob=float(1 - probs.nanmean()) if len(probs) else 0.0,
        jacobian=jacobian,
        layer_spread=None if layers is None else layers.spread,
        low_entropy=raw.low_entropy,
        entropy_over_policy=_over_policy(raw, "entropy"),
        kl_over_policy=_over_policy(raw, "kl"),
    )


def _over_policy(raw: RawEvent, term: str) -> float | None:
    policy, other = raw.term_norms["policy"], raw.term_norms[term]
    return other / policy if policy > 0 and other > 0 and math.isfinite(policy + other) else None


class _Texts:
    """Decodes pieces of rows; bad token ids become a visible stand-in instead of an error."""

    def __init__(self, tokenizer: Any, batch: BatchView, context: int):
        self._tokenizer = tokenizer
        self._batch, self._tensors = batch, batch.tensors
        self._context = context

    def decode(self, ids: list[int]) -> str | None:
        return None if self._tokenizer is None else self._text(ids)

    def _text(self, ids: list[int]) -> str:
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=False)
        except Exception:
            return " ".join(f"<{token}>" for token in ids)

    def prompt(self, row: int) -> str | None:
        return self.decode(self._prompt_ids(row))

    def _prompt_ids(self, row: int) -> list[int]:
        num_response = self._tensors["responses"].shape[1]
        attended = self._tensors["attention_mask"][row].bool()[:-num_response]
        ids = self._tensors["input_ids"][row][:-num_response][attended].tolist()
        if not inputs_of(self._batch, row):
            return ids
        runs = [(token, len(list(run))) for token, run in groupby(ids)]  # a picture takes hundreds of equal tokens
        return [token for token, length in runs for _ in range(1 if length > _PLACEHOLDERS else length)]

    def tokens(self, ids: list[int]) -> tuple[str, ...] | None:
        """Each by itself."""
        return None if self._tokenizer is None else tuple(self._text([token]) for token in ids)

    def around(self, row: int, first: int, last: int) -> dict[str, Any]:
        """Text of a span of response positions ``first..last`` and what stands around it, as a culprit's fields."""
        responses = self._tensors["responses"][row]
        num_response = responses.shape[0]
        attended = self._tensors["attention_mask"][row].bool()
        prompt = self._prompt_ids(row)
        answer = responses[attended[-num_response:]].tolist()
        span = responses[first : last + 1].tolist()
        before = (prompt + responses[:first].tolist())[-self._context :] if self._context else []
        after = answer[last + 1 : last + 1 + self._context]
        return {
            "token_ids": tuple(span),
            "tokens": self.tokens(span),
            "text_before": self.decode(before),
            "text_after": self.decode(after),
            "prompt": self.decode(prompt),
        }


def _complete_sequence(sequence: SequenceRecord, batch: BatchView, texts: _Texts, album: Album) -> SequenceRecord:
    tensors, row = batch.tensors, sequence.row
    assert row is not None  # the driver numbers the rows
    num_tokens = int(tensors["attention_mask"][row][-tensors["responses"].shape[1] :].sum())
    ids = tensors["responses"][row][:num_tokens].tolist()
    tokens = texts.tokens(ids)
    numbers: dict[str, Any] = {name: getattr(sequence, name) for name in _OF_FORWARD}
    of_batch = {name: key for name, key in _OF_BATCH.items() if name in _OF_CRITICS or not batch.is_critics}
    of_batch |= {"value_target": "returns"} if batch.is_critics else {}
    numbers |= {name: tensors[key][row].tolist() for name, key in of_batch.items() if key in tensors.keys()}
    for name, values in numbers.items():
        numbers[name] = None if values is None else tuple(values[:num_tokens])
    pictures, note = album.add(inputs_of(batch, row)) if tokens is not None else (None, None)
    return replace(
        sequence,
        sequence_id=_label(batch, "sequence_id", row),
        data_source=_label(batch, "data_source", row),
        prompt=texts.prompt(row),
        token_ids=None if tokens is None else tuple(ids),
        tokens=tokens,
        pictures=pictures,
        pictures_note=note,
        **numbers,
    )


def _counted_endings(culprits: tuple[Culprit, ...], batch: BatchView, endings: Counter[int]) -> tuple[Culprit, ...]:
    """Those that were never sampled and end a turn say in how many events the same token did."""

    def ending(culprit: Culprit) -> int | None:
        if culprit.cause.label != "not_sampled":
            return None
        mask = batch.tensors["response_mask"][culprit.row]
        is_last = any(turn.stop - 1 == culprit.peak for turn in turns_in(mask.tolist()))
        return int(batch.tensors["responses"][culprit.row, culprit.peak]) if is_last else None

    tokens = [ending(culprit) for culprit in culprits]
    endings.update({token for token in tokens if token is not None})
    counts = [{} if token is None else {"events_ended": float(endings[token])} for token in tokens]
    return tuple(
        replace(culprit, cause=replace(culprit.cause, numbers={**culprit.cause.numbers, **count}))
        for culprit, count in zip(culprits, counts, strict=True)
    )


def _by_engine(batch: BatchView, row: int, now: Sequence[float]) -> list[tuple[float, float]]:
    """What trainer and rollout engine say of each token of a row in the loss; empty where the latter is not known."""
    written = batch.tensors["rollout_log_probs"][row].tolist() if "rollout_log_probs" in batch.tensors.keys() else []
    places = batch.tensors["response_mask"][row].nonzero().flatten().tolist() if now and written else []
    return [(now[place], written[place]) for place in places]


def _complete_culprit(
    culprit: Culprit,
    batch: BatchView,
    texts: _Texts,
    statistics: BatchStatistics,
    now: Sequence[float],
    run: Run | None,
) -> Culprit:
    tensors, row, positions = batch.tensors, culprit.row, culprit.positions
    assert row is not None  # the driver numbers the rows

    def at(key: str) -> float | None:
        if batch.is_critics and key not in _AT_CRITICS:
            return None
        return float(tensors[key][row, culprit.peak]) if key in tensors.keys() else None

    stored, rollout = at("old_log_probs"), at("rollout_log_probs")
    completed = replace(
        culprit,
        sequence_id=_label(batch, "sequence_id", row),
        data_source=_label(batch, "data_source", row),
        data_row=_data_row(batch, row),
        reward=float(tensors["token_level_scores"][row].sum()) if "token_level_scores" in tensors.keys() else None,
        advantage=at("advantages"),
        value_target=at("returns") if batch.is_critics else None,
        old_log_prob_stored=stored,
        rollout_log_prob=rollout,
        ref_log_prob=at("ref_log_prob"),
        is_weight=at("rollout_is_weights"),
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
    return replace(completed, cause=classify(completed, statistics, _by_engine(batch, row, now), run))


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
    mask, found = tensors["response_mask"].bool(), []
    for other in (at for at, uid in enumerate(uids) if uid == uids[row] and at != row):
        advantages = tensors["advantages"][other][mask[other]]
        scores = tensors["token_level_scores"][other] if "token_level_scores" in tensors.keys() else None
        found.append(
            Sibling(
                row=other,
                sequence_id=_label(batch, "sequence_id", other),
                reward=None if scores is None else float(scores.sum()),
                advantage=float(advantages[0]) if len(advantages) else None,
                num_tokens=len(advantages),
            )
        )
    return tuple(found)


def _data_row(batch: BatchView, row: int) -> int | None:
    """None where the batch's rows say no index, or all the same: verl writes 0 for none."""
    known = batch.labels.get("index")
    if known is None or len({str(index) for index in known}) < 2 or not str(known[row]).isdecimal():
        return None
    return int(str(known[row]))


def _label(batch: BatchView, key: str, row: int) -> str | None:
    return str(batch.labels[key][row]) if key in batch.labels else None
