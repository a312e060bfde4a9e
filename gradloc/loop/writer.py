# SPDX-License-Identifier: Apache-2.0
"""Make an event on disk from raw numbers: complete it with what only the driver knows, and write it once.

The driver holds the whole batch, the tokenizer and the rewards, so the ranks send only what they alone know.

Shapes: R rows of the batch, P prompt positions, T response positions.
"""

import logging
import math
import os
import shutil
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch.nn.functional import pad

from ..core.ranks import PeerFailure, Ranks
from ..explain.causes import classify
from ..explain.cures import cures_for
from ..explain.documents import Document, foreign_in, repeats_in, unspaced_in
from ..explain.numbers import number
from ..explain.story import verdict_sentences
from ..keys import VERSIONS_KEY
from ..mismatch import MismatchError, beyond_noise
from ..notify.background import error_text
from ..record import (
    BatchStatistics,
    Culprit,
    Event,
    Mismatch,
    PartShare,
    Run,
    Shares,
    Sibling,
    StepCause,
    Turn,
    turns_in,
)
from ..record.bundle import BundleEntry, SequenceFile
from ..record.bundle import Sequence as SequenceRecord
from ..record.columns import ACTOR, CRITIC, DISTILLED, OF_A_TOKEN, STORED, TENSORS
from ..record.origin import now
from ..record.store import EventStore
from .batch import NO_TOKEN, BatchView
from .gather import RawEvent, RowShare
from .pictures import Album, inputs_of, kept_inputs

T = TypeVar("T")

logger = logging.getLogger(__name__)

_INPUTS = ("input_ids", "attention_mask", "position_ids", "responses")
BUNDLE_KEYS = (*_INPUTS, *TENSORS)
"""The batch's tensors that a bundle keeps."""
_TERMS = {"entropy_term": "entropy term", "kl_term": "KL term"}
_PLACEHOLDERS = 8
"""More equal tokens in a row than these, in a prompt with a picture, are the picture's and are shown as one."""
_LEADS = 3.0
"""A term whose coefficients are this many times the others' carries the gradient."""


_MOST_PARTS = 16
"""The number of rows, prompts and data sources whose shares are recorded: the largest of each."""


class EventWriter:
    """Writes a run's events, see :class:`~.driver.Driver`. Whatever fails is logged and counted; training goes on."""

    def __init__(self, settings: Any, run: Run, tokenizer: Any, trained: dict[str, Any], model: str):
        self.evidence, self.run, self.trained, self.model = settings.evidence, run, trained, model
        self.tokenizer = tokenizer if self.evidence.text == "on" else None
        self.store = EventStore(settings.root)
        self.num_failures = 0
        self.last_checkpoint: str | None = None
        """The newest that the trainer has written or resumed from."""
        self._endings: Counter[int] = Counter()

    def write(self, raw: RawEvent, batch: BatchView, over_run: dict[str, float]) -> tuple[Event, str]:
        """Write one event of this whole batch, which is ``over_run`` times what is typical of the run, by name.

        Returns:
            Its record, as far as it could be completed, and why writing failed ("" where it did not).
        """
        event, step = raw.event, raw.event.step
        try:
            with self.store.new_event(step.global_step, step.epoch, step.mini_batch, self.model) as name:
                event = replace(event, event_id=name, run=self.run, time=now())
                try:
                    driver = EventEnricher(batch, self.tokenizer, self.evidence.context_tokens)
                    made = complete_event(raw, name, self.run, driver, over_run, self.last_checkpoint, self._endings)
                    event = replace(made, time=now())
                    return self._keep(event, raw, driver), ""
                except BaseException as error:  # also Ctrl-C
                    if self.store.last != name:
                        self.store.append(event)
                    if not isinstance(error, Exception):
                        raise
                    self._failed(step, error, "its line is written with what is known; training goes on")
                    return event, ""
        except Exception as error:
            self._failed(step, error, "training goes on")
            return event, error_text(error)

    def _failed(self, step: Any, error: Exception, then: str) -> None:
        self.num_failures += 1
        what = "gradloc: writing an event of step %s to %s failed (%s); %s"
        is_known = isinstance(error, OSError)  # such as a full disk, which needs no traceback
        logger.error(what, step.global_step, self.store.root, error_text(error), then, exc_info=not is_known)

    def _keep(self, event: Event, raw: RawEvent, driver: "EventEnricher") -> Event:
        """Write an event's folder and its line; return the event with its folder."""
        album = Album()
        sequences = tuple(driver.sequence(sequence, album) for sequence in raw.sequences)
        records: dict[str, Any] = {"sequences": SequenceFile(event_id=event.event_id, sequences=sequences)}
        tensors: dict[str, torch.Tensor] = {}
        root, max_gb = self.store.root, self.evidence.max_gb
        has_bundle = self.evidence.bundle != "off" and raw.layout
        if has_bundle and self.store.size_gb() >= max_gb:
            logger.warning("gradloc: %s holds gradloc.evidence.max_gb=%s or more: no replay bundle", root, max_gb)
        elif has_bundle:
            tensors, layout, note = bundle_tensors(raw, driver.batch)
            records["meta"] = replace(raw.meta, actor=self.trained, layout=layout, event=event, multi_modal_note=note)
        if "meta" not in records:  # a run that is killed before the line is written loses nothing
            records["event"] = event
        event = replace(event, folder=self.store.write_folder(event.event_id, tensors, records, album.files))
        self.store.append(event)
        return event


def keep_weights(
    settings: Any, global_step: int, ranks: Ranks, gather: Callable[[], T], write: Callable[[str, T], None]
) -> str | None:
    """Save the weights that an event happened at; all ranks call this together.

    Args:
        settings: the effective ones.
        global_step: the trainer's.
        ranks: all that hold weights; they wait for each other only to learn whether all have written.
        gather: returns this rank's part of the weights; may communicate.
        write: writes that part into the folder, on this rank's own file system.

    Returns:
        The folder; None where no weights are to be saved, ``evidence.max_gb`` is reached, or a rank could not write.
    """
    if settings.evidence.checkpoint != "before_step":
        return None
    root = settings.root
    size_gb = ranks.run_local_synced(lambda: EventStore(root).size_gb() if ranks.is_first else 0.0)
    if ranks.max([size_gb])[0] >= settings.evidence.max_gb:
        logger.warning("gradloc: %s holds gradloc.evidence.max_gb or more, so no weights are saved", root)
        return None
    folder = os.path.join(root, "weights", f"global_step_{global_step}", "actor")
    try:
        ranks.run_slowly_synced(partial(write, folder, ranks.run_collective(gather)))
    except PeerFailure:
        logger.exception("gradloc: the weights of this event are not kept: some rank could not write to %s", folder)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return folder


def complete_event(
    raw: RawEvent,
    event_id: str,
    run: Run,
    driver: "EventEnricher",
    over_run: dict[str, float] | None = None,
    last_checkpoint: str | None = None,
    endings: Counter[int] | None = None,
) -> Event:
    """Turn what the ranks sent into the record that goes to disk.

    Args:
        over_run: how many times what is typical of the run the batch's robust numbers are.
        last_checkpoint: the newest before this step.
        endings: of each token that was never sampled, in how many events it ended a turn; this one is added.
    """
    batch, tensors = driver.batch, driver.batch.tensors
    typical = _statistics(batch, replace(raw.event.batch, over_run=over_run or None))
    now = {sequence.row: sequence.columns.get("log_prob", ()) for sequence in raw.sequences}
    made_by = run if raw.event.step.stage is None else None  # a stage of Lopti's has some of the advantages
    documents = Documents(batch, driver.tokenizer) if "loss_weights" in tensors.keys() else None
    culprits = []
    for culprit in raw.event.culprits:
        completed = driver.culprit(culprit)
        document = None if documents is None else documents.of(completed)
        by_engine = driver.by_engine(completed.row, now.get(culprit.row, ()))
        culprits.append(replace(completed, cause=classify(completed, typical, by_engine, made_by, document)))
    culprits = _counted_endings(culprits, tensors, Counter() if endings is None else endings)
    event = replace(raw.event, event_id=event_id, run=run, culprits=tuple(culprits), batch=typical)
    if event.consequence is not None:
        event = replace(event, consequence=replace(event.consequence, last_checkpoint=last_checkpoint))
    event = replace(event, cause=_step_cause(event, tensors), mismatch=_mismatch(raw, batch))
    event = replace(event, shares=_shares(raw, batch))
    event = replace(event, cures=cures_for(event))
    return replace(event, verdict=verdict_sentences(event))


def bundle_tensors(
    raw: RawEvent, batch: BatchView
) -> tuple[dict[str, torch.Tensor], tuple[BundleEntry, ...], str | None]:
    """Cut the micro-batches that the actor listed out of the driver's batch.

    Returns:
        Tensors with the listed rows one after the other, their coefficients and multi-modal inputs; which rows of these
        tensors are whose; and why there are no multi-modal inputs, if so.
    """
    rows = [row for entry in raw.layout for row in entry.rows]
    tensors = {key: batch.tensors[key][rows].clone() for key in BUNDLE_KEYS if key in batch.tensors.keys()}
    layout, start = [], 0
    for entry in raw.layout:
        end = start + len(entry.rows)
        layout.append(BundleEntry(entry.rank, entry.micro_batch, (start, end)))
        start = end
    width = tensors["responses"].shape[1]
    for name in ("log_prob_coefficients", "entropy_coefficients"):
        parts = [getattr(entry, name) for entry in raw.layout]
        if all(part is not None for part in parts):  # a rank pads to its own longest
            wide = [pad(torch.tensor(part), (0, width - part.shape[1])) for part in parts]
            tensors[name] = torch.cat(wide)
    inputs, note = kept_inputs(batch, rows)
    return {**tensors, **inputs}, tuple(layout), note


def _step_cause(event: Event, tensors: Any) -> StepCause:
    """Return the cause that the ranks found apart from tokens, else the largest culprit's, else the loss term."""
    cause, batch, first = event.cause, event.batch, event.leader
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
    """Name the batch's tensors (R, T) that are not finite at one of these places."""
    known = [(row, position) for row, position in places if row is not None]
    if not known:
        return ()
    shape, at = tensors["response_mask"].shape, tuple(zip(*known, strict=True))
    keys = [key for key in BUNDLE_KEYS if key in tensors.keys() and tensors[key].shape == shape]
    return tuple(key for key in keys if not torch.isfinite(tensors[key][at]).all())


def _shares(raw: RawEvent, batch: BatchView) -> Shares | None:
    """Add the shares of rows, prompts and data sources to the measured ones: shares add up."""

    def by(name: Callable[[int], Any]) -> tuple[PartShare, ...]:
        parts: dict[str, list[RowShare]] = {}
        for each in raw.row_shares:
            parts.setdefault(str(name(each.row)), []).append(each)
        made = []
        for key, rows in parts.items():
            _, shares, variances, counts = zip(*rows, strict=True)
            made.append(PartShare(key, math.fsum(shares), math.fsum(variances) ** 0.5, len(rows), sum(counts)))
        return tuple(sorted(made, key=lambda part: -abs(part.share))[:_MOST_PARTS])

    shares, labels = raw.event.shares, batch.labels
    if shares is None or not raw.row_shares:
        return shares
    prompts, sources = (by(labels[name].__getitem__) if name in labels else None for name in ("uid", "data_source"))
    return replace(shares, rows=by(lambda row: row), prompts=prompts, sources=sources)


def _mismatch(raw: RawEvent, batch: BatchView) -> Mismatch | None:
    """Return the share of the spike of tokens at which engine and trainer differ by more than noise."""
    tensors, shares = batch.tensors, raw.event.shares
    names = ("rollout_log_probs", "old_log_probs", "response_mask")
    if batch.is_critics or shares is None or not shares.is_trusted or not set(names) <= set(tensors.keys()):
        return None
    rollout, old, mask = (tensors[name].float().numpy() for name in names)
    if (rollout == old)[mask > 0].all():  # the trainer is configured to take the engine's
        return None
    try:
        differing, noise = beyond_noise(rollout, old, mask)
    except MismatchError:  # too few tokens, or no log-probs of the engine
        return None
    carried = (
        share
        for sequence in raw.sequences
        for share, differs in zip(sequence.columns.get("share", ()), differing[sequence.row], strict=False)
        if differs
    )
    return Mismatch(noise, float(differing.sum() / mask.sum()), sum(carried))


def _statistics(batch: BatchView, known: BatchStatistics) -> BatchStatistics:
    """Join the ranks' statistics of the batch with the typical ones of the driver's batch."""
    tensors, mask = batch.tensors, batch.tensors["response_mask"].bool()
    name, values = batch.signal()
    sizes = values[mask].abs()
    sizes = sizes[torch.isfinite(sizes) & (sizes > 0)]
    has_old = "old_log_probs" in tensors.keys() and not batch.is_critics
    probs = tensors["old_log_probs"][mask].float().exp() if has_old else sizes[:0]
    typical: dict[str, Any] = {name: float(sizes.median()) if len(sizes) else 0.0}
    return replace(known, **typical, one_minus_prob=float(1 - probs.nanmean()) if len(probs) else 0.0)


def _counted_endings(culprits: list[Culprit], tensors: Mapping[str, Any], endings: Counter[int]) -> list[Culprit]:
    """Note on each culprit that was never sampled and ends a turn in how many events its token did so."""

    def ending(culprit: Culprit) -> int | None:
        turns = turns_in(tensors["response_mask"][culprit.row].tolist())
        is_last = any(turn.stop - 1 == culprit.peak for turn in turns)
        is_ending = is_last and culprit.cause.label == "not_sampled"
        return int(tensors["responses"][culprit.row, culprit.peak]) if is_ending else None

    tokens = [ending(culprit) for culprit in culprits]
    endings.update({token for token in tokens if token is not None})
    counted = []
    for culprit, token in zip(culprits, tokens, strict=True):
        counts = {} if token is None else {"events_ended": float(endings[token])}
        counted.append(replace(culprit, cause=replace(culprit.cause, numbers={**culprit.cause.numbers, **counts})))
    return counted


class EventEnricher:
    """Adds the driver's part to a culprit's and a sequence's numbers: text, log-probs, rewards, siblings, turns.

    Args:
        batch: the whole.
        tokenizer: decodes the text; None keeps text and prompts out.
        context: tokens of text to keep on either side of a culprit.
    """

    def __init__(self, batch: BatchView, tokenizer: Any, context: int = 0):
        self.batch, self.tokenizer, self._context = batch, tokenizer, context
        self._tensors = batch.tensors
        loss = CRITIC if batch.is_critics else DISTILLED if batch.is_distilled else ACTOR
        known = {name: column.tensor for name, column in STORED.items() if loss in column.losses}
        self._columns = {name: batch.tensors[key] for name, key in known.items() if key in batch.tensors.keys()}
        """The batch's columns of the table of tokens, (R, T) each, by name."""

    def culprit(self, culprit: Culprit) -> Culprit:
        """Complete a culprit from the driver's batch; its cause comes later."""
        row, positions = culprit.row, culprit.positions
        assert row is not None  # the driver numbers the rows
        is_row = self._tensors["responses"].shape[1] == 1 and not self._has_tokens(row)
        own = {name: float(values[row, culprit.peak]) for name, values in self._columns.items() if name in OF_A_TOKEN}
        has_turns = "loss_weight" not in own
        return replace(
            culprit,
            span="sequence" if is_row else culprit.span,
            **self._labels(row),
            values=culprit.values | own,
            data_row=self._data_row(row),
            versions=self.batch.labels[VERSIONS_KEY][row] if VERSIONS_KEY in self.batch.labels else None,
            reward=self._reward(row),
            siblings=self._siblings(row),
            turn=_turn(self._tensors["response_mask"][row].tolist(), positions[0]) if has_turns else None,
            **self._around(row, positions[0], positions[-1]),
        )

    def sequence(self, sequence: SequenceRecord, album: Album) -> SequenceRecord:
        """Return a sequence that holds a culprit, token by token: what the report shades. ``album`` receives its
        pictures.
        """
        row = sequence.row
        assert row is not None  # the driver numbers the rows
        ids = self._response_ids(row)
        tokens = self._tokens_in(ids) if self._has_tokens(row) else None
        columns = sequence.columns | {name: tuple(values[row].tolist()) for name, values in self._columns.items()}
        pictures, note = album.add(inputs_of(self.batch, row)) if tokens is not None else (None, None)
        return replace(
            sequence,
            **self._labels(row),
            prompt=self._decode(self._prompt_ids(row)),
            token_ids=None if tokens is None else tuple(ids),
            tokens=tokens,
            pictures=pictures,
            pictures_note=note,
            columns={name: values[: len(ids)] for name, values in columns.items()},
        )

    def by_engine(self, row: int | None, now: Sequence[float]) -> list[tuple[float, float]]:
        """Return trainer's and rollout engine's log-probs of each token of a row; empty where the latter's are unknown.

        The trainer's log-probs are those before the update, since the policy moves during it, and ``now`` where the
        batch has none: bypass mode stores the engine's as the old ones.
        """
        tensors = self._tensors
        if not now or "rollout_log_probs" not in tensors.keys():
            return []
        mask = tensors["response_mask"][row].bool()
        engines, trainers = tensors["rollout_log_probs"][row][mask], torch.tensor(now)[mask[: len(now)]]
        if "old_log_probs" in tensors.keys() and not torch.equal(tensors["old_log_probs"][row][mask], engines):
            trainers = tensors["old_log_probs"][row][mask]
        return list(zip(trainers.tolist(), engines.tolist(), strict=False))

    # ---- text

    def _decode(self, ids: list[int]) -> str | None:
        """Decode token ids, unknown ones as numbers; None without a tokenizer."""
        return None if self.tokenizer is None else _decoded(self.tokenizer, ids, skip_special_tokens=False)

    def _tokens_in(self, ids: list[int]) -> tuple[str, ...] | None:
        """Decode each token by itself; None without a tokenizer."""
        return None if self.tokenizer is None else tuple(self._decode([token]) or "" for token in ids)

    def _has_tokens(self, row: int) -> bool:
        """Return whether a row is made of tokens."""
        ids = self._tensors["responses"][row][self._tensors["response_mask"][row].bool()]
        return bool((ids != NO_TOKEN).any()) or not len(ids)

    def _prompt_ids(self, row: int) -> list[int]:
        num_response = self._tensors["responses"].shape[1]
        attended = self._tensors["attention_mask"][row].bool()[:-num_response]
        ids = self._tensors["input_ids"][row][:-num_response][attended].tolist()
        if not inputs_of(self.batch, row):
            return ids
        runs = [(token, len(list(run))) for token, run in groupby(ids)]  # a picture takes hundreds of equal tokens
        return [token for token, length in runs for _ in range(1 if length > _PLACEHOLDERS else length)]

    def _response_ids(self, row: int) -> list[int]:
        responses = self._tensors["responses"][row]
        attended = self._tensors["attention_mask"][row][-len(responses) :]
        return responses[: int(attended.sum())].tolist()

    def _around(self, row: int, first: int, last: int) -> dict[str, Any]:
        """Return the text of a span of response positions ``first..last`` and around it, as a culprit's fields."""
        if not self._has_tokens(row):
            return {"token_ids": ()}
        responses = self._tensors["responses"][row].tolist()
        prompt, span = self._prompt_ids(row), responses[first : last + 1]
        before = (prompt + responses[:first])[-self._context :] if self._context else []
        return {
            "token_ids": tuple(span),
            "tokens": self._tokens_in(span),
            "text_before": self._decode(before),
            "text_after": self._decode(self._response_ids(row)[last + 1 : last + 1 + self._context]),
            "prompt": self._decode(prompt),
        }

    # ---- its row

    def _labels(self, row: int) -> dict[str, Any]:
        labels = self.batch.labels
        return {key: str(labels[key][row]) if key in labels else None for key in ("sequence_id", "data_source")}

    def _reward(self, row: int) -> float | None:
        scores = self._tensors["token_level_scores"] if "token_level_scores" in self._tensors.keys() else None
        return None if scores is None else float(scores[row].sum())

    def _data_row(self, row: int) -> int | None:
        """Return the row's index in the dataset; None if unknown: verl then writes 0 for every row."""
        known = self.batch.labels.get("index")
        if known is None or len({str(index) for index in known}) < 2 or not str(known[row]).isdecimal():
            return None
        return int(str(known[row]))

    def _siblings(self, row: int) -> tuple[Sibling, ...] | None:
        """Return the other rows of the same prompt, in the order of the batch; None where the batch has no uids."""
        uids = self.batch.labels.get("uid")
        if uids is None:
            return None
        siblings = []
        for other in (at for at, uid in enumerate(uids) if uid == uids[row] and at != row):
            signal = self.batch.signal()[1][other][self._tensors["response_mask"][other].bool()]
            advantage = float(signal[0]) if len(signal) and "advantages" in self._tensors.keys() else None
            name = self._labels(other)["sequence_id"]
            siblings.append(Sibling(other, name, self._reward(other), advantage, len(signal)))
        return tuple(siblings)


def _turn(mask: list[float], position: int) -> Turn | None:
    turns = turns_in(mask)
    if len(turns) < 2:
        return None
    number = next(at for at, turn in enumerate(turns) if position < turn.stop)
    end_before = turns[number - 1].stop if number else 0
    return Turn(number + 1, len(turns), turns[number].start - end_before)


# ---- of a loop without advantages


def _decoded(tokenizer: Any, ids: list[int], **how: Any) -> str:
    """Return the text of token ids: numbers where the tokenizer raises, and nothing that UTF-8 cannot hold."""
    try:
        text = tokenizer.decode(ids, **how)
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    except (Exception, SystemExit):
        return " ".join(f"<{token}>" for token in ids)
    return text[: 1000 * len(ids)].encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Documents:
    """Compares a culprit's row with the batch's others, in a batch that has ``log_probs`` (R, T), where logits were
    seen ``ranks`` and ``shifted`` (R, T), and where inputs were ``broken_inputs`` (R, T).

    Args:
        batch: of a loop.
        tokenizer: decodes the rows; None: nothing is said of their text.
    """

    def __init__(self, batch: BatchView, tokenizer: Any):
        tensors = batch.tensors
        self._tensors, self._mask = tensors, tensors["response_mask"].bool()
        self._pad = getattr(tokenizer, "pad_token_id", None)
        are_tokens = self._mask & (tensors["responses"] != NO_TOKEN)
        self._rows = [ids[kept].tolist() for ids, kept in zip(tensors["responses"], are_tokens, strict=True)]
        self._log_probs = [self._mean("log_probs", row) for row in range(len(self._rows))]
        texts = ["" if tokenizer is None else _decoded(tokenizer, ids) for ids in self._rows]
        self._looks = {
            "tokens": [float(len(ids)) for ids in self._rows],
            "repeats": [repeats_in(ids) for ids in self._rows],
            "foreign": [foreign_in(text) for text in texts],
            "unspaced": [unspaced_in(text) for text in texts],
        }

    def of(self, culprit: Culprit) -> Document | None:
        """Return the document of a culprit's row; None of a row without tokens whose input is sound."""
        row, ids = culprit.row, self._rows[culprit.row or 0]
        assert row is not None  # the driver numbers the rows
        broken = int(self._tensors["broken_inputs"][row].sum()) if "broken_inputs" in self._tensors.keys() else 0
        if culprit.token_ids == () and not broken:
            return None
        others = [at for at in range(len(self._rows)) if at != row] or [row]
        looks = {name: values[row] for name, values in self._looks.items()}
        usual = {f"{n}_of_batch": statistics.median(v[at] for at in others) for n, v in self._looks.items()}
        known = [value for at in others if (value := self._log_probs[at]) is not None]
        return Document(
            **looks,
            **usual,
            log_prob=self._log_probs[row],
            log_prob_of_batch=statistics.median(known) if known else None,
            log_prob_shifted=self._mean("shifted", row),
            copies=sum(other == ids for other in self._rows) - 1 if ids else 0,
            rows=len(self._rows),
            padding=self._padding(culprit),
            broken=broken,
            rank=self._at("ranks", culprit),
        )

    def _mean(self, name: str, row: int) -> float | None:
        if name not in self._tensors.keys():
            return None
        values = self._tensors[name][row][self._mask[row]]
        values = values[torch.isfinite(values)]
        return float(values.mean()) if len(values) else None

    def _at(self, name: str, culprit: Culprit) -> int | None:
        if name not in self._tensors.keys() or culprit.peak is None:
            return None
        value = int(self._tensors[name][culprit.row, culprit.peak])
        return value if value >= 0 else None

    def _padding(self, culprit: Culprit) -> int:
        """Count the equal tokens that end the trained part of the row, the culprit among them; where the tokenizer has
        a padding token, only those."""
        ids, last = self._rows[culprit.row or 0], (culprit.token_ids or (-1,))[-1]
        if not ids or last != ids[-1] or self._pad not in (None, last):
            return 0
        return next((at for at, token in enumerate(reversed(ids)) if token != last), len(ids))
